"""`compare`, `validate` and `quantize` from their flags to what is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError
from ..launch import stand_alone
from ..limits import counted, shown
from ..tool_flags import Compare, Quantize, Validate
from ..watch import Event
from . import against, pareto
from .compare import compare, summary
from .frozen import Named, more_seeds, short
from .setups import Setup, is_file_name, parse_setup
from .targets import Targets, json_text, not_finite_line, plain
from .validate import read_requests, table, validate

APART = 1


@dataclass(frozen=True)
class Outcome:
    """Every figure as plain JSON values, the same for people, the exit code, and files that could not be written."""

    result: Mapping[str, Any]
    text: str
    code: int = 0
    unwritten: Sequence[Mapping[str, str]] = field(default_factory=list)


def run_compare(command: Compare) -> Outcome:
    """`twinreel compare`. Raises RequestError."""
    targets = Targets({"output": command.output, "page": command.page}, (command.a, command.b), command.overwrite)
    result = compare(command.a, command.b, command.page, not command.no_ssim, write=targets.write)
    if command.output is not None:
        targets.write(command.output, json_text(result))
    return Outcome(result, summary(result), unwritten=targets.unwritten)


def run_quantize(command: Quantize) -> Outcome:
    """`twinreel quantize`. Raises RequestError, ConfigError, CheckpointError."""
    stand_alone("quantize")
    from ..weights.quantize import quantize

    def tell(path: str) -> None:
        if not command.report.quiet:
            print(f"twinreel: writing {path}", file=sys.stderr)

    facts = quantize(command.source, command.target, command.blocks, tell)
    return Outcome(facts, "\n".join(f"{name:12}  {value}" for name, value in facts.items()))


def run_validate(command: Validate) -> Outcome:
    """`twinreel validate` in its three forms. Raises RequestError, ConfigError and what engines raise."""
    stand_alone("validate")
    base, requests = _base(command), _requests(command)
    test = parse_setup(command.test, base)
    needed = [path for setup in (base, test) for path in setup.reads(requests)]
    needed += [Path(text) for text in (command.requests, command.base, command.test) if is_file_name(text)]
    if command.pareto is not None and command.pareto.suffix.lower() != ".svg":
        raise RequestError("pareto", f"{shown(str(command.pareto))} does not end in .svg; name the SVG file to draw")
    targets = Targets({"output": command.output, "pareto": command.pareto}, needed, command.overwrite)
    tell = _Progress(command.report.quiet)
    code = 0
    if command.against is not None:
        if command.against != "diffusers":
            raise ConfigError(f"against: got {shown(command.against)}; the one implementation known is diffusers")
        if (base.policy, base.steps) != (Setup.policy, Setup.steps):
            raise ConfigError("base: has a policy or steps, which --against does not run; leave them out, use --steps")
        report = plain(against.against_diffusers(base.engine, requests, tell))
        text, code = against.table(report), 0 if report["identical"] else APART
    elif command.pareto is not None:
        report = plain(pareto.pareto(base, requests, tell, command.workers))
        targets.write(command.pareto, pareto.draw(report))
        text = pareto.table(report)
    else:
        if test == base:
            raise ConfigError("test: is the same as the base; say what to test, such as --test policy=forecast")
        report = plain(validate(base, test, requests, bounds=command.bounds, matrix=command.matrix, watch=tell))
        text, code = table(report), APART if report["verdict"] == "apart" else 0
    if command.output is not None:
        targets.write(command.output, json_text(report))
    return Outcome(report, "\n".join([text, *not_finite_line(report)]), code, targets.unwritten)


RUNS: Mapping[type, Callable[[Any], Outcome]] = {
    Compare: run_compare,
    Validate: run_validate,
    Quantize: run_quantize,
}


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


class _Progress:
    """A line for every finished request, on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.runs = quiet, 0

    def __call__(self, event: Event) -> None:
        if event.stage == "denoise" and event.done == event.total:
            self.runs += 1
            if not self.quiet:
                made = counted(event.total, "call")
                print(f"twinreel: run {self.runs}: {made} in {event.seconds:.1f} s", file=sys.stderr)
