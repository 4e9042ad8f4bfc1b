"""The files of `bench scaling`: its figures by the names of their cases, and one rank's velocities beside them, both with
the settings they are of. One run at a time has them (`held`)."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError
from ..flag_words import LARGEST
from ..limits import shown
from ..output.placing import hold, replacing
from ..small_files import read_small_json, why
from .targets import Targets, write_whole

PARTS = ("settings", "cases", "errors")
VARIANTS = ("plain", "packed", "overlapped")
WHATS = ("call", "share", "vae", "whole", "whole-balanced")
MOST_TOLD = 12  # settings that a refusal names
ELSEWHERE = "move it, or give the record another name"


@dataclass(frozen=True)
class Case:
    """One figure: a mesh, how rows and heads change places ("" where sp is 1), and what is measured."""

    sp: int
    tp: int
    variant: str
    what: str

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return self.sp * self.tp

    @property
    def world(self) -> int:
        """Ranks that run."""
        return 1 if self.what == "share" else self.ranks

    @property
    def each(self) -> bool:
        """Whether every card measures it alone."""
        return self.world == 1 and self.what == "call"

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        mesh = (f"sp{self.sp}" if self.sp > 1 or self.tp == 1 else "") + (f"tp{self.tp}" if self.tp > 1 else "")
        return ":".join(part for part in (mesh, self.variant, self.what if self.what != "call" else "") if part)


def parse_case(text: str) -> list[Case]:
    """The cases that `text` means: all variants where sp > 1 and none is named; of these, the fastest first, a whole
    request is to take the first that can run. Raises ValueError."""
    mesh, *words = text.split(":")
    found = re.fullmatch(r"(?:sp([1-9]\d{0,3}))?(?:tp([1-9]\d{0,3}))?", mesh)
    if not mesh or found is None:
        told = repr(text) if mesh == text else f"{text!r}: {mesh!r}"
        raise ValueError(f"--only: {told} is no mesh; write sp1, sp2, tp2, sp2tp2")
    sp, tp = (int(size or 1) for size in found.groups())
    words = ["overlapped" if word == "overlap" else word for word in words]
    unknown = [word for word in words if word not in VARIANTS + WHATS]
    if unknown:
        raise ValueError(f"--only: {text!r}: {unknown[0]!r} is none of its words; use {', '.join(VARIANTS + WHATS)}")
    whats, named = ([word for word in words if word in kind] for kind in (WHATS, VARIANTS))
    what = whats[0] if whats else "call"
    if len(whats) > 1:
        raise ValueError(f"--only: {text!r}: {' and '.join(whats)} are two cases; part them by a comma")
    if what == "share" and sp * tp == 1:
        raise ValueError(f"--only: {text!r}: one rank has it all; a share is of several, as in sp4:share")
    if named and (sp == 1 or what in ("vae", "share")):
        raise ValueError(f"--only: {text!r}: {named[0]} is how rows and heads change places over sp; leave it out")
    if sp == 1 or what in ("vae", "share"):
        return [Case(sp, tp, "", what)]
    every = VARIANTS if what == "call" else VARIANTS[::-1]
    return [Case(sp, tp, variant, what) for variant in named or every]


class Record:
    """OUT.json: `settings` of all its figures, `cases` by name, `errors` of those that failed and are tried again.

    For as long as its files are `held`. Nothing is written before the first `keep`. Raises ConfigError where there is a
    file that is no record, or one of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.failed, self._begun = path.absolute(), False, path.exists()
        self.values: dict[str, Any] = {"settings": dict(settings), "cases": {}, "errors": {}}
        if self._begun:
            self.values = _read(path)
            check_same(path, "figures", self.values["settings"], settings, "name another file for it")

    def has(self, case: str, cards: int = 0) -> bool:
        """Whether it has been measured, on each of so many cards where `cards` says so."""
        return case in self.values["cases"] and len(self.values["cases"][case].get("cards", ())) >= cards

    def keep(self, case: str, result: Any, error: str | None, seconds: float) -> None:
        """Write one case down, and what it changes of others, and say it in lines. Raises ConfigError where that fails."""
        self.values["errors"].pop(case, None)
        if error is not None:
            self.failed = True
            self.values["errors"][case] = error
        else:
            self.values["cases"][case] = {"took": seconds, **result}
        told = error.strip().splitlines()[-1] if error else result["line"]
        print(f"{case:24} {told} ({seconds:.0f} s in all)", flush=True)
        for name, beside in beside_one(self.values["cases"]).items():
            print(f"{name:24} {beside}", flush=True)
        try:
            write_whole(self.path, json.dumps(self.values, indent=1), overwrite=self._begun)
        except OSError as failure:
            raise ConfigError(f"out: {self.path} could not be written ({why(failure)}); name another file") from failure
        self._begun = True


