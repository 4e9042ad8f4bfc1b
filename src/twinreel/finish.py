"""From latents to a verified file: nothing that was sampled is lost on the way."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from .beside import beside
from .config import EngineConfig
from .decoding import decode
from .errors import RequestError
from .output import OutputOptions, is_taken, latents_path, sidecar_path
from .output.latents import Latents, save_latents
from .output.placing import drop_latents, hold, numbered
from .output.report import without_private, write_report
from .output.write import Written, has_picture, write_media
from .parts import Parts
from .watch import Stages

NAMED_ALREADY = ("model", "components", "allow_remote")  # the last: decoding fetches nothing


@dataclass(frozen=True)
class Ending:
    """Where a run is to end: the file, its options, the engine's configuration, and the run's report so far.

    `source` is the latents file that is being decoded, None for a run that has just sampled. `kept` hears what an error
    would say of the latents from when they are in a file, and nothing ("") once they are not needed any more.
    """

    target: Path
    output: OutputOptions
    config: EngineConfig
    report: Mapping[str, Any]
    source: Path | None = None
    kept: Callable[[str], object] = lambda told: None

    def command(self, latents: Path) -> str:
        """What a person types to finish it."""
        words = ["twinreel", "decode", str(latents), "-o", str(self.target)]
        words += ["--model", str(self.config.model)] if self.config.model else []
        for name, path in self.config.components.items():
            words += ["--component", f"{name}={path}"]
        for options in (self.config, self.output):
            for option in fields(options):
                value = getattr(options, option.name)
                if option.name not in NAMED_ALREADY and value != option.default:
                    flag = "--no-audio" if option.name == "audio" else f"--{option.name.replace('_', '-')}"
                    words += [flag] if isinstance(value, bool) else [flag, str(value)]
        return shlex.join(words)


class Keeping:
    """The latents lie in a file inside the block; it is removed after success and named in the note of any error.

    Beside the target, or where that fails in the folder for temporary files. When neither takes them, `fault` says so:
    the decode goes on, since it is then the only way not to lose them. Where the target or what stands beside it was
    taken meanwhile, `ending` has the next number of its name that is free, and the latents keep that for it. `left` says
    why they could not be removed.
    """

    def __init__(self, latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> None:
        self._latents, self._parts, self._stages = latents, parts, stages
        self.ending = ending
        self.path: Path | None = ending.source
        self.fault: str | None = None
        self.left: str | None = None
        self.keep = False
        self._held: BinaryIO | None = None

    def __enter__(self) -> Keeping:
        if self.path is not None:
            self._held = _in_use(self.path)
            self.ending.kept(self._told())
            return self
        for place, save in (
            ("beside the output", self._beside),
            ("in the folder for temporary files", self._elsewhere),
        ):
            try:
                save()
            except OSError as error:  # a report that is private names no folder
                self.fault = f"latents: not kept {place} ({error.strerror or error})"
            else:
                self.ending.kept(self._told())
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.ending.kept("")
            if self.path is not None and not self.keep:
                try:
                    if self._there():
                        self.path.unlink(missing_ok=True)
                except OSError as refusal:
                    self.left = f"latents: {self.path} is done with, and stays ({refusal.strerror or refusal})"
        elif self.path is not None and (self._found() or self._rescued()):
            error.add_note(self._told())
        elif self.fault:
            error.add_note(self.fault)
        if self._held is not None:
            self._held.close()

    def written(self, path: Path) -> None:
        """The file has its name, `path`: who finishes it anew from here on replaces it."""
        self.ending = replace(self.ending, target=path, output=replace(self.ending.output, overwrite=True))
        if self.path is not None:
            self.ending.kept(self._told())

    def _told(self) -> str:
        assert self.path is not None
        return f"the latents are kept in {self.path}; finish with: {self.ending.command(self.path)}"

    def _there(self) -> bool:
        """Whether what bears the latents' name is still the file that was written or read here. OSError: nobody can say."""
        assert self.path is not None and self._held is not None
        try:
            return os.path.samestat(os.fstat(self._held.fileno()), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _found(self) -> bool:
        try:
            return self._there()
        except OSError:  # on a file system that no longer answers, say
            return False

    def _rescued(self) -> bool:
        """Whether latents whose file was taken away could be kept elsewhere."""
        assert self.path is not None
        self.fault = f"latents: {self.path} was taken away meanwhile"
        if self._held is not None:
            self._held.close()
        try:
            self._elsewhere()
        except OSError as error:
            self.fault += f", and nothing is kept in {tempfile.gettempdir()} ({error.strerror or error})"
            self.ending.kept("")
            return False
        self.ending.kept(self._told())
        return True

    def _beside(self) -> None:
        ending, overwrite = self.ending, self.ending.output.overwrite
        for target in numbered(ending.target):
            path = latents_path(target)
            names = (path,) if overwrite else (path, target, sidecar_path(target))
            try:
                if overwrite and target == ending.target:
                    drop_latents(path)
                if not any(map(is_taken, names)):
                    self._save(path)
                    self.ending = ending if overwrite else replace(ending, target=target)
                    return
            except (FileExistsError, BlockingIOError):
                continue

    def _elsewhere(self) -> None:
        for target in numbered(Path(tempfile.gettempdir()) / self.ending.target.name):
            try:
                return self._save(latents_path(target))
            except FileExistsError:  # of another run, and nobody said that it may go
                continue

    def _save(self, path: Path) -> None:
        ending, private = self.ending, self.ending.output.private
        report = {**ending.report, "stages": self._stages.records}
        facts = dict(self._latents.facts)
        if private:
            hidden = without_private({"report": report, "facts": facts}, (str(ending.target),))
            report, facts = hidden["report"], hidden["facts"]
        latents = Latents(self._latents.plan, self._latents.video, self._latents.audio, facts)
        self._held = save_latents(path, latents, report, self._parts.spec, private)
        self.path = path


def check_unused(latents: Path) -> None:
    """Raises RequestError for latents that another run is finishing, as that run's own `finish` would."""
    if latents.is_file():
        _in_use(latents).close()


def _in_use(latents: Path) -> BinaryIO:
    """`hold` for the latents that a person names."""
    try:
        return hold(latents)
    except BlockingIOError:
        raise RequestError("latents", f"another run is finishing {latents}; wait for it, or end it") from None


def finish(latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> dict[str, Any]:
    """Keep `latents`, decode them into the file, read it back, write its report, let the latents go.

    Returns the report: `faults` lists what is wrong with a file that was written all the same; then the latents stay
    and `latents` says where, if anywhere. Its `path` is not the target, and `warnings` say so, where that was taken
    meanwhile; so they do of the report's own name. Raises what decoding and writing raise, with a note that names latents
    and command.
    """
    target, output = ending.target, ending.output
    with Keeping(latents, parts, stages, ending) as keeping:
        written = _write(latents, parts, stages, keeping.ending)
        path = written.path
        keeping.written(path)
        earlier = ending.report.get("stages", {})
        report = {**ending.report, **latents.facts, "stages": {**earlier, **stages.records}}
        report |= {**written.facts(output), "path": str(path)}
        moved = f"output: {target} was taken while this was made; it is {path}" if path != target else None
        _warn(report, keeping.fault, moved)
        if written.faults and keeping.path is not None:
            keeping.keep = True
            report["latents"] = str(keeping.path)
        told = without_private(report, (str(target), str(path), str(keeping.path))) if output.private else report
        usual, made = sidecar_path(path), write_report(path, told, overwrite=output.overwrite and path == target)
    moved = f"report: {usual} was taken while this was made; it is {made}" if made != usual else None
    _warn(report, moved, keeping.left)
    return report


def _warn(report: dict[str, Any], *warnings: str | None) -> None:
    if found := [warning for warning in warnings if warning]:
        report["warnings"] = [*report.get("warnings", ()), *found]


def _write(latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> Written:
    plan, output = latents.plan, ending.output
    picture = has_picture(ending.target)
    seconds = plan.asked_seconds if output.exact_seconds else None
    with closing(decode(latents, parts, stages, picture=picture)) as stream:
        waveform = next(stream)
        write = partial(write_media, ending.target, frames=plan.frames, seconds=seconds)

        def work(clips: Iterator[np.ndarray]) -> Written:
            def ready() -> None:
                deque(clips, 0)  # those that are cut off: a decode that fails or is cancelled leaves no file
                stages.tell(1, 1)

            return write(clips, waveform, output, ready=ready)

        written = beside(work, stream, rest=stages.stage("mux"))
    if broken := latents.facts["decode"].get("not_finite"):
        fault = f"picture: {broken} of its values are not finite and come out black"
        return replace(written, faults=(fault, *written.faults))
    return written
