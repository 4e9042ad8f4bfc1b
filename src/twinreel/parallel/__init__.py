"""How one model is spread over ranks: the axes of the mesh, and what a block calls to attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinreel.parallel.attend import Attend, AttentionFn, Local, Strategy
from twinreel.parallel.axis import Axis
from twinreel.parallel.meter import Meter

if TYPE_CHECKING:
    from twinreel.parallel.board import Board

__all__ = ["Attend", "Axis", "Local", "Meter", "Parallel", "Strategy"]


@dataclass(frozen=True)
class Parallel:
    """How the parts of one model are spread over ranks.

    sp, tp: the DiT's rows over one, its heads and feed-forward width over the other. text: the conditioner's heads;
    stored: its weights where they lie, gathered when used. every: all ranks, for work that is dealt out (tiles, tables).
    control: all ranks, CPU tensors and objects, for decisions. `strategy` turns a dense attention and the `sp` axis into
    the object that a block calls to attend; what it sends goes over `board` in `chunks` chunks where there is one.
    """

    sp: Axis
    tp: Axis
    strategy: Strategy = Local
    text: Axis = Axis("text")
    every: Axis = Axis("every")
    control: Axis = Axis("control")
    stored: Axis = Axis("stored")
    board: Board | None = None
    chunks: int = 1

    @classmethod
    def single(cls) -> Parallel:
        """One process that holds everything."""
        return cls(Axis("sp"), Axis("tp"))

    def attend(self, attention: AttentionFn) -> Attend:
        """The attend object for blocks whose rows are sharded over `sp`."""
        return self.strategy(attention, self.sp)

    def reserve(self, rows: int, heads: int, width: int) -> None:
        """Have room on the board for requests of `rows` rows on each rank, `heads` heads in all, `width` bytes each in a
        row. All ranks call it alike, before a request's steps."""
        if self.board is not None:
            from twinreel.parallel.ulysses import slot_sizes

            self.board.reserve(slot_sizes(rows, self.tp.share(heads), width, self.sp.size, self.chunks))
