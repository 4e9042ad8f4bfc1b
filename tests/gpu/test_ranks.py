"""Ranks over real devices: NCCL, the compiled kernels and memory that GPUs share, by what the CPU's ranks keep.

`pytest tests/gpu/test_ranks.py` skips where there are fewer than two GPUs. `python tests/gpu/test_ranks.py 4` is strict:
it fails unless so many devices, NCCL, the compiled kernels and shared memory ran. Both need what `make venv` sets up,
and print what ran.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks import Place, Pool
from relayout_cases import check_contract
from twinreel.launch import quiet
from twinreel.layout import build_layout, shard, shard_sizes
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.modulation import LiveModulation, step_rows
from twinreel.ops import select
from twinreel.parallel import Parallel
from twinreel.parallel.mesh import Mesh, join_mesh
from twinreel.parallel.ulysses import PLAIN, Relayout, Ulysses
from twinreel.plan import make_plan
from twinreel.request import Request
from twinreel.schedule import make_sigmas, step_timesteps
from twinreel.spec import DiTSpec, Spec
from twinreel.tools.random_weights import fill
from twinreel.topology import open_board

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SPEC = DiTSpec(hidden=1024, layers=3, refiner_layers=1, ffn=2048, text_dim=64, freq_dim=64, time_hidden=64, time_dim=64)
TEXT, CANVAS, SECONDS = 37, (512, 512), 4.0
CLOSE = 2e-2  # relative L2 of bf16 velocities whose rows were cut otherwise, or whose sums were over parts


def join(place: Place, mesh: Mesh) -> Parallel:
    """The axes of a rank over NCCL."""
    quiet()
    torch.cuda.set_device(place.rank)
    if mesh not in place.kept:
        place.kept[mesh] = join_mesh(mesh, place.rank, backend="nccl", patience=60)
    return place.kept[mesh]


def packed() -> Relayout:
    """The production kernels."""
    from twinreel.ops import relayout

    return Relayout("packed", relayout.pack, relayout.merge)


def contract(place: Place) -> dict[str, Any]:
    """Both relayouts in both dtypes on one rank, over NCCL and over shared memory; what ran."""
    import torch.distributed as dist

    from twinreel.ops.rounding import INTERPRETED

    parallel, device = join(place, Mesh(sp=place.world)), f"cuda:{place.rank}"
    sp, facts = parallel.sp, {"device": f"{device} {torch.cuda.get_device_name(device)}"}
    board, problem = open_board(parallel, torch.device(device), place.world)
    for dtype in (torch.float32, torch.bfloat16):
        for each in (None, board) if board else (None,):
            check_contract(sp, PLAIN, "reference", device, dtype, each)
            check_contract(sp, packed(), "triton", device, dtype, each)
    facts |= {"backend": dist.get_backend(sp.group), "kernels": "interpreted" if INTERPRETED.value else "compiled"}
    return facts | {"board": problem or "works"}


@torch.inference_mode()
def forward(place: Place) -> dict[str, Any]:
    """Hashes of a few calls of a small DiT by every variant, and its distance to one rank (video, audio)."""
    device, dtype = torch.device("cuda", place.rank), torch.bfloat16
    ops = select("triton", device, dtype=dtype, head_dim=SPEC.head_dim)
    rows, sp_parallel = Rows(), join(place, Mesh(sp=place.world))
    board, problem = open_board(sp_parallel, device, place.world)
    assert board is not None, problem
    alone = rows.call(_dit(Parallel.single(), ops, dtype, device), Parallel.single())
    variants = {"plain": (PLAIN, 1, None), "packed": (packed(), 1, None), "chunks": (packed(), 2, None)}
    variants |= {"overlapped": (packed(), 2, board), "three": (packed(), 3, board)}
    digests, apart = {}, {}
    for name, (relayout, chunks, each) in variants.items():
        strategy = partial(Ulysses, relayout=relayout, chunks=chunks, board=each)
        parallel = replace(sp_parallel, strategy=strategy, board=each, chunks=chunks)
        dit = _dit(parallel, ops, dtype, device)
        made = [rows.call(dit, parallel) for _ in range(4)]
        assert all(torch.equal(a, b) for again in made[1:] for a, b in zip(made[0], again, strict=True)), name
        digests[name] = [hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:16] for x in made[0]]
        apart[name] = [distance(a, b) for a, b in zip(made[0], alone, strict=True)]
    tp = join(place, Mesh(tp=place.world))
    apart["tp"] = [distance(a, b) for a, b in zip(rows.call(_dit(tp, ops, dtype, device), tp), alone, strict=True)]
    meter = sp_parallel.every.meter
    return {"digests": digests, "apart": apart, "lap": meter.lap() if meter else {}, "attention": dict(ops.why)}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2."""
    return float((a - b).norm() / b.norm())


