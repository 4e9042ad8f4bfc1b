"""How one model is spread over ranks: the axes of the mesh, and what a block calls to attend."""

from __future__ import annotations

from dataclasses import dataclass

from twinreel.parallel.attend import Attend, AttentionFn, Local, Strategy
from twinreel.parallel.axis import Axis
from twinreel.parallel.meter import Meter

__all__ = ["Attend", "Axis", "Local", "Meter", "Parallel", "Strategy"]


@dataclass(frozen=True)
class Parallel:
    """How the parts of one model are spread over ranks.

    sp, tp: the DiT's rows over one, its heads and feed-forward width over the other. text: the conditioner's heads.
    every: all ranks, for work that is dealt out (tiles, tables). control: all ranks, CPU tensors and objects, for
    decisions. `strategy` turns a dense attention and the `sp` axis into the object that a block calls to attend.
    """

    sp: Axis
    tp: Axis
    strategy: Strategy = Local
    text: Axis = Axis("text")
    every: Axis = Axis("every")
    control: Axis = Axis("control")

    @classmethod
    def single(cls) -> Parallel:
        """One process that holds everything."""
        return cls(Axis("sp"), Axis("tp"))

    def attend(self, attention: AttentionFn) -> Attend:
        """The attend object for blocks whose rows are sharded over `sp`."""
        return self.strategy(attention, self.sp)
