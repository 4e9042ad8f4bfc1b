"""An axis of the device mesh. Every method is the identity on an axis of one rank: nothing else asks how many there are.

`torch.distributed` is imported by the first collective of an axis with several ranks, never by a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinreel.parallel.meter import Meter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh: its name, its number of ranks, this process's rank and the process group.

    `group=None` with several ranks is torch.distributed's default group. Results are the same on every rank. `meter`
    measures what the collectives cost. `patient`: the same ranks over a group whose collectives may take minutes.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    meter: Meter | None = None
    patient: Axis | None = None

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

        self._keep_pace()
        self.measured("all_reduce", x, lambda: dist.all_reduce(x, group=self.group))
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors (equal shapes) joined along `dim` in rank order."""
        if self.size == 1:
            return x
        import torch

        parts = self.gather(x.contiguous()).wait()
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)

    def gather(self, x: Tensor) -> Exchange:
        """Start to give every rank all ranks' tensors (equal shapes, contiguous); `wait` gives them, [ranks, ...]."""
        if self.size == 1:
            return Exchange(self, "all_gather", x, x.unsqueeze(0), None)
        import torch.distributed as dist

        self._keep_pace()
        arrived = x.new_empty(self.size, *x.shape)
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # PyTorch 2.13 renamed it
        work = single(arrived, x.unsqueeze(0), group=self.group, async_op=True)
        return Exchange(self, "all_gather", x, arrived, work)

    def join(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The ranks' tensors, `sizes[r]` rows of rank r, joined along dim 0 in rank order."""
        if self.size == 1:
            return x
        import torch

        assert x.shape[0] == sizes[self.rank], (tuple(x.shape), sizes, self.rank)
        most = max(sizes)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        rows = self.all_gather(padded).unflatten(0, (self.size, most))
        return torch.cat([rows[rank, :size] for rank, size in enumerate(sizes)])

    def exchange(self, x: Tensor) -> Exchange:
        """Start to send part r of dim 0 (one for each rank, contiguous) to rank r; `wait` gives what the others sent."""
        if self.size == 1:
            return Exchange(self, "all_to_all", x, x, None)
        import torch
        import torch.distributed as dist

        assert x.shape[0] == self.size and x.is_contiguous(), (tuple(x.shape), x.stride())
        self._keep_pace()
        arrived = torch.empty_like(x)
        work = dist.all_to_all_single(arrived, x, group=self.group, async_op=True)
        return Exchange(self, "all_to_all", x[1:], arrived, work)  # our own part moves nowhere

    def vote(self, ballot: Tensor) -> Tensor:
        """The largest value that any rank cast, element by element; in place like `all_reduce`.

        Cast numbers whose maximum is the decision, such as 0 for "go on" and higher codes for reasons to stop.
        """
        if self.size == 1:
            return ballot
        import torch.distributed as dist

        self._keep_pace()
        self.measured("vote", ballot, lambda: dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group))
        return ballot

    def tell_all(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order. For small facts; the group must be one of CPU tensors."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def meet(self) -> None:
        """Return once every rank is here. Before a collective that has seconds, where one rank had work alone: kernels that
        are compiled for the first time may take it longer."""
        if self.patient is not None:
            self.patient.tell_all(None)

    def from_first(self, value: Any) -> Any:
        """Rank 0's picklable value; what the others pass is dropped. The group must be one of CPU tensors."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def _keep_pace(self) -> None:
        if self.meter is not None:
            self.meter.keep_pace()

    def measured(self, kind: str, x: Tensor, collective: Callable[[], Any], since: Any = None) -> None:
        """Run a collective that moves `x`, or the wait for one, and have the meter take note of it; `since`: see there."""
        if self.meter is None:
            collective()
            return
        with self.meter.waiting(f"{self.name}.{kind}", x.numel() * x.element_size(), x.device, since):
            collective()


@dataclass(frozen=True)
class Exchange:
    """A collective of `kind` on its way; `sent` counts as what it moves, and stays as it is until `wait` has returned."""

    axis: Axis
    kind: str
    sent: Tensor
    arrived: Tensor
    work: Any

    def wait(self, since: Any = None) -> Tensor:
        """What arrived, part r from rank r; on a GPU only the current stream waits, which costs time from the event `since`
        on, if there is one."""
        if self.work is not None:
            self.axis.measured(self.kind, self.sent, self.work.wait, since)
        return self.arrived
