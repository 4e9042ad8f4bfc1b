"""`twinreel bench scaling OUT.json`: one host's GPUs, one topology after the other, on random weights.

Each case is `MESH[:VARIANT][:WHAT]`: `sp1`, `sp2:plain`, `sp4:overlapped`, `sp2tp2`, `tp2`, `sp2:vae`, `sp4:whole`,
`sp4:whole-balanced`. What OUT.json holds is not measured again, so a run can be cut into pieces.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..flag_words import parse_size

VARIANTS = ("plain", "packed", "overlapped")
WHATS = ("call", "vae", "whole", "whole-balanced")
MESHES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1))  # sp, tp
BALANCED = "forecast:balanced"


@dataclass(frozen=True)
class Case:
    """One figure: a mesh, how rows and heads change places ("" where sp is 1), and what is measured."""

    sp: int
    tp: int
    variant: str
    what: str

    @property
    def world(self) -> int:
        """Ranks."""
        return self.sp * self.tp

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        mesh = (f"sp{self.sp}" if self.sp > 1 or self.tp == 1 else "") + (f"tp{self.tp}" if self.tp > 1 else "")
        return ":".join(part for part in (mesh, self.variant, self.what if self.what != "call" else "") if part)


@dataclass(frozen=True)
class Settings:
    """What is alike for all cases. shape: `released`, `bundled` or `wide` (the miniature with 56 heads)."""

    shape: str
    device: str
    frames: int
    size: tuple[int, int] | None
    text: int
    ops: str
    attention: str
    seconds: float
    calls: int | None
    folder: str


def parse_case(text: str) -> list[Case]:
    """The cases that `text` means: all variants where sp > 1 and none is named, the fastest one for whole requests.

    Raises ValueError.
    """
    mesh, *words = text.split(":")
    found = re.fullmatch(r"(?:sp(\d+))?(?:tp(\d+))?", mesh)
    if not mesh or found is None:
        raise ValueError(f"{text!r}: {mesh!r} is no mesh; write sp1, sp2, tp2, sp2tp2")
    sp, tp = (int(size or 1) for size in found.groups())
    words = ["overlapped" if word == "overlap" else word for word in words]
    unknown = [word for word in words if word not in VARIANTS + WHATS]
    if unknown:
        raise ValueError(f"{text!r}: {unknown[0]!r} is none of {', '.join(VARIANTS + WHATS)}")
    what = next((word for word in words if word in WHATS), "call")
    named = [word for word in words if word in VARIANTS]
    if sp == 1 or what == "vae":
        return [Case(sp, tp, "", what)]
    every = VARIANTS if what == "call" else VARIANTS[-1:]
    return [Case(sp, tp, variant, what) for variant in named or every]


def default_cases(devices: int, whole: bool) -> list[Case]:
    """Calls and VAE of every mesh that fits, then whole requests on the largest."""
    meshes = [(sp, tp) for sp, tp in MESHES if sp * tp <= devices]
    names = [f"sp{sp}tp{tp}" for sp, tp in meshes]
    names += [f"sp{sp}:vae" for sp, tp in meshes if tp == 1]
    if whole:
        most = max(sp for sp, tp in meshes if tp == 1)
        names += [f"sp{most}:whole", f"sp{most}:whole-balanced"]
    return [case for name in names for case in parse_case(name)]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="twinreel bench scaling", description=__doc__)
    flags.add_argument("out", type=Path, help="JSON file to write, and to go on from")
    flags.add_argument("--only", help="cases, comma-separated; default: all that this host's GPUs allow")
    flags.add_argument("--shape", choices=("released", "bundled", "wide"), default="released")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--gpus", type=int, help="use no more than so many")
    flags.add_argument("--frames", type=int, default=124)
    flags.add_argument("--size", help="WxH; default 1344x768, or the miniature's own")
    flags.add_argument("--text", type=int, default=300, help="prompt rows")
    flags.add_argument("--ops", default="auto")
    flags.add_argument("--attention", default="auto")
    flags.add_argument("--seconds", type=float, default=6.0, help="how long each call is measured")
    flags.add_argument("--calls", type=int, help="whole requests: model calls, instead of the 49 of 50 steps")
    flags.add_argument("--whole", action="store_true", help="whole requests too, where --only does not say")
    flags.add_argument("--budget", type=float, default=520.0, help="seconds after which no further case is begun")
    flags.add_argument("--case-limit", type=float, default=300.0, help="seconds for a case before it counts as stuck")
    return flags


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing. Exit code 0, or 1 when a case failed. Raises ConfigError for flags that cannot be met."""
    flags = parser().parse_args(words)
    try:
        cases, settings = _cases(flags), _settings(flags)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    record = Record(flags.out)
    start, pool = time.monotonic(), None
    for case in sorted((case for case in cases if not record.has(case)), key=lambda case: (case.world, case.what)):
        if time.monotonic() - start > flags.budget:
            print(f"bench scaling: the budget is spent before {case.name}; run the same command again")
            break
        if pool is None or pool.world != case.world:
            if pool is not None:
                pool.close()
            pool = Pool(case.world, settings)
        begin = time.monotonic()
        result, failure = pool.run(case, flags.case_limit)
        if failure is not None:
            pool.close()
            pool = None
        record.keep(case, result, failure, time.monotonic() - begin)
    if pool is not None:
        pool.close()
    print(json.dumps({"bench": "scaling", **record.values}))
    return 1 if record.failed else 0


