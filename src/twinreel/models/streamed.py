"""Layers that take turns on the device: the weights of two of them are there, those of all lie in host memory or files.

`Streamed` takes the place of the list of layers that a model walks. Asking it for a layer, by index or by iterating,
makes that layer ready and has the next one brought while this one works, so a model walks it like any other list.
Nothing is ever copied back: weights do not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Protocol

import torch
from torch import Tensor, nn

SLOTS = 2  # layers on the device: one that works, one that arrives
ALIGN = 512  # bytes: where the allocators would begin a tensor of its own, or kernels might be chosen otherwise

# Layer index and its tensors by name, to be written in place.
Fill = Callable[[int, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Shelf:
    """Where each tensor of one layer lies in a run of `size` bytes: offset, shape, dtype by the name in the layer."""

    places: Mapping[str, tuple[int, torch.Size, torch.dtype]]
    size: int

    @classmethod
    def of(cls, layer: nn.Module) -> Shelf:
        """The shelf of a layer, which may be on the meta device: its parameters and its stored buffers."""
        places, size = {}, 0
        for name, tensor in layer.state_dict(keep_vars=True).items():
            places[name] = size, tensor.shape, tensor.dtype
            size += -(-tensor.nbytes // ALIGN) * ALIGN
        return cls(places, size)

    def views(self, run: Tensor) -> dict[str, Tensor]:
        """The layer's tensors as views of the bytes of `run`, uint8 [size or more]."""
        return {
            name: run[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


class Source(Protocol):
    """Where the bytes of the layers come from."""

    @property
    def shelves(self) -> Sequence[Shelf]: ...
    def send(self, index: int, slot: Tensor) -> None:
        """Copy the bytes of layer `index` to the front of `slot`, on the current stream of its device."""
        ...


class Hosted:
    """Every layer in host memory of its own, page-locked where the device is CUDA, filled once."""

    def __init__(self, shelves: Sequence[Shelf], fill: Fill, device: torch.device) -> None:
        self.shelves = shelves
        self._runs = [host_run(shelf.size, device, self) for shelf in shelves]
        for index, (shelf, run) in enumerate(zip(shelves, self._runs, strict=True)):
            fill(index, shelf.views(run))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(shelf.size for shelf in self.shelves)

    def send(self, index: int, slot: Tensor) -> None:
        """See `Source`."""
        run = self._runs[index]
        slot[: len(run)].copy_(run, non_blocking=True)


class Staged:
    """Two page-locked runs of host memory, into which a thread reads one layer while the other is copied."""

    def __init__(self, shelves: Sequence[Shelf], fill: Fill, device: torch.device) -> None:
        self.shelves, self._fill, self._device = shelves, fill, device
        size = max(shelf.size for shelf in shelves)
        self._runs = [host_run(size, device, self) for _ in range(SLOTS)]
        self._sent: list[torch.cuda.Event | None] = [None] * SLOTS
        self._reader = ThreadPoolExecutor(1, "layers")
        self._turn, self._ahead = 0, dict[int, Future[None]]()  # at most one layer is being read, into runs[turn]

    def send(self, index: int, slot: Tensor) -> None:
        """See `Source`. Raises what reading raises; the layer after `index` is read meanwhile."""
        reading = self._ahead.pop(index, None)
        if reading is None:
            self._ahead.clear()  # read for nothing; the one thread works in order, so that run is free afterwards
            reading = self._reader.submit(self._read, index, self._turn)
        reading.result()
        turn, size = self._turn, self.shelves[index].size
        slot[:size].copy_(self._runs[turn][:size], non_blocking=True)
        if self._device.type == "cuda":
            self._sent[turn] = torch.cuda.current_stream(self._device).record_event()
        self._turn, following = (turn + 1) % SLOTS, (index + 1) % len(self.shelves)
        self._ahead[following] = self._reader.submit(self._read, following, self._turn)

    # The mode is a thread's own, and runs made in it may only be written in it.
    @torch.inference_mode()
    def _read(self, index: int, turn: int) -> None:
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()
        self._fill(index, self.shelves[index].views(self._runs[turn]))


class Streamed(nn.ModuleList):
    """`layers`, each a module whose tensors lie in one of the slots on `device`.

    A layer is ready until another one is asked for, and everything that uses it must have been put on the current
    stream by then. They are best asked for in order; any order is right. `fetched` counts the layers brought.
    """

    def __init__(self, layers: Sequence[nn.Module] | nn.ModuleList, source: Source, device: torch.device) -> None:
        super().__init__(layers)
        count = min(SLOTS, len(self))
        size = max(shelf.size for shelf in source.shelves)
        self.fetched = self.fetched_bytes = 0
        self._source, self._device = source, device
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._held: list[int | None] = [None] * count
        self._copies: torch.cuda.Stream | None = None
        self._arrived: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
            self._arrived = [torch.cuda.Event() for _ in range(count)]
            for slot in self._slots:
                slot.record_stream(self._copies)
        for index, (layer, shelf) in enumerate(zip(self._modules.values(), source.shelves, strict=True)):
            assert layer is not None
            _attach(layer, shelf.views(self._slots[index % count]))

    @property
    def pass_bytes(self) -> int:
        """Bytes that are brought when all layers are asked for once, in order."""
        return sum(shelf.size for shelf in self._source.shelves) if len(self) > len(self._slots) else 0

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        """The layer, ready for use."""
        self._fetch(index)
        before = (index - 1) % len(self)
        following = before + len(self._slots)
        # everything that used the layer before is on the stream, so its slot is for the next one that lies there
        self._fetch(following if following < len(self) else before % len(self._slots))
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[index % len(self._slots)])
        layer = self._modules[str(index)]
        assert layer is not None
        return layer

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))

    @torch.inference_mode()
    def _fetch(self, index: int) -> None:
        slot = index % len(self._slots)
        if self._held[slot] == index:
            return
        self._held[slot] = None  # until the copy is on its stream, the slot holds nothing
        with self._on_copies():
            self._source.send(index, self._slots[slot])
            if self._copies is not None:
                self._arrived[slot].record(self._copies)
        self._held[slot] = index
        self.fetched += 1
        self.fetched_bytes += self._source.shelves[index].size

    def _on_copies(self) -> AbstractContextManager[object]:
        if self._copies is None:
            return nullcontext()
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._copies)


