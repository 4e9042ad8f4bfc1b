"""The command line: `generate`, `verify`, `doctor`.

Exit codes: 0, 2 for the person's request (bad flags included), 3 for the operator's configuration, 4 for the weights,
1 for the rest. Results go to stdout, progress and errors to stderr; with `--json` stdout gets exactly one line.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import Cancelled, RequestError, TwinreelError

if TYPE_CHECKING:
    from .flags import Doctor, Generate, ReportFlags, Verify

STAND_IN = (
    "no --model: using a miniature with random weights. It runs the whole program, but what comes out is noise, "
    "to look at and to listen to; turn the volume down."
)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `words` is the command line without the program's name."""
    from .flags import Doctor, Generate, parse

    command = parse(words)
    try:
        if isinstance(command, Generate):
            return generate(command)
        return doctor(command) if isinstance(command, Doctor) else verify(command)
    except KeyboardInterrupt:
        return complain("Interrupted", "stopped by the keyboard", 1, command.report)
    except Exception as error:  # the edge of the process: whatever it was ends here as a message and an exit code
        if command.report.traceback:
            traceback.print_exc()
        return complain(type(error).__name__, message(error), exit_code(error), command.report, error)


def exit_code(error: BaseException) -> int:
    """2, 3 or 4 for the three errors a person can meet, 1 for anything else."""
    return error.exit_code if isinstance(error, TwinreelError) else 1


def message(error: BaseException) -> str:
    """What to tell a person about `error`."""
    if isinstance(error, TwinreelError):
        return str(error)
    if isinstance(error, Cancelled):
        return "the request was cancelled"
    return f"unexpected {type(error).__name__}: {error} (run again with --traceback to see where)"


def complain(kind: str, text: str, code: int, report: ReportFlags, error: BaseException | None = None) -> int:
    """Print an error for people to stderr, and with --json for programs to stdout; returns `code`."""
    print(f"twinreel: {text}", file=sys.stderr)
    if report.json:
        field = error.field if isinstance(error, RequestError) else None
        put({"ok": False, "error": kind, "field": field, "message": text, "exit": code})
    return code


def put(result: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps(result, default=str), flush=True)


def generate(command: Generate) -> int:
    """`twinreel generate`: settle everything that needs no weights, run, then say where the file is."""
    from .output import OutputOptions, check_output
    from .progress import progress

    request = command.request.build()
    config = command.engine.build()
    output = OutputOptions(crf=command.crf, preset=command.preset)
    check_output(command.output, output)  # before a model is looked for: a slip of the pen is answered at once
    from .engine import Engine

    if config.model is None and not config.components:
        print(f"twinreel: {STAND_IN}", file=sys.stderr)
    engine = Engine(config)
    with progress(command.report.quiet) as watch:
        report = engine.render(request, command.output, output, watch)
    if command.report.json:
        put({"ok": True} | result(report))
    else:
        print(summary(report))
    return 0


def result(report: dict[str, Any]) -> dict[str, Any]:
    """The facts of a finished run that fit on a line; the rest is in the report beside the file."""
    plan = report["plan"]
    chosen = {name: plan[name] for name in ("task", "canvas", "frames", "seconds", "steps", "calls", "seed")}
    timed = {name: round(record["seconds"], 3) for name, record in report["stages"].items()}
    return {"output": report["path"], **chosen, "sha256": report["sha256"], "stages": timed}


def summary(report: dict[str, Any]) -> str:
    """`out.mp4: 1344x768, 124 frames (5.17 s), 50 steps = 49 calls, seed 42, made in 63.2 s`."""
    from .progress import spoken

    plan = report["plan"]
    size = "x".join(str(side) for side in plan["canvas"])
    spent = sum(record["seconds"] for record in report["stages"].values())
    facts = [
        size,
        f"{plan['frames']} frames ({plan['seconds']:.2f} s)",
        f"{plan['steps']} steps = {plan['calls']} calls",
        f"seed {plan['seed']}",
        f"made in {spoken(spent)}",
    ]
    return f"{report['path']}: {', '.join(facts)}"


def verify(command: Verify) -> int:
    """`twinreel verify PATH`: the weights against their config files and, where there is one, their manifest."""
    from .weights import verify as check

    result = check(command.path, write_manifest=command.write_manifest)
    if command.report.json:
        put({"ok": True, **result})
    else:
        show(result)
    return 0


def doctor(command: Doctor) -> int:
    """`twinreel doctor`: every choice, what it would be on this machine, and why. Loads no weight."""
    from .doctor import examine

    facts = examine(command.engine.build())
    if command.report.json:
        put({"ok": True, **facts})
    else:
        show(facts)
    return 0


def show(result: dict[str, Any], indent: str = "") -> None:
    """Nested facts as aligned lines on stdout."""
    width = max((len(str(name)) for name in result), default=0)
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            text = ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else value
            print(f"{indent}{name!s:<{width}}  {'absent' if text is None else text}")
