"""What the parser of flags says of a bad one, a box of many lines, as an error in three. It knows the parser by its text
alone, and a text of another form is passed on as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .complaint import Complaint
from .limits import shown

KINDS = {"INT": "a whole number", "FLOAT": "a number", "{FLOAT FLOAT}": "two numbers"}


def complaint_of(text: str, words: Sequence[str]) -> Complaint:
    """`text`, which the parser printed about `words`, in three lines."""
    if text.startswith("twinreel: "):  # our own
        what, why, remedy = (line.strip() for line in text.splitlines()[:3])
        return Complaint(what.removeprefix("twinreel: "), why, remedy)
    command = words[0] if words and not words[0].startswith("-") else ""
    see = f"see twinreel {command} --help" if command else "see twinreel --help"
    _, said, *more = [*_parts(text), "", ""]
    what = f"{command or 'the command'} cannot be run"
    if found := re.match(r"Error parsing (--[\w-]+)", said):
        return _bad_value(f"{what}: {found[1]}", _value(words, found[1]), next(filter(None, more), ""), see)
    if found := re.match(r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", said):
        choices = sorted({choice for choice in re.findall(r"'(.*?)'", found[3]) if choice != "None"})
        return Complaint(f"{what}: {found[2]}", f"got {found[1]}", f"use {', '.join(choices)}")
    if found := re.match(r"Missing value for argument '(.*)'\.", said):
        remedy = f"give it one; one that begins with a dash is written {found[1]}=-..." if "--" in found[1] else see
        return Complaint(f"{what}: {found[1]}", "has no value", remedy)
    if found := re.match(r"Unrecognized (?:or misplaced )?options: (.*)", _bare(said)):
        near = re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(more))
        return Complaint(
            what, f"{shown(found[1])} means nothing to it", _instead(found[1], near and near[1], command, see)
        )
    if found := re.match("Missing from .*?: (.*)", said):
        return Complaint(what, f"it needs {found[1].replace(' (required)', '')}", see)
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


def _instead(given: str, near: str | None, command: str, see: str) -> str:
    if near is not None and " " not in given.partition(",")[0]:
        return f"did you mean {near}? {see}"
    if command in ("generate", "plan"):
        if given.startswith("-"):
            return f"{see}; a prompt that begins with a dash is written --prompt=-..."
        return f"a prompt of several words is put in quotes; {see}"
    return see
