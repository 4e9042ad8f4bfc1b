"""A 56-head miniature on several ranks: its rows, its weights' shards, and one call of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from golden_dit import golden_weights
from ranks import Place
from twinreel.layout import CLOCK_AUDIO, CLOCK_CONDITION, CLOCK_VIDEO, PackedLayout, shard, shard_sizes
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.layers import ColumnLinear, RowLinear
from twinreel.models.modulation import LiveModulation, step_rows
from twinreel.ops import select
from twinreel.parallel import Parallel
from twinreel.parallel.mesh import Mesh, join_mesh
from twinreel.parallel.ulysses import PLAIN, Relayout, Ulysses
from twinreel.schedule import make_sigmas, step_timesteps
from twinreel.spec import DiTSpec
from twinreel.topology import open_board

HEADS = DiTSpec(
    hidden=64, layers=2, refiner_layers=1, heads=56, head_dim=8, ffn=112, text_dim=24, freq_dim=16, time_hidden=32,
    time_dim=24, rope_freqs=1,
)  # fmt: skip


def packed(text: int, conditions: int, audio: int, video: int) -> PackedLayout:
    """Rows of four kinds at drawn positions."""
    counts = (text, conditions, audio, video)
    total = sum(counts)
    rows = torch.arange(total).split(counts)
    generator = torch.Generator().manual_seed(total)
    return PackedLayout(
        segments=(),
        positions_S3=torch.rand(total, 3, dtype=torch.float64, generator=generator) * 90,
        tags_S=torch.tensor([1] * text + [0] * conditions + [2] * audio + [0] * video),
        clock_S=torch.repeat_interleave(
            torch.tensor([CLOCK_VIDEO, CLOCK_CONDITION, CLOCK_AUDIO, CLOCK_VIDEO]), torch.tensor(counts)
        ),
        text_indices=rows[0],
        video_indices=torch.cat((rows[1], rows[3])),
        audio_indices=rows[2],
        condition_video=conditions,
        condition_audio=0,
    )


def dit_of(parallel: Parallel, kernels: bool = False) -> tuple[DiT, LiveModulation]:
    """The DiT of a rank, with its part of `golden_weights`. `kernels`: q and k are normalised by Triton's interpreter."""
    spec, ops = HEADS, select("reference")
    if kernels:
        spec = replace(spec, layers=1, refiner_layers=0)  # the interpreter is slow
        ops = replace(ops, qk_norm_rope=select("triton", head_dim=spec.head_dim).qk_norm_rope)
    dit, modulation = DiT(spec, ops, parallel, torch.float32), LiveModulation(spec, torch.float32)
    weights = golden_weights(spec)
    for name, module in dit.named_modules():
        if isinstance(module, ColumnLinear | RowLinear):
            weights[f"{name}.weight"] = module.shard(weights[f"{name}.weight"]).clone()
    dit.load_state_dict({name: weights[name] for name in dit.state_dict()})
    modulation.load_state_dict({name: weights[name] for name in modulation.state_dict()})
    return dit, modulation


@torch.inference_mode()
def call(dit: DiT, modulation: LiveModulation, layout: PackedLayout, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """Velocities of all rows, from the second of four steps."""
    generator = torch.Generator().manual_seed(5)
    counts = len(layout.video_indices), len(layout.audio_indices), len(layout.text_indices)
    widths = dit.spec.video_row, dit.spec.audio_channels, dit.spec.text_dim
    video, audio, text = (torch.randn(*shape, generator=generator) for shape in zip(counts, widths, strict=True))
    sp = parallel.sp
    part = shard(layout, sp.size, sp.rank)
    mine = part.layout
    parallel.reserve(len(mine.tags_S), dit.spec.heads, dit.spec.head_dim * dit.dtype.itemsize)
    times, indices = step_timesteps(layout, make_sigmas(4, (12.0, 3.0)), 1)
    where = mine.text_indices, mine.video_indices, mine.audio_indices
    at = make_row_state(mine.positions_S3, mine.tags_S, where, dit.spec, dit.dtype, "cpu", used=part.used)
    read = step_rows(part.take(indices, int(indices[0])), at.tags)
    refined = dit.refine(text)[part.text]
    own = dit(video[part.video], audio[part.audio], refined, at, modulation.step(times, read))
    sizes = shard_sizes(layout, sp.size)
    return tuple(sp.join(rows, size) for rows, size in zip(own, sizes, strict=True))


@lru_cache(maxsize=8)
def alone(counts: tuple[int, int, int, int], kernels: bool = False) -> tuple[Tensor, Tensor]:
    """The same on one rank."""
    return call(*dit_of(Parallel.single(), kernels), packed(*counts), Parallel.single())


def joined(place: Place, mesh: Mesh, relayout: Relayout = PLAIN, chunks: int = 1, pushed: bool = False) -> Parallel:
    """The axes of a rank, and with `pushed` its board; made once a mesh."""
    if mesh not in place.kept:
        place.kept[mesh] = join_mesh(mesh, place.rank, backend="gloo", patience=60)
    parallel, board = place.kept[mesh], None
    if pushed:
        if ("board", mesh) not in place.kept:
            place.kept["board", mesh], problem = open_board(parallel, torch.device("cpu"), place.world)
            assert problem is None, problem
        board = place.kept["board", mesh]
    strategy = partial(Ulysses, relayout=relayout, chunks=chunks, board=board)
    return replace(parallel, strategy=strategy, board=board, chunks=chunks)


def distances(
    place: Place,
    mesh: Mesh,
    counts: tuple[int, int, int, int],
    chunks: int = 1,
    kernels: bool = False,
    pushed: bool = False,
) -> list[float]:
    """Relative L2 distance of video and audio rows to one rank; 0 is the same bits. `kernels`: of the relayout, too.
    `pushed`: over a board."""
    relayout = PLAIN
    if kernels:
        from twinreel.ops import relayout as triton

        relayout = Relayout("packed", triton.pack, triton.merge)
    parallel = joined(place, mesh, relayout, chunks, pushed)
    made, wanted = call(*dit_of(parallel, kernels), packed(*counts), parallel), alone(counts, kernels)
    return [
        0.0 if torch.equal(a, b) else max(((a - b).norm() / b.norm()).item(), 1e-30)
        for a, b in zip(made, wanted, strict=True)
    ]