def _dit(parallel: Parallel, ops: Any, dtype: torch.dtype, device: torch.device) -> DiT:
    with torch.device("meta"):
        dit = DiT(SPEC, ops, parallel, dtype)
    fill(dit, device)
    return dit


class Rows:
    """A small request's rows on any mesh."""

    def __init__(self) -> None:
        self.spec = replace(Spec(), dit=SPEC)
        plan = make_plan(Request("a", size=CANVAS, duration=SECONDS), self.spec)
        self.layout = build_layout(plan, torch.ones(TEXT, dtype=torch.int64), self.spec)
        generator = torch.Generator().manual_seed(4)
        counts = len(self.layout.video_indices), len(self.layout.audio_indices), TEXT
        widths = SPEC.video_row, SPEC.audio_channels, SPEC.text_dim
        shapes = zip(counts, widths, strict=True)
        self.video, self.audio, self.text = (torch.randn(*shape, generator=generator) for shape in shapes)
        self.times, self.indices = step_timesteps(self.layout, make_sigmas(4, (12.0, 3.0)), 1)
        self.modulation: Any = None

    def call(self, dit: DiT, parallel: Parallel) -> tuple[torch.Tensor, ...]:
        """Velocities of all rows."""
        sp, device, layout = parallel.sp, dit.condition_proj.weight.device, self.layout
        if self.modulation is None:
            with torch.device("meta"):
                live = LiveModulation(SPEC, dit.dtype)
            self.modulation = fill(live, device)
        part = shard(layout, sp.size, sp.rank)
        mine = part.layout
        parallel.reserve(len(mine.tags_S), SPEC.heads, SPEC.head_dim * dit.dtype.itemsize)
        where = mine.text_indices, mine.video_indices, mine.audio_indices
        at = make_row_state(mine.positions_S3, mine.tags_S, where, SPEC, dit.dtype, device, used=part.used)
        refined = dit.refine(self.text.to(device))[part.text]
        read = step_rows(part.take(self.indices, int(self.indices[0])).to(device), at.tags)
        mod = self.modulation.step(self.times, read)
        own = dit(self.video[part.video].to(device), self.audio[part.audio].to(device), refined, at, mod)
        return tuple(sp.join(x, size) for x, size in zip(own, shard_sizes(layout, sp.size), strict=True))


def run(world: int) -> None:
    """Contract and calls over `world` devices, strictly."""
    if not 2 <= world <= (here := torch.cuda.device_count()):
        sys.exit(f"test_ranks: got {world} devices; 2 and more are possible, and this machine shows {here}")
    pool, begin = Pool(world, Path(tempfile.mkdtemp())), time.monotonic()
    try:
        facts = pool.run(contract)
        for fact in facts:
            print(f"relayout contract, CUDA mode: {fact}", flush=True)
            assert (fact["backend"], fact["kernels"], fact["board"]) == ("nccl", "compiled", "works"), fact
        assert len({fact["device"] for fact in facts}) == world
        calls = pool.run(forward)
    finally:
        pool.close()
    for call in calls:
        print(
            f"calls: {call['digests']}\n  distance to one rank {call['apart']}\n  {call['lap']}\n  {call['attention']}"
        )
        assert len({tuple(digest) for digest in call["digests"].values()}) == 1, "the variants differ"
        assert all(0 <= far <= CLOSE for pair in call["apart"].values() for far in pair), call["apart"]
    assert all(call["digests"] == calls[0]["digests"] for call in calls), "ranks disagree"
    print(f"passed with {world} devices in {time.monotonic() - begin:.0f} s")


def test_ranks_on_real_devices() -> None:
    run(4 if torch.cuda.device_count() >= 4 else 2)


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
