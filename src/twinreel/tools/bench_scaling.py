"""`twinreel bench scaling OUT.json`: one host's GPUs, one topology after the other, on random weights.

Each case is `MESH[:VARIANT][:WHAT]`: `sp1`, `sp2:plain`, `sp4:overlapped`, `sp2tp2`, `tp2`, `sp2:vae`, `sp4:whole`,
`sp4:whole-balanced`, `sp8:share`. `sp1` is the call of one rank on every card that the cases use, all at once: a pair is
as fast as its slower card. A share is what one rank of a mesh computes in a call, on one card, with nothing sent: what
the mesh would take if the exchange cost nothing. What OUT.json holds is not measured again, so a run can be cut into
pieces.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ..config import MOST, Choices, EngineConfig, resolve
from ..errors import ConfigError, RequestError
from ..flag_words import as_flags, check_idle, check_positive, parse_size
from ..limits import STEPS
from ..spec import Spec
from ..topology import Sizes as Heads
from ..topology import choose_mesh, choose_variant
from .scaling_record import Record, base_path, beside_cards, beside_one, each_card, read_base
from .workers import follow, start

VARIANTS = ("plain", "packed", "overlapped")
WHATS = ("call", "share", "vae", "whole", "whole-balanced")
MESHES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1))  # sp, tp
BALANCED = "forecast:balanced"
CALLS = 49


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


@dataclass(frozen=True)
class Settings:
    """What is alike for all cases. shape: as `shape_spec` has them. base: the file of one rank's velocities. alike: what
    figures of one file have in common, by name."""

    shape: str
    device: str
    frames: int
    size: tuple[int, int] | None
    text: int
    ops: str
    attention: str
    seconds: float
    calls: int
    base: str
    alike: dict[str, Any]


def parse_case(text: str) -> list[Case]:
    """The cases that `text` means: all variants where sp > 1 and none is named, the fastest one for whole requests.

    Raises ValueError.
    """
    mesh, *words = text.split(":")
    found = re.fullmatch(r"(?:sp([1-9]\d{0,3}))?(?:tp([1-9]\d{0,3}))?", mesh)
    if not mesh or found is None:
        raise ValueError(f"only: {text!r}: {mesh!r} is no mesh; write sp1, sp2, tp2, sp2tp2")
    sp, tp = (int(size or 1) for size in found.groups())
    words = ["overlapped" if word == "overlap" else word for word in words]
    unknown = [word for word in words if word not in VARIANTS + WHATS]
    if unknown:
        raise ValueError(f"only: {text!r}: {unknown[0]!r} is none of its words; use {', '.join(VARIANTS + WHATS)}")
    whats, named = ([word for word in words if word in kind] for kind in (WHATS, VARIANTS))
    what = whats[0] if whats else "call"
    if len(whats) > 1:
        raise ValueError(f"only: {text!r}: {' and '.join(whats)} are two cases; part them by a comma")
    if what == "share" and sp * tp == 1:
        raise ValueError(f"only: {text!r}: one rank has it all; a share is of several, as in sp4:share")
    if named and (sp == 1 or what in ("vae", "share")):
        raise ValueError(f"only: {text!r}: {named[0]} is how rows and heads change places over sp; leave it out")
    if sp == 1 or what in ("vae", "share"):
        return [Case(sp, tp, "", what)]
    every = VARIANTS if what == "call" else VARIANTS[-1:]
    return [Case(sp, tp, variant, what) for variant in named or every]


def default_cases(devices: int, whole: bool) -> list[Case]:
    """Calls and VAE of every mesh that fits, shares of the others, then whole requests on the largest that fits."""
    meshes = [(sp, tp) for sp, tp in MESHES if sp * tp <= devices]
    names = [f"sp{sp}tp{tp}" for sp, tp in meshes]
    names += [f"sp{sp}:vae" for sp, tp in meshes if tp == 1]
    names += [f"sp{sp}tp{tp}:share" for sp, tp in MESHES if sp * tp > devices]
    if whole:
        most = max(sp for sp, tp in meshes if tp == 1)
        names += [f"sp{most}:whole", f"sp{most}:whole-balanced"]
    return [case for name in names for case in parse_case(name)]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="twinreel bench scaling", description=__doc__, allow_abbrev=False)
    flags.add_argument("out", type=Path, help="JSON file to write, and to go on from")
    flags.add_argument("--only", help="cases, comma-separated; default: all that this host's GPUs allow")
    flags.add_argument("--shape", choices=("released", "bundled", "tiny", "wide"), default="released")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--gpus", type=int, help="use no more than so many")
    flags.add_argument("--frames", type=int, default=124)
    flags.add_argument("--size", help="WxH; default 1344x768, or the smaller models' own")
    flags.add_argument("--text", type=int, default=300, help="prompt rows")
    flags.add_argument("--ops", default="auto")
    flags.add_argument("--attention", default="auto")
    flags.add_argument("--seconds", type=float, default=6.0, help="how long each call is measured")
    flags.add_argument("--calls", type=int, help="whole requests: model calls, instead of the 49 of 50 steps")
    flags.add_argument("--whole", action="store_true", help="whole requests too, in place of --only")
    flags.add_argument("--json", action="store_true", help="one JSON line on stdout, everything else on stderr")
    flags.add_argument("--budget", type=float, default=520.0, help="seconds after which no further case is begun")
    flags.add_argument("--case-limit", type=float, default=300.0, help="seconds for a case before it counts as stuck")
    return flags


def main(words: Sequence[str]) -> int:
    """Measure what is missing. Exit code 0, or 1 when a case failed. Raises ConfigError and RequestError for flags that
    cannot be met and files that cannot be used, before a process is started."""
    flags = parser().parse_args(words)
    check_idle(as_flags(words), {}, {"only": ("whole",)})
    check_positive(vars(flags), ("gpus", "frames", "text", "seconds", "calls", "budget", "case_limit"))
    with redirect_stdout(sys.stderr) if flags.json else nullcontext():
        try:
            cases, settings = prepare(flags)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        record = Record(flags.out, settings.alike)
        read_base(Path(settings.base))
        measure(cases, settings, record, flags)
    print(json.dumps({"bench": "scaling", **record.values}))
    return 1 if record.failed else 0


def measure(cases: Sequence[Case], settings: Settings, record: Record, flags: argparse.Namespace) -> None:
    """Measure what of `cases` the record lacks, and keep it there."""
    cards = max((case.world for case in cases), default=1)
    missing = [case for case in cases if not record.has(case.name, cards if case.each else 0)]
    start, pool = time.monotonic(), None
    try:
        for case in sorted(missing, key=lambda case: (case.world, case.what)):
            if time.monotonic() - start > flags.budget:
                print(f"bench scaling: the budget is spent before {case.name}; run the same command again")
                return
            if pool is None or pool.world != case.world:
                if pool is not None:
                    pool.close()
                pool = Pool(case.world, cards if case.world == 1 else case.world, settings)
            begin = time.monotonic()
            results, failure = pool.run(case, flags.case_limit)
            if failure is not None:
                pool.close()
                pool = None
            record.keep(case.name, _told(case, results, record), failure, time.monotonic() - begin)
    finally:
        if pool is not None:
            pool.close()


def _told(case: Case, results: Sequence[Any], record: Record) -> Any:
    """What is kept of a case: the first rank's figures, those of calls with what single cards take."""
    if not results or case.what not in ("call", "share"):
        return results[0] if results else None
    if case.each:
        return each_card(results)
    one = record.values["cases"].get("sp1")
    if one is None:
        return results[0]
    return beside_one(results[0], one) if case.what == "share" else beside_cards(results[0], case.world, one)


