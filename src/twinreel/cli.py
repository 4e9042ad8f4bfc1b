"""The command line: `generate`, `decode`, `plan`, `verify`, `doctor`, `compare`, `validate`, `quantize`, `bench`,
`serve`, `completion`.

Exit codes: 0, 2 for the person's request (bad flags included), 3 for the operator's configuration, 4 for the weights,
5 when a file was written whose picture or sound is at fault, 130 and 143 after Ctrl-C and SIGTERM, 1 for the rest.
Results go to stdout, progress and errors to stderr; with `--json` stdout gets exactly one line. `outlets` has the rule
for a stdout or stderr that takes nothing.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from .complaint import Complaint, explain
from .errors import Cancelled, RequestError, TwinreelError
from .launch import wait_asleep
from .limits import counted
from .watch import pass_by

if TYPE_CHECKING:
    from .engine import Engine
    from .flags import Decode, Doctor, EngineFlags, Generate, Plan, ReportFlags, Verify
    from .tool_flags import Compare, Quantize, Validate
    from .watch import Event, Watch

STOPPED = 128  # plus the signal's number, as shells count
FAULTY = 5


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `words` is the command line without the program's name."""
    from .outlets import Outlets
    from .stopping import stoppable

    wait_asleep()
    given, last = list(sys.argv[1:] if words is None else words), words is None
    with Outlets() as outlets:
        with stoppable(last, partial(interrupted, words=given) if last else None):
            code = answer(given)
        return outlets.settle(code)


def answer(words: Sequence[str]) -> int:
    """Understand and run `words`; the exit code of either."""
    try:
        if words == ["--version"]:
            from . import __version__

            print(f"twinreel {__version__}")
            return 0
        return run(understand(words), words)
    except SystemExit as end:  # after help, or a flag that is none
        if isinstance(end.code, Complaint):
            return say("Usage", end, RequestError.exit_code, end.code, "--json" in words)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt as error:  # before the words were understood, or while an error was being explained
        return interrupted(error, words)


def understand(words: Sequence[str]) -> Any:
    """The command that `words` are, as a dataclass of flags. SystemExit: 0 after help, the Complaint for a bad flag."""
    from .flag_errors import complaint_of
    from .flags import Command, Completion, ReportFlags, parse
    from .serve.flags import COMMANDS as SERVE
    from .tool_flags import COMMANDS, Bench

    if words and words[0] == "bench":  # it has flags of its own, because it runs where tyro is not installed
        own = [word for word in words[1:] if word != "--traceback"]
        return Bench(tuple(own), ReportFlags("--json" in own, traceback=len(own) < len(words) - 1))
    more = (*COMMANDS, *SERVE)
    try:
        with redirect_stderr(io.StringIO()) as told:
            command = parse(words, more)
    except SystemExit as end:
        known = (*get_args(Command), *more)
        raise SystemExit(complaint_of(told.getvalue(), words, known) if end.code == 2 else end.code) from None
    if isinstance(command, Completion):
        return parse(["--tyro-print-completion", command.shell], more)  # prints it and leaves with 0
    return command


def run(command: Any, words: Sequence[str] = ()) -> int:
    """Run a command that `words` say, and return its exit code; whatever it raises is explained on stderr."""
    from .flag_words import check_words

    try:
        check_words(words, command)
        return perform(command)
    except Exception as error:  # the edge of the process: whatever it was ends here as a message and an exit code
        if command.report.traceback:
            traceback.print_exc()
        return complain(type(error).__name__, error, exit_code(error), command)


def perform(command: Any) -> int:
    """What each command does; the exit code. Raises whatever went wrong."""
    from .flags import Decode, Doctor, Generate, Plan
    from .serve.flags import Serve
    from .tool_flags import Bench, Compare, Quantize, Validate

    if isinstance(command, Generate):
        return generate(command)
    if isinstance(command, Decode):
        return decode(command)
    if isinstance(command, Plan):
        return plan(command)
    if isinstance(command, Compare | Validate | Quantize):
        return run_tool(command)
    if isinstance(command, Bench):
        from .tools import bench

        return bench.perform(command.words)
    if isinstance(command, Serve):
        from .serve.commands import serve

        return serve(command)
    return doctor(command) if isinstance(command, Doctor) else verify(command)


def exit_code(error: BaseException) -> int:
    """2, 3 or 4 for the three errors a person can meet, 128 and the signal for a run that one stopped, otherwise 1."""
    if isinstance(error, Cancelled) and error.signal is not None:
        return STOPPED + error.signal
    return error.exit_code if isinstance(error, TwinreelError) else 1


