"""`twinreel bench scaling OUT.json`: one host's GPUs, one topology after the other, on random weights.

Each case is `MESH[:VARIANT][:WHAT]`: `sp1`, `sp2:plain`, `sp4:overlapped`, `sp2tp2`, `tp2`, `sp2:vae`, `sp4:whole`,
`sp4:whole-balanced`, `sp8:share`. `sp1` is the call of one rank on every card that the cases use, all at once: a pair is
as fast as its slower card. A share is what one rank of a mesh computes in a call, on one card, with nothing sent: what
the mesh would take if the exchange cost nothing. What OUT.json holds is not measured again, so a run can be cut into
pieces; but `sp1` is, on all of them, when the cases use more cards than it had, and so is what failed. One run at a time
has OUT.json. `times` and `ceiling` come from the file, so cases can be measured in any order; velocities are compared
with those of `sp1` only where it was measured before, and they still lie beside the file. On a CPU the cards are
processes that share its cores: there the figures show that a case runs, not what it brings, and a ceiling may be above
the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ..config import MOST, Choices, EngineConfig, resolve
from ..errors import ConfigError, RequestError
from ..flag_words import check_idle, check_positive, parse_size
from ..limits import STEPS, counted
from ..scratch import scratch
from ..spec import Spec
from ..topology import Sizes as Heads
from ..topology import choose_mesh, choose_variant
from ..watch import Watch, ignore
from .bench import Flags, refusing
from .scaling_record import Case, Record, base_path, each_card, held, parse_case, read_base
from .workers import divide, follow, start

# sp, tp; that of three ranks is for the bundled model
MESHES = ((1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (8, 1))
LARGEST = 8  # ranks of a case that nobody named
BALANCED = "forecast:balanced"
CALLS = 49


@dataclass(frozen=True)
class Settings:
    """What is alike for all cases. shape: as `shape_spec` has them. base: the file of one rank's velocities. rows: shapes
    of its `video` and `audio`. alike: what figures of one file have in common, by name."""

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
    rows: dict[str, tuple[int, int]]
    alike: dict[str, Any]


def default_cases(devices: int, whole: bool, refused: Callable[[Case], str | None]) -> list[list[Case]]:
    """Calls and VAE of every mesh that fits, shares of the others, then whole requests on the largest that fits; only
    meshes over which the model can be dealt out."""
    meshes = [mesh for mesh in MESHES if refused(Case(*mesh, "", "call")) is None]
    fit = [(sp, tp) for sp, tp in meshes if sp * tp <= min(devices, LARGEST)]
    names = [f"sp{sp}tp{tp}" for sp, tp in fit]
    names += [f"sp{sp}:vae" for sp, tp in fit if tp == 1]
    names += [f"sp{sp}tp{tp}:share" for sp, tp in meshes if (sp, tp) not in fit]
    if whole:
        most = max(sp for sp, tp in fit if tp == 1)
        names += [f"sp{most}:whole", f"sp{most}:whole-balanced"]
    return [parse_case(name) for name in names]


def parser() -> Flags:
    """The flags."""
    flags = Flags(prog="twinreel bench scaling", description=__doc__)
    flags.add_argument("out", type=Path, help="JSON file to write, and to go on from")
    default = "all that can run here; on a CPU of at most as many ranks as cores or, where it is given, as --gpus says"
    flags.add_argument("--only", help=f"cases, comma-separated; default {default}")
    flags.add_argument(
        "--shape", choices=("released", "bundled", "tiny", "wide"), default="released", help="sizes of the model"
    )
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a CPU shows that it runs")
    flags.add_argument("--gpus", type=int, help="use no more than so many; on a CPU, ranks, even if it has fewer cores")
    flags.add_argument("--frames", type=int, default=124, help="of the clip")
    flags.add_argument("--size", help="WxH; default 1344x768, or the smaller models' own")
    flags.add_argument("--text", type=int, default=300, help="prompt rows")
    flags.add_argument("--ops", default="auto", help="table of kernels")
    flags.add_argument("--attention", default="auto", help="as in the engine")
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
    flags, seen = parser().read(words)
    check_idle(seen, {}, {"only": ("whole",)})
    check_positive(vars(flags), ("gpus", "frames", "text", "seconds", "calls", "budget", "case_limit"))
    with redirect_stdout(sys.stderr) if flags.json else nullcontext():
        with refusing(vars(flags), seen):
            # on CUDA elsewhere: what has tried a card holds a part of it, in exclusive mode all of it
            (prepared,) = divide(prepare, [flags]) if flags.device == "cuda" else [prepare(flags)]
            cases, settings, left_out = prepared
        with held(flags.out):
            record = Record(flags.out, settings.alike)
            if not read_base(Path(settings.base), settings.alike, settings.rows) and record.has("sp1"):
                left_out.append(f"velocities of sp1 are gone from {settings.base}; calls are not compared without them")
            for line in left_out:
                print(f"bench scaling: {line}")
            measure(cases, settings, record, flags)
    print(json.dumps({"bench": "scaling", **record.values}))
    return 1 if record.failed else 0


def measure(cases: Sequence[Case], settings: Settings, record: Record, flags: argparse.Namespace) -> None:
    """Measure what of `cases` the record lacks, and keep it there."""
    cards = max((case.world for case in cases), default=1)
    missing = [case for case in cases if not record.has(case.name, cards if case.each else 0)]
    if there := len(cases) - len(missing):
        print(f"bench scaling: {record.path.name} has {there} of the {counted(len(cases), 'case')} already")
    if missing and settings.device == "cpu":
        print("bench scaling: ranks of one CPU share its cores: that a case runs is shown, not what it brings")
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
            told = each_card(results) if case.each and results else (results or [None])[0]
            record.keep(case.name, told, failure, time.monotonic() - begin)
    finally:
        if pool is not None:
            pool.close()


def prepare(flags: argparse.Namespace, watch: Watch = ignore) -> tuple[list[Case], Settings, list[str]]:
    """What to measure, under what, and what of it is left out, in words: all that can be known before there are ranks.
    Raises ValueError, MemoryError, ConfigError, RequestError."""
    words = [parse_case(text.strip()) for text in flags.only.split(",")] if flags.only is not None else None
    if (calls := flags.calls or CALLS) not in range(1, int(STEPS.high)):
        raise RequestError("calls", f"got {calls}; a request makes 1 to {STEPS.high - 1}")
    text = flags.size or ("1344x768" if flags.shape == "released" else None)
    size = parse_size(text) if text else None

    import torch

    from ..ops import describe
    from .bench_dit import Sizes, plan_of
    from .random_weights import check_room, shape_spec

    spec, sizes = shape_spec(flags.shape), Sizes(flags.frames, size, flags.text)
    plan, layout = plan_of(sizes, spec)
    config = EngineConfig(device=flags.device, ops=flags.ops, attention=flags.attention)
    choices = resolve(config, spec.dit.head_dim)
    cuda = choices.device.type == "cuda"
    devices = min(flags.gpus or MOST, torch.cuda.device_count() if cuda else MOST)
    refused = partial(refusal, config, choices, spec)
    if words is None:
        cores = devices if cuda or flags.gpus else os.cpu_count() or 1
        words = [
            [case for case in cases if refused(case) is None] for cases in default_cases(cores, flags.whole, refused)
        ]
    cases, left_out = choose_cases(words, devices, refused)
    cards = max(case.world for case in cases)
    check_room(
        max(filled(spec, choices, case) * (cards if case.each else case.world) for case in cases), choices.device
    )
    alike = {
        "shape": flags.shape, "device": torch.cuda.get_device_name(choices.device) if cuda else "cpu",
        "frames": plan.frames, "size": f"{plan.width}x{plan.height}", "text": flags.text, "calls": calls,
        "ops": choices.ops.name, "attention": describe(choices.ops)["attention"], "torch": torch.__version__,
    }  # fmt: skip
    base = str(base_path(flags.out))
    rows = {
        "video": (len(layout.video_indices), spec.dit.video_row),
        "audio": (len(layout.audio_indices), spec.dit.audio_channels),
    }
    settings = Settings(
        flags.shape, flags.device, flags.frames, size, flags.text, flags.ops, flags.attention, flags.seconds, calls,
        base, rows, alike,
    )  # fmt: skip
    return cases, settings, left_out


def choose_cases(
    words: Sequence[Sequence[Case]], devices: int, refused: Callable[[Case], str | None]
) -> tuple[list[Case], list[str]]:
    """Of what each word means the cases that can run here, of a whole request the first of them, each once; and a line
    for each of the others. Raises ConfigError for a word of which nothing is left."""
    found, left_out = list[Case](), list[str]()
    for cases in words:
        problems = {
            case: f"it needs {case.world} devices, and there are {devices}" if case.world > devices else refused(case)
            for case in cases
        }
        kept = [case for case, problem in problems.items() if problem is None]
        if not kept:
            raise ConfigError(f"--only: {cases[0].name}: {problems[cases[0]]}")
        if cases[0].what.startswith("whole"):
            kept = kept[:1]
        else:
            left_out += [f"without {case.name}: {problem}" for case, problem in problems.items() if problem is not None]
        found += kept
    return list(dict.fromkeys(found)), left_out


def refusal(config: EngineConfig, choices: Choices, spec: Spec, case: Case) -> str | None:
    """Why heads cannot be dealt out over this mesh, or this variant cannot run, or None."""
    if case.what == "vae":  # tiles, which go to any number of ranks
        return None
    config = replace(config, sp=case.sp, tp=case.tp, attend=case.variant or "auto")
    try:
        mesh, _ = choose_mesh(config, case.ranks, Heads(spec.dit.heads, spec.dit.ffn, spec.text.kv_heads, weights=0))
        if case.variant:
            choose_variant(config, mesh, choices, spec.dit)
    except ConfigError as error:
        return str(error)
    return None


def filled(spec: Spec, choices: Choices, case: Case) -> int:
    """Bytes of the weights that one rank of `case` has at once, about."""
    from ..weights import stored_bytes

    if case.what == "vae":
        return stored_bytes(spec, "video_decoder")
    need = stored_bytes(spec, f"dit:{spec.partitions[0].name}") // case.tp
    if case.what.startswith("whole"):
        need += stored_bytes(spec, "text_encoder") // math.gcd(spec.text.kv_heads, case.ranks)
    return need * choices.dtype.itemsize // 2  # stored in bf16


class Pool:
    """`world` processes, each on its device, that measure cases together; or for a `world` of 1 as many as there are
    `cards`, that each measure alone at the same time, where the case is for every card."""

    def __init__(self, world: int, cards: int, settings: Settings) -> None:
        self.world = world
        self._held = ExitStack()
        folder = self._held.enter_context(scratch("scaling"))
        spawn = get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        self._together = spawn.Barrier(cards)  # it ends with the last who holds it here
        for rank in range(cards):
            ours, theirs = spawn.Pipe()
            given = rank, world, str(folder / "meeting"), settings, self._together
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
                    return [], f"rank {late} did not answer within {limit:g} s"
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
        self._held.close()


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