def take_turns(
    module: nn.Module, prefix: str, source: Callable[[Sequence[Shelf]], Source], device: torch.device
) -> None:
    """Put a `Streamed` in place of the module's list of layers whose parameters begin with `prefix`."""
    path, _, leaf = prefix.removesuffix(".").rpartition(".")
    owner = module.get_submodule(path)
    layers = getattr(owner, leaf)
    setattr(owner, leaf, Streamed(layers, source([Shelf.of(layer) for layer in layers]), device))


def host_run(size: int, device: torch.device, owner: object) -> Tensor:
    """Host memory, uint8 [size]; where `device` is CUDA in pages of its own, locked for as long as `owner` lives.

    Registered in place, because torch's own page-locked memory comes in powers of two and is never given back. Raises
    RuntimeError when the pages cannot be locked.
    """
    whole = -(-size // PAGESIZE) * PAGESIZE
    base = torch.empty(whole + PAGESIZE, dtype=torch.uint8, device="cpu")
    start = -base.data_ptr() % PAGESIZE
    run = base[start : start + whole]
    if device.type == "cuda":
        with torch.cuda.device(device):  # a fresh thread would open a context on the first device
            error = int(torch.cuda.cudart().cudaHostRegister(run.data_ptr(), run.nbytes, 1))
        if error:
            _forget_error(device)
            raise RuntimeError(
                f"{run.nbytes / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error {error}); give less "
                "with host_memory, or use residency mapped"
            )
        weakref.finalize(owner, _unlock, run, device).atexit = False
    return run[:size]


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the error that a call has returned until the next kernel is launched, which would fail for it."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        pass


def _unlock(run: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(run.data_ptr())


def _attach(layer: nn.Module, views: Mapping[str, Tensor]) -> None:
    """Give the layer's parameters and buffers the memory of `views`."""
    for name, view in views.items():
        path, _, leaf = name.rpartition(".")
        owner = layer.get_submodule(path)
        if leaf in owner._buffers:
            owner._buffers[leaf] = view
        else:
            owner._parameters[leaf] = nn.Parameter(view, requires_grad=False)
