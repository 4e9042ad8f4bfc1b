"""Memory of each rank that the others write into: heads travel by the copy engines while something else is computed.

A rank writes its part of an exchange straight to where the other one reads it, and signals. Each exchange of a block has
a slot of its own, so that one arrives while another is read. No slot asks whether it may be written again: a rank
writes into it for the next block only after it has waited for every rank's heads of this one, which those ranks send
after they have read theirs, and it sends its own only after every rank's rows of the next block have arrived.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twinreel.parallel.axis import Axis
from twinreel.parallel.lanes import Lanes
from twinreel.parallel.team import Team

ALIGNMENT = 256  # bytes
PROBE = 4096  # values that a probe sends to each rank


class Memory(Protocol):
    """`size` bytes on every rank of an axis.

    views: each rank's bytes as this rank reads and writes them, uint8 [size], this rank's own among them; there after
    `meet`, which all ranks call. `signal` tells `rank` on `channel`, after what this stream has written before; `wait`
    holds this stream until `rank` has told us. A channel carries one signal at a time between two ranks.
    """

    views: Sequence[Tensor]

    def meet(self) -> None: ...
    def signal(self, rank: int, channel: int) -> None: ...
    def wait(self, rank: int, channel: int) -> None: ...


class PeerMemory:
    """CUDA memory that the other GPUs of the host have mapped (torch's symmetric memory; no multicast)."""

    def __init__(self, axis: Axis, device: torch.device, patience: float, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._axis, self._size, self._milliseconds = axis, size, int(patience * 1e3)
        self._own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = None
        self.views: Sequence[Tensor] = ()

    def meet(self) -> None:
        """Map the others' memory."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        group: Any = self._axis.group or dist.group.WORLD
        self._handle = symmetric.rendezvous(self._own, group)
        assert self._handle.rank == self._axis.rank and self._handle.world_size == self._axis.size
        self.views = [self._handle.get_buffer(rank, (self._size,), torch.uint8) for rank in range(self._axis.size)]

    def signal(self, rank: int, channel: int) -> None:
        """A kernel of one thread on the current stream; the device of this process is lost when nobody takes the signal."""
        self._handle.put_signal(rank, channel, self._milliseconds)

    def wait(self, rank: int, channel: int) -> None:
        """A kernel of one thread on the current stream; the device of this process is lost when no signal comes."""
        self._handle.wait_signal(rank, channel, self._milliseconds)


class HostMemory:
    """The same between processes of one host on the CPU: mapped files, and messages of one byte as signals."""

    def __init__(self, axis: Axis, size: int) -> None:
        self._axis, self._size = axis, size
        self._folder = tempfile.TemporaryDirectory(prefix="twinreel-ranks-")
        self._sending: dict[tuple[int, int], Any] = {}
        self.views: Sequence[Tensor] = ()

    def meet(self) -> None:
        """Map the others' files; nobody's file outlives the meeting."""

        def mapped(path: str) -> Tensor:
            return torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)

        own = str(Path(self._folder.name, "memory"))
        mine = mapped(own)
        paths = self._axis.tell_all(own)
        self.views = [mine if rank == self._axis.rank else mapped(path) for rank, path in enumerate(paths)]
        self._axis.tell_all(None)
        self._folder.cleanup()

    def signal(self, rank: int, channel: int) -> None:
        """Returns at once, or when the signal before it has been taken."""
        import torch.distributed as dist

        with suppress(KeyError):
            self._sending.pop((rank, channel)).wait()
        word = torch.zeros(1, dtype=torch.uint8)
        self._sending[rank, channel] = dist.isend(word, group=self._axis.group, group_dst=rank, tag=channel)

    def wait(self, rank: int, channel: int) -> None:
        """Returns when `rank` has signalled."""
        import torch.distributed as dist

        dist.recv(torch.empty(1, dtype=torch.uint8), group=self._axis.group, group_src=rank, tag=channel)


class Board:
    """Slots in a `Memory` over an axis; `reserve` makes room for them, `exchange` is `Axis.exchange` through one.

    allocate: this rank's part of a new memory of so many bytes. control: all ranks that `reserve` together.
    """

    def __init__(self, axis: Axis, control: Axis, device: torch.device, allocate: Callable[[int], Memory]) -> None:
        self.axis, self.device = axis, device
        self._team, self._allocate = Team(control), allocate
        self._memory: Memory | None = None
        self._room: tuple[int, ...] = ()
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.lanes = Lanes(device)

    @property
    def size(self) -> int:
        """Bytes of the memory on each rank."""
        return sum(self._room)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have room for `sizes` bytes in slots 0, 1, ...; all ranks call it alike, with nothing on its way.

        What is there stays when it is enough. Raises every rank's first error, such as OutOfMemoryError.
        """
        wanted = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if len(wanted) <= len(self._room) and all(a <= b for a, b in zip(wanted, self._room, strict=False)):
            return
        there = [*self._room, *[0] * (len(wanted) - len(self._room))]
        room = [max(a, b) for a, b in zip(there, wanted + [0] * len(there), strict=False)]
        self._team.together(self._settle)  # nobody lets go of what another one may still write into
        self._memory, self._room = None, ()
        self._team.together(self._make_room)  # nobody maps it any more
        with torch.inference_mode(False):  # it outlives this request, and is written to outside of one
            memory = self._team.together(lambda: self._allocate(sum(room)))
            memory.meet()
        self._memory, self._room = memory, tuple(room)

    def place(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Where parts of `shape` [ranks, ...] arrive in `slot`. This rank's own part is not carried: whoever reads
        `Pushed.wait` there must have written it here, on the stream that reads."""
        return self._places(slot, shape, dtype)[self.axis.rank]

    def exchange(self, x: Tensor, slot: int) -> Pushed:
        """Start to send part r of dim 0 (one for each rank, contiguous) to every other rank r, into its `slot`."""
        axis = self.axis
        assert x.shape[0] == axis.size and x.is_contiguous() and x.device == self.device, (tuple(x.shape), x.stride())
        places = self._places(slot, x.shape, x.dtype)
        if self._side is None:
            self._push(x, places, slot)
            return Pushed(self, x, places[axis.rank], slot, None)
        # after everything that this stream has been given, the making of `x` above all
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._side):
            start.record(self._side)
            self._push(x, places, slot)
            end.record(self._side)
        if axis.meter is not None:
            axis.meter.carried(f"{axis.name}.all_to_all", start, end)
        return Pushed(self, x, places[axis.rank], slot, end)

    def probe(self) -> str | None:
        """Why an exchange does not give what it must, on any rank, or None. Makes room for a small one."""
        axis = self.axis
        x = torch.arange(axis.size * PROBE, dtype=torch.int32, device=self.device).view(axis.size, PROBE)
        self.reserve([x.numel() * x.element_size()] * 2)
        problem = None
        for turn in range(2):
            mine = x + 7 * axis.rank + turn
            sent = [self.exchange(mine, slot) for slot in range(2)]
            for slot, pushed in enumerate(sent):
                self.place(slot, x.shape, x.dtype)[axis.rank] = mine[axis.rank]
                wanted = torch.stack([x[axis.rank] + 7 * rank + turn for rank in range(axis.size)])
                if not torch.equal(pushed.wait(), wanted):
                    problem = "what arrived is not what was sent"
            if self._side is not None:
                torch.cuda.synchronize(self.device)
            self._team.control.tell_all(None)
        return next((said for said in self._team.control.tell_all(problem) if said), None)

    def _places(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        memory, size = self._memory, math.prod(shape) * dtype.itemsize
        assert memory is not None and slot < len(self._room) and size <= self._room[slot], (slot, size, self._room)
        first = sum(self._room[:slot])
        return [view[first : first + size].view(dtype).view(tuple(shape)) for view in memory.views]

    def _push(self, x: Tensor, places: Sequence[Tensor], slot: int) -> None:
        axis, memory = self.axis, self._memory
        assert memory is not None
        for step in range(1, axis.size):  # each rank begins with another one
            rank = (axis.rank + step) % axis.size
            places[rank][axis.rank].copy_(x[rank])
            memory.signal(rank, slot)

    def _make_room(self) -> None:
        if self._side is not None:
            torch.cuda.empty_cache()  # such memory is not the allocator's, which would keep what it has set aside

    def _settle(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self.device)

    def _arrive(self, slot: int, end: Any) -> None:
        memory = self._memory
        assert memory is not None
        for step in range(1, self.axis.size):
            memory.wait((self.axis.rank - step) % self.axis.size, slot)
        if end is not None:  # what was sent may be let go
            torch.cuda.current_stream(self.device).wait_event(end)


@dataclass(frozen=True)
class Pushed:
    """An exchange on its way. What was sent must stay as it is until `wait` has returned."""

    board: Board
    sent: Tensor
    arrived: Tensor
    slot: int
    end: Any

    def wait(self, since: Any = None) -> Tensor:
        """What arrived, part r from every other rank r, where it stays until the slot's next exchange; on a GPU only the
        current stream waits, which costs time from the event `since` on, if there is one."""
        board = self.board
        board.axis.measured("all_to_all", self.sent[1:], lambda: board._arrive(self.slot, self.end), since)
        return self.arrived


def peer_refusal(device: torch.device, ranks: int, local_ranks: int) -> str | None:
    """Why the GPUs of `ranks` ranks cannot write into each other's memory, or None; asked of this host alone."""
    if ranks != local_ranks:
        return f"{ranks} ranks on several hosts cannot write into each other's memory"
    if device.type != "cuda":
        return None
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    here = device.index or 0
    apart = [there for there in range(ranks) if there != here and not torch.cuda.can_device_access_peer(here, there)]
    return f"{device} cannot reach the memory of cuda:{apart[0]}" if apart else None
