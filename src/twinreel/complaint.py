"""An error as a person reads it: what went wrong, why, and what to do, a line each."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from .errors import Cancelled, CheckpointError, ConfigError, RequestError, TwinreelError

AGAIN = "run it again"
# What that means for a command whose run a signal ended.
AGAIN_BY = {
    **dict.fromkeys(("generate", "decode"), f"{AGAIN}: the same request and seed make the same file"),
    "bench": f"{AGAIN}: bench scaling goes on from what its file holds, another bench begins anew",
}
_SUBJECT = re.compile(r"(-{0,2}[\w.\[\]-]+): ")


@dataclass(frozen=True)
class Complaint:
    """Three lines, and `kept`: notes that the error collected on its way, such as where latents are."""

    what: str
    why: str
    remedy: str
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"twinreel: {self.what}", self.why, self.remedy, *self.kept]
        return "\n  ".join("\n    ".join(map(_printable, line.splitlines())) for line in lines)


def _printable(line: str) -> str:
    """What a terminal would obey, such as an escape in the name of a file, as text."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)


def explain(error: BaseException, names: Mapping[str, str] | None = None, command: str = "generate") -> Complaint:
    """`error` in three lines. Ours say why and, behind the last semicolon, what to do; where one names nothing to do,
    its kind does. `names`: what the person wrote for a field of the request, such as `--last` for `keyframes[0]`.
    """
    notes = tuple(getattr(error, "__notes__", ()))
    complaint = _told(error, names or {}, command) if isinstance(error, TwinreelError) else _foreign(error, command)
    if notes and isinstance(error, KeyboardInterrupt | Cancelled):
        return replace(complaint, remedy=notes[0], kept=notes[1:])
    return replace(complaint, kept=notes)


def unknown_command(word: str, known: Sequence[str]) -> Complaint:
    """No command is called `word`; the nearest of `known`."""
    near = get_close_matches(word, known, 1)
    nearest = f"did you mean {near[0]}? " if near else ""
    return Complaint(f"no such command: {word}", f"commands are {', '.join(known)}", f"{nearest}see twinreel --help")


def as_written(field: str, names: Mapping[str, str]) -> str:
    """`--ref 2 (references[1].source)`: a field of the request beside what stands for it on the command line."""
    written = names.get(field.partition(".")[0])
    if written is None:
        return field
    return f"{written} ({field})" if "[" in field else written


def _told(error: TwinreelError, names: Mapping[str, str], command: str) -> Complaint:
    text = str(error)
    if isinstance(error, RequestError):
        written = as_written(error.field, names)
        what = f"{'the request' if command in ('generate', 'plan') else command} cannot be run: {written}"
        text = text.removeprefix(f"{error.field}: ")
        usual = f"change {written}; twinreel {command} --help says what it may be"
    elif isinstance(error, ConfigError):
        what, usual = "this configuration cannot work", "twinreel doctor says what this machine would use and lacks"
        if subject := _SUBJECT.match(text):
            what, text = f"{what}: {subject[1]}", text[subject.end() :]
    elif isinstance(error, CheckpointError):
        look = "" if command == "verify" else "see what twinreel verify says of the folder, or "
        what, usual = "the weights cannot be used", f"{look}download what it names again"
    else:
        what, usual = "the server did not do it", "check its address and its log"
    why, remedy = _split(text)
    return Complaint(what, why, remedy or usual)


def _foreign(error: BaseException, command: str) -> Complaint:
    again = AGAIN_BY.get(command, AGAIN)
    name, text = type(error).__name__, " ".join(str(error).split()) or "it says no more"
    if isinstance(error, KeyboardInterrupt):
        by = text if getattr(error, "signal", signal.SIGINT) != signal.SIGINT else "the keyboard"
        return Complaint(f"stopped by {by}", "it ended where it stood", again)
    if isinstance(error, Cancelled):
        by = f" by {signal.Signals(error.signal).name}" if error.signal else ""
        return Complaint(f"the request was cancelled{by}", "it ended at its next step or clip", again)
    if name == "RankLost":  # before memory, which its words may only guess at
        remedy = "run it again; if it happens again, look in the system's log for what stops that process"
        return Complaint("a process of the run was lost", text, remedy)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "out of memory" in text:
        way = "--residency layers (mapped where host memory is short)"
        remedy = f"ask for less (--duration, --size), or try {way}; twinreel plan predicts the need"
        return Complaint("memory ran out", f"{name}: {text[:300]}", remedy)
    if isinstance(error, OSError):
        remedy = "check that it is there, that you may use it, and that its disk has room"
        return Complaint("a file could not be written or read", text, remedy)
    if isinstance(error, FloatingPointError):
        return Complaint("the model made values that are not finite", *_split(text))
    return Complaint(f"unexpected {name}", text, "run it again with --traceback to see where")


def _split(text: str) -> tuple[str, str]:
    """The reason, and what stands behind the last semicolon."""
    why, semicolon, remedy = text.rpartition("; ")
    return (why, remedy) if semicolon else (text, "")
