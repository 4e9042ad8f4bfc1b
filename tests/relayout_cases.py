"""What any relayout must do over several ranks, on whichever device: gloo and the CPU, or NCCL and real GPUs.

The oracle is computed on every rank from the whole rows, and depends on q, k and v each in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.models.dit import HeadNorm
from twinreel.models.layers import RMSNorm
from twinreel.ops import select
from twinreel.parallel import Axis
from twinreel.parallel.board import Board
from twinreel.parallel.ulysses import Relayout

ROWS, HEADS, DIM, ANGLES = 3, 16, 16, 5  # rows of each rank


@dataclass(frozen=True)
class At:
    """Rows of one rank, or of all."""

    rope: tuple[Tensor, Tensor]
    used: int


@dataclass(frozen=True)
class Whole:
    """qkv [R*S, H*3*d] of all rows, their rotation, the norms."""

    qkv: Tensor
    rope: tuple[Tensor, Tensor]
    norms: HeadNorm

    def part(self, rank: int) -> tuple[Tensor, At]:
        """The rows of one rank."""
        rows = slice(rank * ROWS, (rank + 1) * ROWS)
        return self.qkv[rows], At(tuple(table[rows] for table in self.rope), self.used)

    @property
    def used(self) -> int:
        """The last rank but one ends in padding, the last is padding alone."""
        return len(self.qkv) - 2 * ROWS + 2

    def parts(self) -> Tensor:
        """Normalised and rotated q, k and v of all rows, [R*S, 3, H, d]."""
        return torch.stack(self.norms(self.qkv, At(self.rope, self.used)), dim=1)


def whole(table: str, device: str, dtype: torch.dtype, ranks: int) -> Whole:
    """Drawn on the CPU, the same on every rank. `table`: the ops that normalise for the oracle."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    norms = [RMSNorm(DIM, eps, dtype).requires_grad_(False).to(device) for eps in (1e-5, 1e-3)]
    for norm in norms:
        norm.weight.copy_(1 + 0.3 * draw(DIM))
    ops = select(table, device, dtype=dtype, head_dim=DIM)
    rope = draw(ranks * ROWS, ANGLES), draw(ranks * ROWS, ANGLES)
    return Whole(draw(ranks * ROWS, HEADS * 3 * DIM), rope, HeadNorm(ops, *norms, DIM))


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of attention: each input counts differently."""
    return q - 2 * k.flip(0) + v * v


@torch.inference_mode()
def check_contract(
    axis: Axis, relayout: Relayout, table: str, device: str, dtype: torch.dtype, board: Board | None = None
) -> None:
    """There: each rank has all rows of its heads, in rank order. Back: each has its rows, all heads, a clear tail."""
    ranks, spans = axis.size, ((0, 4), (4, HEADS))
    all_rows = whole(table, device, dtype, ranks)
    parts, used = all_rows.parts(), all_rows.used
    mine, at = all_rows.part(axis.rank)
    returned, made = [], []
    if board is not None:
        board.reserve([len(mine) * ranks * 3 * HEADS * DIM * dtype.itemsize] * 6)

    def exchanged(x: Tensor, slot: int) -> Tensor:
        return (axis.exchange(x) if board is None else board.exchange(x, slot)).wait()

    for slot, (start, stop) in enumerate(spans):
        chunk, share, own = mine.unflatten(1, (HEADS, -1))[:, start:stop].flatten(1), (stop - start) // ranks, None
        if board is not None:  # which carries every part but our own
            place = board.place(slot, (ranks, ROWS, 3, share, DIM), dtype)
            own = axis.rank, place[axis.rank].fill_(float("nan"))
        arrived = exchanged(relayout.pack(chunk, all_rows.norms, at, ranks, own), slot)
        heads = slice(start + axis.rank * share, start + (axis.rank + 1) * share)
        assert torch.equal(arrived.flatten(0, 1), parts[:, :, heads])
        for wrong in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
            assert not torch.equal(arrived.flatten(0, 1), parts[:, wrong, heads])
        out = mixed(*arrived.flatten(0, 1)[:used].unbind(1))
        tail = out.new_full((ranks * ROWS - used, *out.shape[1:]), float("nan"))  # nobody may read it
        back = torch.cat((out, tail)).unflatten(0, (ranks, ROWS))
        pieces = [part.contiguous() for part in back.split(share - share // 2, dim=2)]
        returned.append([exchanged(piece, 2 + 2 * slot + number) for number, piece in enumerate(pieces)])
        made.append(pieces)
    valid = max(0, min(ROWS, used - axis.rank * ROWS))
    merged = relayout.merge(returned, valid, None if board is None else (axis.rank, made))
    wanted = mixed(*parts[:used].unbind(1))[axis.rank * ROWS :][:ROWS]
    assert merged.shape == (ROWS, HEADS, DIM) and len(wanted) == valid
    assert torch.equal(merged[:valid], wanted) and not merged[valid:].any()