def prepare(flags: argparse.Namespace) -> tuple[list[Case], Settings]:
    """What to measure, and under what: all that can be known before there are ranks. Raises ValueError, ConfigError,
    RequestError."""
    asked = [parse_case(text.strip()) for text in flags.only.split(",")] if flags.only is not None else None
    if (calls := flags.calls or CALLS) not in range(1, int(STEPS.high)):
        raise RequestError("calls", f"got {calls}; a request makes 1 to {STEPS.high - 1}")
    text = flags.size or ("1344x768" if flags.shape == "released" else None)
    size = parse_size(text) if text else None

    import torch

    from ..ops import describe
    from .bench_dit import Sizes, plan_of
    from .random_weights import shape_spec

    spec, sizes = shape_spec(flags.shape), Sizes(flags.frames, size, flags.text)
    plan, _ = plan_of(sizes, spec)
    config = EngineConfig(device=flags.device, ops=flags.ops, attention=flags.attention)
    choices = resolve(config, spec.dit.head_dim)
    cuda = choices.device.type == "cuda"
    devices = min(flags.gpus or MOST, torch.cuda.device_count() if cuda else MOST)
    cases = _possible(asked, devices, flags.whole, partial(check_case, config, choices, spec))
    alike = {
        "shape": flags.shape, "device": torch.cuda.get_device_name(choices.device) if cuda else "cpu",
        "frames": plan.frames, "size": f"{plan.width}x{plan.height}", "text": flags.text, "calls": calls,
        "ops": choices.ops.name, "attention": describe(choices.ops)["attention"], "torch": torch.__version__,
    }  # fmt: skip
    base = str(base_path(flags.out))
    return cases, Settings(
        flags.shape, flags.device, flags.frames, size, flags.text, flags.ops, flags.attention, flags.seconds, calls,
        base, alike,
    )  # fmt: skip


