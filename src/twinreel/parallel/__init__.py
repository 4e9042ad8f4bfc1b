"""Axes of the device mesh. Every method is the identity on an axis of one rank: nothing else asks how many there are.

`torch.distributed` is imported by the first collective of an axis with several ranks, never by a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinreel.parallel.attend import Attend, AttentionFn, Local, Strategy

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Attend", "Axis", "Local", "Parallel", "Strategy"]


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh: its name, its number of ranks, this process's rank and the process group.

    `group=None` with several ranks is torch.distributed's default group. Results are the same on every rank.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"axis {self.name!r}: rank {self.rank} is not within its {self.size} ranks")

    def share(self, total: int) -> int:
        """One rank's part of `total` equal things. ValueError when they cannot be dealt out evenly."""
        if total % self.size:
            raise ValueError(f"axis {self.name!r}: {total} cannot be dealt out evenly to {self.size} ranks")
        return total // self.size

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's contiguous part of a whole tensor along `dim`, as a view."""
        part = self.share(x.shape[dim])
        return x.narrow(dim, self.rank * part, part)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors; works in place on `x` when there are several ranks."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors (equal shapes) joined along `dim` in rank order."""
        if self.size == 1:
            return x
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def vote(self, ballot: Tensor) -> Tensor:
        """The largest value that any rank cast, element by element; in place like `all_reduce`.

        Cast numbers whose maximum is the decision, such as 0 for "go on" and higher codes for reasons to stop.
        """
        if self.size == 1:
            return ballot
        import torch.distributed as dist

        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group)
        return ballot


@dataclass(frozen=True)
class Parallel:
    """How one model is spread: rows over `sp`, heads and feed-forward width over `tp`.

    `strategy` turns a dense attention and the `sp` axis into the object that a block calls to attend.
    """

    sp: Axis
    tp: Axis
    strategy: Strategy = Local

    @classmethod
    def single(cls) -> Parallel:
        """One process that holds everything."""
        return cls(Axis("sp"), Axis("tp"))

    def attend(self, attention: AttentionFn) -> Attend:
        """The attend object for blocks whose rows are sharded over `sp`."""
        return self.strategy(attention, self.sp)
