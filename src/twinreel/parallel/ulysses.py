"""Sequence parallelism by heads: rows are sharded everywhere but in attention, where heads are.

Each rank makes qkv of its own rows for all heads, sends every other rank the heads that are its, attends over all rows
with its own heads, and sends the rows back. Heads may go in chunks: while one is on its way the next one's product or
attention runs. What a board does not carry, this rank's own part, is written where it is read. Attention is the same
call per head as on one rank, so its bits do not depend on how many there are.

Legend: R ranks, S rows on this rank, H heads before the exchange, h heads of a chunk after it (H / chunks / R), d head
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.parallel.attend import AttentionFn, Linear, QKNorm, Rows
from twinreel.parallel.axis import Axis, Exchange
from twinreel.parallel.board import Board, Pushed
from twinreel.parallel.lanes import Lanes

PIECES = 2  # in which a chunk that came over a board is attended with, if it has as many heads
Kept = tuple[int, Tensor]  # a rank, and its part of an exchange, which is read where it is
Pieces = Sequence[Sequence[Tensor]]  # of each chunk


@dataclass(frozen=True)
class Relayout:
    """How heads are put in order for an exchange and back.

    pack: (qkv [S, H*3*d], the norms, the rows, R, kept) -> [R, S, 3, h, d]: normalised, rotated, by destination; the
    part of the rank that `kept` names goes where it says, [S, 3, h, d], and nowhere else.
    merge: (of each chunk the pieces [R, S, h, d], both in head order, valid rows, kept) -> [S, H, d], later rows zero;
    the part of the rank that `kept` names is read in pieces of the same shapes beside it.
    """

    name: str
    pack: Callable[[Tensor, QKNorm, Rows, int, Kept | None], Tensor]
    merge: Callable[[Pieces, int, tuple[int, Pieces] | None], Tensor]


def pack(qkv: Tensor, qk_norm: QKNorm, at: Rows, ranks: int, kept: Kept | None = None) -> Tensor:
    """The definition of `Relayout.pack`. Rows lie as attention reads them: q, k, v are strided views of what arrives."""
    parts = qk_norm(qkv, at)
    rows, heads, dim = parts[0].shape
    packed = qkv.new_empty(ranks, rows, 3, heads // ranks, dim)
    for i, part_SHd in enumerate(parts):
        for rank, heads in enumerate(part_SHd.unflatten(1, (ranks, -1)).unbind(1)):
            target = kept[1] if kept and kept[0] == rank else packed[rank]
            target[:, i].copy_(heads)
    return packed


def merge(chunks: Pieces, valid: int, kept: tuple[int, Pieces] | None = None) -> Tensor:
    """The definition of `Relayout.merge`."""
    ranks = chunks[0][0].shape[0]
    heads = [
        (kept[1][c][p] if kept and kept[0] == rank else piece)[rank]
        for c, pieces in enumerate(chunks)
        for rank in range(ranks)
        for p, piece in enumerate(pieces)
    ]
    out = torch.cat(heads, dim=1)
    out[valid:].zero_()
    return out


PLAIN = Relayout("plain", pack, merge)


def refusal(heads: int, ranks: int, chunks: int) -> str | None:
    """Why `heads` heads cannot go over `ranks` ranks in `chunks` chunks, or None."""
    if heads % ranks:
        return f"{heads} heads cannot be dealt out evenly to {ranks} ranks of sequence parallelism"
    if not 1 <= chunks <= heads // ranks:
        return f"{heads // ranks} heads a rank cannot go in {chunks} chunks"
    return None


def head_bounds(heads: int, ranks: int, chunks: int) -> list[int]:
    """Where each chunk of one rank's heads ends, from 0 on, as evenly as they go. ValueError: as `refusal` says."""
    problem = refusal(heads, ranks, chunks)
    if problem:
        raise ValueError(problem)
    return [heads // ranks * i // chunks for i in range(chunks + 1)]


def piece_sizes(heads: int) -> list[int]:
    """Heads of each piece that a chunk of `heads` heads of one rank is attended with."""
    pieces = min(PIECES, heads)
    return [heads * (i + 1) // pieces - heads * i // pieces for i in range(pieces)]


def slot_sizes(rows: int, heads: int, width: int, ranks: int, chunks: int) -> list[int]:
    """Bytes that a rank of `rows` rows receives: q, k and v of each chunk, then what attention made of each piece.

    `heads` before the exchange, `width` bytes of one of them in one row.
    """
    bounds = head_bounds(heads, ranks, chunks)
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    slots = [*(3 * size for size in sizes), *(piece for size in sizes for piece in piece_sizes(size))]
    return [rows * ranks * width * size for size in slots]


class Ulysses:
    """Attends over rows that are sharded over `sp`. ValueError when called where gradients are recorded.

    `board`: chunk c goes through its slot c, and its pieces back through the slots after those of all chunks, as
    `slot_sizes` has them, which must have been reserved; without one, all go by the axis' all-to-all, whole.
    """

    def __init__(
        self, attention: AttentionFn, sp: Axis, relayout: Relayout = PLAIN, chunks: int = 1, board: Board | None = None
    ) -> None:
        if chunks < 1:
            raise ValueError(f"heads go in at least one chunk, got {chunks}")
        self.attention, self.sp, self.relayout, self.chunks, self.board = attention, sp, relayout, chunks, board
        self.lanes = Lanes(torch.device("cpu")) if board is None else board.lanes

    def __call__(self, x_SD: Tensor, qkv_linear: Linear, qk_norm: QKNorm, at: Rows) -> Tensor:
        """x_SD -> [S, H*d] in x's dtype; rows after `at.used` (of all ranks) are zero."""
        if torch.is_grad_enabled():
            raise ValueError("sequence parallelism is for inference: call it under torch.inference_mode()")
        ranks, rows, dim = self.sp.size, x_SD.shape[0], qk_norm.head_dim
        arriving = []
        for slot, (start, stop) in enumerate(self._spans(qkv_linear.out_features, 3 * dim)):
            whole = stop - start == qkv_linear.out_features
            qkv = qkv_linear(x_SD) if whole else qkv_linear.columns(x_SD, start, stop)
            own = self._own(slot, (ranks, rows, 3, (stop - start) // (3 * dim * ranks), dim), qkv.dtype)
            arriving.append(self._exchange(self.relayout.pack(qkv, qk_norm, at, ranks, own), slot))
        return self._returned(arriving, at, rows).flatten(1)

    def _returned(self, arriving: Sequence[Exchange | Pushed], at: Rows, rows: int) -> Tensor:
        """What attention makes of the chunks, back on the rank that has the rows, [S, H, d].

        No kernel that waits for another rank is queued beside attention before that could start: a multiprocessor that
        it holds would keep one of attention's blocks, and so all of it, waiting. So a chunk's arrival is waited for on the
        stream of its first piece, behind that of the chunk before, while that one's second piece runs on the other.
        """
        ranks, rank, lanes, slot = self.sp.size, self.sp.rank, self.lanes, self.chunks
        made, returning = list[list[Tensor]](), list[list[Exchange | Pushed]]()
        with lanes.fork():
            for exchange in arriving:
                share, first, ready, parts = exchange.arrived.shape[3], 0, None, list[Tensor]()
                made.append([])
                returning.append([])
                for heads in [share] if self.board is None else piece_sizes(share):
                    with lanes.piece(bool(parts), ready) as since:
                        if not parts:
                            parts = list(exchange.wait(since).flatten(0, 1).unbind(1))
                            ready = lanes.mark()
                        q_Shd, k_Shd, v_Shd = (part[:, first : first + heads] for part in parts)
                        out_Shd = self.attention(q_Shd, k_Shd, v_Shd, at.used).contiguous()
                        made[-1].append(out_Shd.unflatten(0, (ranks, rows)))
                        returning[-1].append(self._exchange(made[-1][-1], slot))
                    first, slot = first + heads, slot + 1
        chunks = [[exchange.wait() for exchange in pieces] for pieces in returning]
        valid = max(0, min(rows, at.used - rank * rows))
        return self.relayout.merge(chunks, valid, None if self.board is None else (rank, made))

    def _own(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Kept | None:
        """Where this rank's own part of what arrives in `slot` is read, so that packing writes it there; None where the
        exchange carries it."""
        rank = self.sp.rank
        return None if self.board is None else (rank, self.board.place(slot, shape, dtype)[rank])

    def _exchange(self, x: Tensor, slot: int) -> Exchange | Pushed:
        return self.sp.exchange(x) if self.board is None else self.board.exchange(x, slot)

    def _spans(self, outputs: int, width: int) -> list[tuple[int, int]]:
        """Outputs of each chunk: whole groups of one head for every rank, as evenly as they go."""
        unit = self.sp.size * width
        bounds = [unit * bound for bound in head_bounds(outputs // width, self.sp.size, self.chunks)]
        return list(zip(bounds, bounds[1:], strict=False))
