"""What stands behind a flag: the text of a size and of a reference, and words that would be lost without a sound."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from . import limits
from .errors import ConfigError, RequestError
from .request import Reference

ALIASES = {"-o": "output", "-q": "quiet"}
# A flag that means something only beside another one, and those that mean nothing beside it.
BESIDE = {"trace_every_step": "trace", "server_key_file": "server", "workers": "pareto"}
INSTEAD = {"against": ("test", "bounds", "matrix", "pareto"), "pareto": ("test", "bounds", "matrix")}
LARGEST = 10**9  # no product of such numbers overflows where a bench makes one


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of `1344x768`. Raises RequestError."""
    found = re.fullmatch(r"(\d{1,9})[xX×](\d{1,9})", text)
    if not found:
        raise RequestError("size", f"got {limits.shown(text)}; write WIDTHxHEIGHT, such as 1344x768")
    return int(found[1]), int(found[2])


def check_positive(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse the number, or one of the numbers, of any of the flags `names` that is not above 0 or above `LARGEST`;
    None, and a flag that is not in `values`, are left out. Raises ConfigError."""
    for name in names:
        given = values.get(name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value <= LARGEST:
                got = f"--{name.replace('_', '-')}: got {limits.shown(value)}"
                raise ConfigError(f"{got}; give a number above 0 and up to {LARGEST:,}")


def parse_reference(text: str, number: int) -> Reference:
    """`KIND:SOURCE[@START-END]` as a `Reference`; either end may be left out. Raises RequestError."""
    kind, colon, source = text.partition(":")
    if not colon or kind not in limits.REFERENCE_KINDS or not source:
        example = "image:x.png or video:y.mp4@1.0-4.5"
        raise RequestError(f"references[{number}]", f"got {limits.shown(text)}; write KIND:SOURCE, such as {example}")
    seconds = r"(\d+(?:\.\d*)?|\.\d+)?"
    cut = re.fullmatch(rf"(.+)@{seconds}-{seconds}", source, re.DOTALL)
    if not cut or cut[2] is None and cut[3] is None:
        return Reference(kind, source)
    start, end = (None if value is None else float(value) for value in cut.groups()[1:])
    return Reference(kind, cut[1], start, end)


def check_words(words: Sequence[str], command: Any) -> None:
    """Refuse `words` of which `command`, the dataclass they became, keeps less than they say. Raises RequestError for a
    flag that is given twice, is empty, means nothing without another, or whose path no file can have; ConfigError
    where there is no folder to look from."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder is gone; change to one that exists") from None
    values, repeatable = {}, set()
    for item, value in flags_of(command):
        values[item.name] = value
        if item.default == ():
            repeatable.add(item.name)
    check_idle(each_once(words, values, repeatable), BESIDE, INSTEAD)


def each_once(words: Sequence[str], values: Mapping[str, Any], repeatable: Collection[str] = ()) -> set[str]:
    """The fields in `values` whose flags stand in `words`. Raises RequestError for one that is given twice, unless it is
    `repeatable`, is empty, or whose path no file can have."""
    seen: set[str] = set()
    for name, value in given(words, values):
        if name in seen and name not in repeatable:
            raise RequestError(name, "was given twice; keep one")
        seen.add(name)
        if value == "" and values.get(name) is not True:
            raise RequestError(name, "is empty; give it a value, or leave it out")
    for name, value in values.items():
        if isinstance(value, Path):
            _check_path(name, value)
    return seen


def check_idle(seen: Collection[str], beside: Mapping[str, str], instead: Mapping[str, Sequence[str]]) -> None:
    """Refuse a flag in `seen` that means nothing without its one in `beside`, or together with one whose `instead` names
    it. Raises RequestError."""
    for name, other in beside.items():
        if name in seen and other not in seen:
            raise RequestError(name, f"means nothing without --{other}; give that too, or leave it out")
    for name, others in instead.items():
        for other in others:
            if name in seen and other in seen:
                raise RequestError(other, f"means nothing beside --{name}; leave one of them out")


def as_flags(words: Sequence[str]) -> dict[str, str]:
    """What stands in `words` for each field that has a flag there, such as `--encode-frames` for `encode_frames`."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    return {flag[2:].replace("-", "_"): flag for flag in flags}


def flags_of(command: Any) -> Iterator[tuple[Any, Any]]:
    """(field, value) of every flag of a dataclass of flags and of those in it."""
    for item in fields(command):
        value = getattr(command, item.name)
        if is_dataclass(value):
            yield from flags_of(value)
        else:
            yield item, value


def given(words: Sequence[str], values: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(field, the word behind it) for each flag in `words`, of the fields in `values`; an empty word that belongs to no
    flag is a positional one, and called by the command's own name."""
    names = {f"--{name.replace('_', '-')}": name for name in values} | ALIASES
    expecting = False
    for i, word in enumerate(words):
        if word == "--":
            return
        flag, equals, value = word.partition("=")
        if word[:2] in ALIASES and len(word) > 2 and " " not in word:  # -oout.mp4
            flag, equals, value = word[:2], "=", word[2:]
        name = names.get(flag.replace("_", "-"))
        if name is not None:
            yield name, value if equals else words[i + 1] if i + 1 < len(words) else None
        elif word == "" and not expecting and "text" not in values:
            before = words[i - 1].replace("-", "_")
            unknown = before.startswith("__") and words[i - 1] not in names  # a flag of a bench, which reads its own
            yield before[2:] if unknown else words[0], ""
        expecting = name is not None and not equals and values.get(name) is not True


def _check_path(name: str, path: Path) -> None:
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError(name, f"{limits.shown(str(path))} is longer than any name; shorten it") from None
