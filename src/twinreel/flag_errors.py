"""What the parser of flags says of a bad one, a box of many lines, as an error in three. It knows the parser by its text
alone, and a text of another form is passed on as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args

from .complaint import Complaint
from .limits import shown

NEAR = 0.7  # how much of a flag is right in a slip of it
KINDS = {"INT": "a whole number", "FLOAT": "a number", "{FLOAT FLOAT}": "two numbers"}


def complaint_of(text: str, words: Sequence[str], commands: Sequence[Any]) -> Complaint:
    """`text`, which the parser printed about `words`, in three lines. `commands`: the annotated dataclasses of flags."""
    if text.startswith("twinreel: "):  # our own
        what, why, remedy = (line.strip() for line in text.splitlines()[:3])
        return Complaint(what.removeprefix("twinreel: "), why, remedy)
    command = words[0] if words and not words[0].startswith("-") else ""
    see = f"see twinreel {command} --help" if command else "see twinreel --help"
    _, said, *more = [*_parts(text), "", ""]
    what = f"{command or 'the command'} cannot be run"
    if words and not command:
        return Complaint(what, f"got {shown(words[0])}, and a command comes first", see)
    if found := re.match(r"Error parsing (--[\w-]+)", said):
        return _bad_value(f"{what}: {found[1]}", _value(words, found[1]), next(filter(None, more), ""), see)
    if found := re.match(r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", said):
        choices = sorted({choice for choice in re.findall(r"'(.*?)'", found[3]) if choice != "None"})
        return Complaint(f"{what}: {found[2]}", f"got {found[1]}", f"use {', '.join(choices)}")
    if found := re.match(r"Missing value for argument '(.*)'\.", said):
        remedy = f"give it one; one that begins with a dash is written {found[1]}=-..." if "--" in found[1] else see
        return Complaint(f"{what}: {found[1]}", "has no value", remedy)
    if found := re.match(r"Unrecognized (?:or misplaced )?options: (.*)", _bare(said)):
        return Complaint(what, f"{shown(found[1])} means nothing to it", _instead(found[1], command, commands, see))
    if found := re.match("Missing from .*?: (.*)", said):
        return Complaint(what, f"it needs {' and '.join(map(_in_short, found[1].split(' (required)')[:-1]))}", see)
    return Complaint(what, said or " ".join(text.split()), see)


def _bare(said: str) -> str:
    """Without the parser's remarks on sub-commands and on order."""
    return re.sub(r" \(applied to [^)]*\)", "", said).partition(" Arguments are applied")[0]


def _parts(text: str) -> list[str]:
    """What stands above, between and below the rules of a box, whose lines are drawn or, in ASCII, typed."""
    parts = [""]
    for line in text.splitlines():
        if re.search("[─╭╮╰╯]|^[ +|]*-{3,}[ +|]*$", line):
            parts.append("")
        else:
            parts[-1] = f"{parts[-1]} {re.sub('^[│|]|[│|]$', '', line.strip()).strip()}".strip()
    return parts


def _bad_value(what: str, value: str, helped: str, see: str) -> Complaint:
    found = re.fullmatch(r"Argument helptext: \S+ (?:, -\S+ )?(\{.*?\}|[A-Z]\S*) (.*)", helped)
    kind = KINDS.get(found[1], f"{found[1]}") if found else "another value"
    return Complaint(what, f"got {shown(value)}; {kind} is needed", found[2] if found else see)


def _value(words: Sequence[str], flag: str) -> str:
    """What stands behind the last `flag` in `words`."""
    value = ""
    for i, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name.replace("_", "-") == flag:
            value = rest if equals else " ".join(words[i + 1 : i + 2])
    return value


def _in_short(needed: str) -> str:
    """`SRC (folder of the weights)` of a word's name and its help."""
    name, _, helped = needed.strip().partition(" ")
    helped = re.split(r"[,;.] ", helped.rstrip("."))[0]
    return f"{name} ({helped[:1].lower()}{helped[1:]})" if helped else name


def _instead(given: str, command: str, commands: Sequence[Any], see: str) -> str:
    slip = given.partition(",")[0].partition("=")[0]
    if slip.startswith("--") and " " not in slip:
        kind = next(kind for kind, how in map(get_args, commands) if how.name == command)
        if near := get_close_matches(slip[2:].replace("_", "-"), ["help", *_flags(kind)], 1, NEAR):
            return f"did you mean --{near[0]}? {see}"
    if command in ("generate", "plan"):
        if given.startswith("-"):
            return f"{see}; a prompt that begins with a dash is written --prompt=-..."
        return f"a prompt of several words is put in quotes; {see}"
    return see


def _flags(kind: Any) -> Iterator[str]:
    """The flags of a dataclass of flags and of those in it, without their dashes; the parser itself looks among those of
    all commands."""
    for item in fields(kind):
        if is_dataclass(item.default_factory):
            yield from _flags(item.default_factory)
        elif "Positional" not in str(item.type):
            yield item.name.replace("_", "-")
