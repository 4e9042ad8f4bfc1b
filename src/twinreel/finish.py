"""From latents to a verified file: nothing that was sampled is lost on the way."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from .beside import beside
from .config import EngineConfig
from .decoding import decode
from .output import OutputOptions, latents_path
from .output.latents import Latents, save_latents
from .output.report import without_private, write_report
from .output.write import Written, write_media
from .parts import Parts
from .watch import Stages

NAMED_ALREADY = ("model", "components", "allow_remote")  # the last: decoding fetches nothing


@dataclass(frozen=True)
class Ending:
    """Where a run is to end: the file, its options, the engine's configuration, and the run's report so far.

    `source` is the latents file that is being decoded, None for a run that has just sampled.
    """

    target: Path
    output: OutputOptions
    config: EngineConfig
    report: Mapping[str, Any]
    source: Path | None = None

    def command(self, latents: Path) -> str:
        """What a person types to finish it."""
        words = ["twinreel", "decode", str(latents), "-o", str(self.target)]
        words += ["--model", self.config.model] if self.config.model else []
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
    the decode goes on, since it is then the only way not to lose them.
    """

    def __init__(self, latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> None:
        self._latents, self._parts, self._stages, self._ending = latents, parts, stages, ending
        self.path: Path | None = ending.source
        self.fault: str | None = None
        self.keep = False

    def __enter__(self) -> Keeping:
        if self.path is not None:
            return self
        beside = latents_path(self._ending.target)
        for path in (beside, Path(tempfile.gettempdir()) / beside.name):
            try:
                if path is not beside and path.exists():  # of another run, and nobody said that it may go
                    path = Path(tempfile.mkdtemp(prefix="twinreel-")) / beside.name
                self._save(path)
            except OSError as error:
                self.fault = f"latents: not kept in {path.parent} ({error.strerror or error})"
            else:
                self.path = path
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            if self.path is not None and not self.keep:
                self.path.unlink(missing_ok=True)
        elif self.path is not None:
            error.add_note(f"the latents are kept in {self.path}; finish with: {self._ending.command(self.path)}")
        elif self.fault:
            error.add_note(self.fault)

    def _save(self, path: Path) -> None:
        ending, private = self._ending, self._ending.output.private
        report = {**ending.report, "stages": self._stages.records}
        facts = dict(self._latents.facts)
        if private:
            hidden = without_private({"report": report, "facts": facts}, (str(ending.target),))
            report, facts = hidden["report"], hidden["facts"]
        latents = Latents(self._latents.plan, self._latents.video, self._latents.audio, facts)
        save_latents(path, latents, report, self._parts.spec, private)


def finish(latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> dict[str, Any]:
    """Keep `latents`, decode them into the file, read it back, write its report, let the latents go.

    Returns the report: `faults` lists what is wrong with a file that was written all the same; then the latents stay
    and `latents` says where. Raises what decoding and writing raise, with a note that names latents and command.
    """
    target, output = ending.target, ending.output
    with Keeping(latents, parts, stages, ending) as keeping:
        written = _write(latents, parts, stages, ending)
        earlier = ending.report.get("stages", {})
        report = {**ending.report, **latents.facts, "stages": {**earlier, **stages.records}}
        report |= {**written.facts(output), "path": str(target)}
        if keeping.fault:
            report["warnings"] = [*report.get("warnings", ()), keeping.fault]
        if written.faults:
            keeping.keep = True
            report["latents"] = str(keeping.path)
        if output.private:
            write_report(target, without_private(report, (str(target), str(keeping.path))))
        else:
            write_report(target, report)
    return report


def has_picture(target: Path) -> bool:
    """Whether a file of that name holds frames."""
    return target.suffix.lower() != ".wav"


def _write(latents: Latents, parts: Parts, stages: Stages, ending: Ending) -> Written:
    plan, output = latents.plan, ending.output
    picture = has_picture(ending.target)
    seconds = plan.asked_seconds if output.exact_seconds else None
    with closing(decode(latents, parts, stages, picture=picture)) as stream:
        waveform = next(stream)
        write = partial(write_media, ending.target, frames=plan.frames, seconds=seconds, stage=stages.stage)
        written = beside(lambda clips: write(clips, waveform, output), stream)
    if broken := latents.facts["decode"].get("not_finite"):
        fault = f"picture: {broken} of its values are not finite and come out black"
        return replace(written, faults=(fault, *written.faults))
    return written