def interrupted(error: KeyboardInterrupt, words: Sequence[str]) -> int:
    """Say that a signal ended the command of `words` where it stood; the exit code."""
    number, told = getattr(error, "signal", signal.SIGINT), explain(error, command=next(iter(words), ""))
    return say("Interrupted", error, STOPPED + number, told, "--json" in words)


def complain(kind: str, error: BaseException, code: int, command: Any) -> int:
    """Say what `error` means to whoever gave `command`; returns `code`."""
    from .flags import Generate, Plan, flag_names
    from .request_json import named_in_json

    if isinstance(error, RequestError) and isinstance(command, Generate | Plan) and command.request.request is not None:
        error = named_in_json(error)  # the file's words, not the flags'
    told = explain(error, flag_names(command), type(command).__name__.lower())
    return say(kind, error, code, told, command.report.json)


def say(kind: str, error: BaseException, code: int, told: Complaint, as_json: bool) -> int:
    """Print an error for people to stderr, in three lines, and with --json for programs to stdout; returns `code`."""
    print(told, file=sys.stderr)
    if as_json:
        field = error.field if isinstance(error, RequestError) else None
        ours = isinstance(error, TwinreelError)
        text = str(error) if ours else f"{told.what}: {told.why}"
        message = "\n".join([text, *getattr(error, "__notes__", ())])
        parts = {"what": told.what, "why": told.why, "remedy": told.remedy}
        put({"ok": False, "error": kind, "field": field, "message": message, **parts, "exit": code})
    return code


def put(result: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps(result, default=str), flush=True)


def generate(command: Generate) -> int:
    """`twinreel generate`: settle everything that needs no weights, run, then say where the file is."""
    from .output import check_output

    if command.server is not None:
        return generate_there(command)
    request = command.request.build()
    command.engine.build()
    output = command.writing.build()
    # before a model is looked for: a slip is answered at once
    check_output(command.output, output, needed=command.needed(request))
    trace = None
    if command.trace is not None and leads():
        from .tools.trace import Trace

        trace = Trace(command.trace, command.trace_every_step)
    follow = trace if command.trace is None or leads() else pass_by
    with running(command.engine, command.report) as (engine, watch):
        report = engine.render(request, command.output, output, watch, follow)
    code = tell(report, command.report)  # before the manifest, whose fault would hide it
    if trace is not None:
        try:
            trace.finish(report)
        except RequestError as error:
            told = explain(error)
            print(Complaint("the trace was not finished, the file was", told.why, told.remedy), file=sys.stderr)
            return code or 1
    return code


def generate_there(command: Generate) -> int:
    """`twinreel generate --server`: the same request, run by a server."""
    from .serve.commands import generate as run

    job = run(command)
    warn(job)
    if command.report.json:
        put({"ok": True, "output": job["path"], "job": job})
    else:
        print(f"{job['path']}: {job['size']}, {job['seconds']} s, seed {job['seed']}, made in {job['took']:.1f} s")
    return 0


def decode(command: Decode) -> int:
    """`twinreel decode`: the file of an interrupted run, from its latents."""
    from .output import check_output
    from .output.latents import check_latents

    output = command.writing.build()
    command.engine.build()
    check_latents(command.latents)
    check_output(command.target, output, command.latents)
    with running(command.engine, command.report) as (engine, watch):
        report = engine.decode(command.latents, command.target, output, watch)
    return tell(report, command.report)


@contextmanager
def running(flags: EngineFlags, report: ReportFlags) -> Iterator[tuple[Engine, Watch]]:
    """An engine, and the watch of its run: it shows progress, and hears signals."""
    from .demo import tell_bundled
    from .progress import progress
    from .stopping import Stopping
    from .watch import Event

    config, speaks = flags.build(), leads()
    if speaks:
        tell_bundled(config)
    with ExitStack() as stack:
        shown = progress(report.quiet or not speaks)
        stack.enter_context(shown)
        show: Watch = shown
        start = time.monotonic()
        show(Event("start", 0, 1, 0.0))
        from .engine import Engine  # with torch: seconds

        engine = stack.enter_context(closing(Engine(config)))
        show(Event("start", 1, 1, time.monotonic() - start))
        stopping = stack.enter_context(Stopping(engine.cancel))

        def watch(event: Event) -> None:
            show(event)
            stopping.heard()

        yield engine, watch


def leads() -> bool:
    """Whether this process speaks: alone, or as rank 0 of a launcher's."""
    from .launch import seat

    place = seat()
    return place is None or place.rank == 0


def tell(report: dict[str, Any], how: ReportFlags) -> int:
    """Where the file is and what is wrong with it; the exit code."""
    if not report:
        return 0  # rank 0 tells it
    from .output.report import warnings_of

    warn(found := {"warnings": warnings_of(report)})
    faults = report.get("faults", [])
    for retry in report.get("decode", {}).get("retries", ()):
        print(f"twinreel: out of memory at {retry['at']}, decoded {retry['then']}", file=sys.stderr)
    for fault in faults:
        kept = f"; the latents are kept in {report['latents']}" if "latents" in report else ""
        print(f"twinreel: {fault}{kept}", file=sys.stderr)
    if how.json:
        put({"ok": not faults} | result(report) | found)
    else:
        print(summary(report))
    return FAULTY if faults else 0