def _settings(flags: argparse.Namespace) -> Settings:
    text = flags.size or ("1344x768" if flags.shape == "released" else None)
    size = parse_size(text) if text else None
    folder = str(flags.out.absolute().parent)
    return Settings(
        flags.shape, flags.device, flags.frames, size, flags.text, flags.ops, flags.attention, flags.seconds,
        flags.calls, folder,
    )  # fmt: skip


def _cases(flags: argparse.Namespace) -> list[Case]:
    devices = flags.gpus or 1024
    if flags.device == "cuda":
        import torch

        devices = min(devices, torch.cuda.device_count())
    if not flags.only:
        return default_cases(min(devices, 8), flags.whole)
    cases = [case for text in flags.only.split(",") for case in parse_case(text.strip())]
    for case in cases:
        if case.world > devices:
            raise ValueError(f"{case.name}: needs {case.world} devices, {devices} are here")
    return cases


class Record:
    """The JSON file: `cases` by name, `errors` of those that failed and are tried again."""

    def __init__(self, path: Path) -> None:
        self.path, self.failed = path, False
        empty: dict[str, Any] = {"cases": {}, "errors": {}}
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else empty

    def has(self, case: Case) -> bool:
        """Whether it has been measured."""
        return case.name in self.values["cases"]

    def keep(self, case: Case, result: Any, error: str | None, seconds: float) -> None:
        """Write one case down, and say it in a line."""
        self.values["errors"].pop(case.name, None)
        if error is not None:
            self.failed = True
            self.values["errors"][case.name] = error
        else:
            self.values["cases"][case.name] = {"took": seconds, **result}
        draft = self.path.with_name(self.path.name + ".new")
        draft.write_text(json.dumps(self.values, indent=1))
        draft.replace(self.path)
        told = error.strip().splitlines()[-1] if error else result["line"]
        print(f"{case.name:24} {told} ({seconds:.0f} s in all)", flush=True)


class Pool:
    """`world` processes, each on its device, that measure cases together."""

    def __init__(self, world: int, settings: Settings) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="twinreel-scaling-")
        spawn = get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = spawn.Pipe()
            meeting = str(Path(self._folder.name, "meeting"))
            process = spawn.Process(target=serve, args=(rank, world, meeting, theirs, settings), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, case: Case, limit: float) -> tuple[Any, str | None]:
        """Rank 0's figures, or what went wrong on the first rank that says so."""
        end = time.monotonic() + limit
        result: Any = None
        waiting: list[Any] = list(self._lines)
        try:
            for line in self._lines:
                line.send(case)
            while waiting:
                ready = wait(waiting, max(0.0, end - time.monotonic()))
                if not ready:
                    late = [rank for rank, line in enumerate(self._lines) if line in waiting]
                    return None, f"rank {late} did not answer within {limit:.0f} s"
                for rank, line in enumerate(self._lines):
                    if line in ready:
                        value, error = line.recv()
                        if error is not None:
                            return None, error
                        result = value if rank == 0 else result
                        waiting.remove(line)
        except (EOFError, OSError):
            codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
            return None, f"a rank ended; exit codes {codes}"
        return result, None

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for line in self._lines:
            line.close()
        self._folder.cleanup()


def serve(rank: int, world: int, meeting: str, line: Connection, settings: Settings) -> None:
    """A rank: measure what is sent until the other end is gone."""
    import traceback

    from .scaling_cases import Bench

    bench: Bench | None = None
    while True:
        try:
            case = line.recv()
        except (EOFError, OSError):
            return
        try:
            bench = bench or Bench(rank, world, meeting, settings)
            line.send((bench.run(case), None))
        except Exception as error:  # the edge of the process: the parent writes it down
            told = f"rank {rank}: {traceback.format_exc(limit=-6)}"
            line.send((None, told if str(error) in told else f"{told}\n{error}"))