@contextmanager
def held(out: Path) -> Iterator[None]:
    """In the block, however it or this process ends, no other run can have the files of the record `out`: each would
    write its own figures over the other's. A file system that knows no locks refuses nobody.

    Raises RequestError where no file can be written, ConfigError where another run has them.
    """
    Targets({"out": out}, (), overwrite=True)
    lock = _beside(out, "in-use")
    try:
        file = _claim(lock)
    except BlockingIOError:
        told = f"out: another run is measuring into {out}, as {lock.name} beside it says, and one at a time may"
        raise ConfigError(f"{told}; wait for that run, end it, or name another file") from None
    except OSError as error:
        told = f"out: {lock}, which is to be locked while {out.name} is written, cannot be ({why(error)})"
        raise ConfigError(f"{told}; {ELSEWHERE}") from None
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


def _claim(lock: Path) -> BinaryIO:
    """`hold` of an empty file, made where there is none. BlockingIOError where it is held, OSError for another file."""
    while True:
        number = os.open(lock, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            found = os.fstat(number)
        finally:
            os.close(number)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            raise OSError(errno.EEXIST, "it is no empty file", str(lock))
        with ExitStack() as opened, suppress(FileNotFoundError):  # a run that ends removes it
            file = opened.enter_context(hold(lock))
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                opened.pop_all()
                return file


def each_card(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first card's figures, with the seconds of every card, all of which ran the same call at once, as in a mesh: so
    they share the host, its power and its cooling."""
    seconds = [result["seconds"] for result in results]
    told = f"; cards at once: {_listed(seconds)}" if len(seconds) > 1 else ""
    return {**results[0], "line": results[0]["line"] + told, "cards": seconds, "cards_ran": "at once"}


def beside_one(cases: dict[str, Any]) -> dict[str, str]:
    """Put into every call and share of `cases` how it stands beside `sp1`, whichever was measured first. Returns what is
    new of that, in words by name.

    `times` of a call: how many times as fast it is as the slowest of its cards, whose pace it has, where all of them were
    measured, and as the first one. `ceiling` of a share: how many times as fast as one card its mesh can be at most.
    """
    told = dict[str, str]()
    if (one := cases.get("sp1")) is None:
        return told
    for name, found in cases.items():
        (case, *_) = parse_case(name)
        if name == "sp1" or case.what not in ("call", "share"):
            continue
        if case.what == "share":
            ceiling = one["seconds"] / found["seconds"]
            new, words = {"ceiling": ceiling}, f"at most {ceiling:.2f}x of one card"
        else:
            times, words = _times(found["seconds"], case.world, one)
            new = {"times": times}
        if any(found.get(key) != value for key, value in new.items()):
            cases[name], told[name] = {**found, **new, "beside": words}, words
    return told


def _times(seconds: float, world: int, one: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    cards = one.get("cards", [])[:world]
    first = one["seconds"] / seconds
    if len(cards) < world:
        return {"first": first}, f"{first:.2f}x of the first card"
    slowest = max(cards) / seconds
    told = f"{slowest:.2f}x of the slowest card, {first:.2f}x of the first (one card each, at once: {_listed(cards)})"
    return {"slowest": slowest, "first": first}, told


def _listed(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in seconds) + " s"


def _read(path: Path) -> dict[str, Any]:
    """A record. Raises ConfigError for every other file."""
    try:
        values = read_small_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"out: {path} is no record of this bench ({why(error)}); name another file") from None
    whole = isinstance(values, dict) and set(values) == set(PARTS) and all(isinstance(x, dict) for x in values.values())
    if not whole or not all(isinstance(case, dict) for case in values["cases"].values()):
        raise ConfigError(f"out: {path} is no record of this bench with its {', '.join(PARTS)}; name another file")
    problems = [(name, fault(name, found)) for name, found in values["cases"].items()]
    problems += [(name, fault_of_error(name, error)) for name, error in values["errors"].items()]
    for name, problem in problems:
        if problem is not None:
            told = f"out: {path} is no record of this bench: it does not write {name[:60]!r} with {problem}"
            raise ConfigError(f"{told}; name another file")
    beside_one(values["cases"])
    return values


def fault(name: str, found: Mapping[str, Any]) -> str | None:
    """What of the figures of a case `name` this bench does not write, or None."""
    if (case := _named(name)) is None:
        return "that name"
    for key in ("decode" if case.what == "vae" else "seconds", "took"):
        if not _is_time(found.get(key)):
            return f"{key} {shown(found.get(key))}"
    if not isinstance(found.get("line"), str):
        return f"line {shown(found.get('line'))}"
    cards = found.get("cards", [])
    if not isinstance(cards, list) or not all(map(_is_time, cards)):
        return f"cards {shown(cards)}"
    return None


def fault_of_error(name: str, error: Any) -> str | None:
    """What of the words why a case `name` failed this bench does not write, or None."""
    if _named(name) is None:
        return "that name"
    return None if isinstance(error, str) and error.strip() else f"error {shown(error)}"


def _named(name: str) -> Case | None:
    """The one case that is called so."""
    try:
        (case,) = parse_case(name)
    except ValueError:  # several are none as well
        return None
    return case if case.name == name else None


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-9 <= value <= LARGEST


def check_same(path: Path, what: str, there: Mapping[str, Any], here: Mapping[str, Any], remedy: str) -> None:
    """Refuse `what` of other settings in one file; they are alike where their words are. Raises ConfigError naming what
    differs."""
    words = [(_said(there, name), _said(here, name)) for name in {**here, **there}]
    differ = [pair for pair in words if pair[0] != pair[1]][:MOST_TOLD]
    if differ:
        was, now = map(", ".join, zip(*differ, strict=True))
        raise ConfigError(f"out: {path} has {what} of {was}, and this run has {now}; {remedy}")


def _said(values: Mapping[str, Any], name: str) -> str:
    """A setting in words that tell 22 from "22"."""
    label = name if name.isidentifier() and len(name) < 60 else shown(name)
    return f"{label} {shown(values[name])}" if name in values else f"no {label}"


def base_path(out: Path) -> Path:
    """Where the velocities of one rank lie: `scaling.json` has `scaling.one.safetensors`."""
    return _beside(out, "one.safetensors")


def _beside(out: Path, ending: str) -> Path:
    """A file of the record's own: of two records that are not the same but for `.json`, it is not the same."""
    path = out.absolute()
    return path.parent / f"{path.name.removesuffix('.json')}.{ending}"


def read_base(path: Path, settings: Mapping[str, Any], rows: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """One rank's velocities `video` and `audio` on the CPU, fp32 [rows, channels] as `rows` says of each; empty where
    there is no file. Raises ConfigError for a file of anybody else, of other settings and of other tensors than they make.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not path.exists():
            return {}
        with safe_open(path, "pt") as file:
            there = json.loads(file.metadata()["scaling"])
            tensors = {name: file.get_tensor(name) for name in rows}
        if not isinstance(there, dict):
            raise ValueError("its settings have no names")
    except (OSError, SafetensorError, TypeError, KeyError, ValueError, RecursionError) as error:
        told = f"out: {path}, where one rank's velocities belong, cannot be read as such ({why(error)})"
        raise ConfigError(f"{told}; {ELSEWHERE}") from None
    check_same(path, "velocities", there, settings, ELSEWHERE)
    for name, x in tensors.items():
        was, now = f"{x.dtype} {list(x.shape)}", f"torch.float32 {list(rows[name])}"
        if was != now:
            raise ConfigError(f"out: {path} has {name} velocities {was}, and this run makes {now}; {ELSEWHERE}")
        if not x.isfinite().all():
            raise ConfigError(f"out: {path} has {name} velocities that are not finite; {ELSEWHERE}")
    return tensors


def write_base(path: Path, tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write what `read_base` reads, whole or not at all."""
    from safetensors.torch import save

    with replacing(path) as draft:
        draft.write_bytes(save(dict(tensors), {"scaling": json.dumps(settings)}))
