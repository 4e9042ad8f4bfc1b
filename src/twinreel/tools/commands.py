"""`compare`, `validate` and `quantize` from their flags to what is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError
from ..output import write_probe
from ..small_files import why
from ..tool_flags import Compare, Quantize, Validate
from ..watch import Event
from . import against, pareto
from .compare import compare, summary, write_json
from .frozen import Named, more_seeds, short
from .setups import Setup, parse_setup
from .validate import read_requests, table, validate

APART = 1


@dataclass(frozen=True)
class Outcome:
    """Every figure as plain JSON values, the same for people, and the exit code."""

    result: Mapping[str, Any]
    text: str
    code: int = 0


def run_compare(command: Compare) -> Outcome:
    """`twinreel compare`. Raises RequestError."""
    check_targets({"output": command.output, "page": command.page}, (command.a, command.b))
    result = compare(command.a, command.b, command.page, not command.no_ssim)
    if command.output is not None:
        write_json(command.output, result)
    return Outcome(result, summary(result))


def run_quantize(command: Quantize) -> Outcome:
    """`twinreel quantize`. Raises RequestError, ConfigError, CheckpointError."""
    from ..weights.quantize import quantize

    def tell(path: str) -> None:
        if not command.report.quiet:
            print(f"twinreel: writing {path}", file=sys.stderr)

    facts = quantize(command.source, command.target, command.blocks, tell)
    return Outcome(facts, "\n".join(f"{name:12}  {value}" for name, value in facts.items()))


def run_validate(command: Validate) -> Outcome:
    """`twinreel validate` in its three forms. Raises RequestError, ConfigError and what engines raise."""
    read = [Path(text) for text in (command.requests, command.base, command.test) if text]
    check_targets({"output": command.output, "pareto": command.pareto}, read)
    base, requests = _base(command), _requests(command)
    tell = _Progress(command.report.quiet)
    if command.against is not None:
        if command.against != "diffusers":
            raise ConfigError(f"against: got {command.against!r}; the one implementation known is diffusers")
        report = against.against_diffusers(base.engine, requests, tell)
        outcome = Outcome(report, against.table(report), 0 if report["identical"] else APART)
    elif command.pareto is not None:
        report = pareto.pareto(base, requests, tell)
        _write(command.pareto, pareto.draw(report))
        outcome = Outcome(report, pareto.table(report))
    else:
        test = parse_setup(command.test, base)
        if test == base:
            raise ConfigError("test: is the same as the base; say what to test, such as --test policy=forecast")
        report = validate(base, test, requests, bounds=command.bounds, matrix=command.matrix, watch=tell)
        outcome = Outcome(report, table(report), APART if report["verdict"] == "apart" else 0)
    if command.output is not None:
        write_json(command.output, report)
    return outcome


RUNS: Mapping[type, Callable[[Any], Outcome]] = {
    Compare: run_compare,
    Validate: run_validate,
    Quantize: run_quantize,
}


def check_targets(targets: Mapping[str, Path | None], read: Sequence[Path]) -> None:
    """Refuse, before the work, files that could not be written after it, or are among what is `read`. RequestError."""
    for field, path in targets.items():
        if path is None:
            continue
        try:
            if any(path.samefile(other) for other in read if path.exists() and other.exists()):
                raise RequestError(field, f"{path} would take the place of what is read; name another")
            if path.is_dir():
                raise RequestError(field, f"{path} is a folder; name a file")
            if path.is_file() or not path.exists():
                write_probe(path)
        except OSError as error:
            raise RequestError(field, f"{path} cannot be written ({why(error)}); name another") from None


def _base(command: Validate) -> Setup:
    base = parse_setup(command.base)
    if command.model is None:
        return base
    if base.engine.model is not None:
        raise ConfigError("model: stands in --base too; give it once")
    return replace(base, engine=replace(base.engine, model=command.model))


def _requests(command: Validate) -> tuple[Named, ...]:
    requests = read_requests(command.requests) + more_seeds(command.more_seeds)
    known = {named.name: named for named in requests}
    for name in command.only:
        if name not in known:
            raise RequestError("only", f"no request {name}; known are {', '.join(known)}")
    kept = [named for named in requests if not command.only or named.name in command.only]
    return short(kept, command.steps, command.duration)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError("pareto", f"{path} cannot be written: {error.strerror}") from None


class _Progress:
    """A line for every finished request, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.runs = quiet, 0

    def __call__(self, event: Event) -> None:
        if event.stage == "denoise" and event.done == event.total:
            self.runs += 1
            if not self.quiet:
                print(f"twinreel: run {self.runs}: {event.total} steps in {event.seconds:.1f} s", file=sys.stderr)