def _possible(asked: list[list[Case]] | None, devices: int, whole: bool, check: Callable[[Case], None]) -> list[Case]:
    """The cases that can run here, each once; what else a word means is left out and said. Raises ConfigError for a word
    of which nothing is left, where somebody wrote it."""
    found: list[Case] = []
    for cases in asked or [[case] for case in default_cases(min(devices, 8), whole)]:
        kept, problem = [], None
        for case in cases:
            try:
                if case.world > devices:
                    raise ConfigError(f"only: {case.name} needs {case.world} devices, and there are {devices}")
                check(case)
                kept.append(case)
            except ConfigError as error:
                problem = error
        if asked and not kept and problem is not None:
            raise problem
        if problem is not None:
            print(f"bench scaling: without {', '.join(case.name for case in cases if case not in kept)}: {problem}")
        found += kept
    return list(dict.fromkeys(found))


def check_case(config: EngineConfig, choices: Choices, spec: Spec, case: Case) -> None:
    """Refuse a mesh over which these heads cannot be dealt out, and a variant that cannot run. Raises ConfigError."""
    if case.what == "vae":  # tiles, which go to any number of ranks
        return
    config = replace(config, sp=case.sp, tp=case.tp, attend=case.variant or "auto")
    try:
        mesh, _ = choose_mesh(config, case.ranks, Heads(spec.dit.heads, spec.text.kv_heads, weights=0))
        if case.variant:
            choose_variant(config, mesh, choices, spec.dit)
    except ConfigError as error:
        raise ConfigError(f"only: {case.name}: {error}") from None


class Pool:
    """`world` processes, each on its device, that measure cases together; or for a `world` of 1 as many as there are
    `cards`, that each measure alone at the same time, where the case is for every card."""

    def __init__(self, world: int, cards: int, settings: Settings) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="twinreel-scaling-")
        spawn = get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        self._together = spawn.Barrier(cards)  # it ends with the last who holds it here
        for rank in range(cards):
            ours, theirs = spawn.Pipe()
            meeting = str(Path(self._folder.name, "meeting"))
            given = rank, world, meeting, settings, self._together
            process = spawn.Process(target=serve, args=(theirs, *given), daemon=True)
            start(process)
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, case: Case, limit: float) -> tuple[list[Any], str | None]:
        """Every process's figures, rank 0's first, or what went wrong on the first rank that says so."""
        end = time.monotonic() + limit
        lines = self._lines if case.each else self._lines[: self.world]
        results: list[Any] = [None] * len(lines)
        waiting: list[Any] = list(lines)
        try:
            for line in lines:
                line.send(case)
            while waiting:
                ready = wait(waiting, max(0.0, end - time.monotonic()))
                if not ready:
                    late = [rank for rank, line in enumerate(lines) if line in waiting]
                    return [], f"rank {late} did not answer within {limit:.0f} s"
                for rank, line in enumerate(lines):
                    if line in ready:
                        results[rank], error = line.recv()
                        if error is not None:
                            return [], error
                        waiting.remove(line)
        except (EOFError, OSError):
            codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
            return [], f"a rank ended; exit codes {codes}"
        return results, None

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for line in self._lines:
            line.close()
        self._folder.cleanup()


def serve(line: Connection, rank: int, world: int, meeting: str, settings: Settings, together: Barrier) -> None:
    """A rank: measure what is sent until the other end is gone."""
    follow()
    import traceback

    from .scaling_cases import MEETING, Bench

    bench: Bench | None = None
    while True:
        try:
            case = line.recv()
        except (EOFError, OSError):
            return
        try:
            bench = bench or Bench(rank, world, meeting, settings, partial(together.wait, MEETING))
            line.send((bench.run(case), None))
        except Exception as error:  # the edge of the process: the parent writes it down
            told = f"rank {rank}: {traceback.format_exc(limit=-6)}"
            line.send((None, told if str(error) in told else f"{told}\n{error}"))