def plan(command: Plan) -> int:
    """`twinreel plan`: sizes, rows and predicted memory of a request. Loads no weight and no torch."""
    from .planner import in_words, plan_request

    facts = plan_request(command.request.build(), command.engine.build())
    if not leads():
        return 0
    warn(facts)
    if command.report.json:
        put({"ok": True, **facts})
    else:
        show(in_words(facts))
        print("\n".join(["notes", *(f"- {note}" for note in facts["notes"])]))
    return 0


def warn(facts: dict[str, Any]) -> None:
    """What is legal but probably not meant, on stderr."""
    for warning in facts.get("warnings", ()):
        print(f"twinreel: warning: {warning}", file=sys.stderr)


def result(report: dict[str, Any]) -> dict[str, Any]:
    """The facts of a finished run that fit on a line; the rest is in the report beside the file."""
    plan = report["plan"]
    chosen = {name: plan[name] for name in ("task", "canvas", "frames", "seconds", "steps", "calls", "seed")}
    timed = {name: round(record["seconds"], 3) for name, record in report["stages"].items()}
    more = {name: report[name] for name in ("written", "faults", "latents") if report.get(name)}
    return {"output": report["path"], **chosen, **more, "sha256": report["sha256"], "stages": timed}


def summary(report: dict[str, Any]) -> str:
    """`out.mp4: 1344x768, 124 frames (5.17 s), 50 steps = 49 calls, seed 42, made in 63.2 s`."""
    from .progress import spoken

    plan = report["plan"]
    spent = sum(record["seconds"] for record in report["stages"].values())
    calls = f"{plan['steps']} steps = {counted(plan['calls'], 'call')}{skipped(report)}"
    facts = [content(report), calls, f"seed {plan['seed']}", f"made in {spoken(spent)}"]
    return f"{report['path']}: {', '.join(facts)}"


def content(report: dict[str, Any]) -> str:
    """`1344x768, 124 frames (5.17 s)`, what --exact-seconds has left of them: `1344x768, 120 frames (5.00 s, cut from
    124)`, or `sound alone (5.17 s)`."""
    plan, written = report["plan"], report.get("written", {})
    made, seconds, cut = plan["frames"], plan["seconds"], ""
    if (kept := written.get("frames", made)) == 0:
        return f"sound alone ({written['seconds']['sound']:.2f} s)"
    if kept != made:
        seconds, cut = written["seconds"]["picture"], f", cut from {made}"
    return f"{'x'.join(map(str, plan['canvas']))}, {kept} frames ({seconds:.2f} s{cut})"


def skipped(report: dict[str, Any]) -> str:
    """`, 24 of them made (forecast:balanced)` where a step policy left some out."""
    policy, calls = report.get("policy", {}), report["plan"]["calls"]
    made = policy.get("calls", calls)
    return "" if made == calls else f", {made} of them made ({policy.get('options', policy.get('name'))})"


def verify(command: Verify) -> int:
    """`twinreel verify PATH`: the weights against their config files and, where there is one, their manifest."""
    from .weights import verify as check

    result = check(command.path, write_manifest=command.write_manifest)
    code = int(result["manifest"].startswith("not written"))
    if command.report.json:
        put({"ok": not code, **result})
    else:
        show(result)
    return code


def run_tool(command: Compare | Validate | Quantize) -> int:
    """`twinreel compare`, `validate` and `quantize`: what they found or made (1: `apart`, or a file is not written)."""
    from .tools.commands import RUNS

    outcome = RUNS[type(command)](command)
    code = outcome.code or int(bool(outcome.unwritten))
    if command.report.json:
        put({"ok": not code, **outcome.result, "unwritten": outcome.unwritten})
    else:
        print(outcome.text)
    for lost in outcome.unwritten:
        kept = "what was found is on stdout; keep it from there"
        print(Complaint(f"{lost['path']} was not written", lost["why"], kept), file=sys.stderr)
    return code


def doctor(command: Doctor) -> int:
    """`twinreel doctor`: every choice, what it would be on this machine, and why. Loads no weight."""
    from .doctor import choices, examine

    facts = examine(command.output)
    if not command.report.json:
        show(facts)  # before the choices: a configuration that is refused takes nothing away from it
    chosen = {"choices": choices(command.engine.build())}
    if command.report.json:
        put({"ok": True, **facts, **chosen})
    else:
        show(chosen)
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
