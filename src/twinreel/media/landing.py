"""Decoded clips leave the device while it decodes the next one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import numpy as np
import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Arrays = tuple[np.ndarray, ...]
Send = Callable[[Tensors], Callable[[], Arrays] | None]


def land(made: Iterable[Tensors], send: Send | None = None) -> Generator[Arrays, None, None]:
    """The items of `made` in host memory, in order, bit for bit.

    On the CPU they are handed over at once and as they are. From a CUDA device each comes after the next one has been
    taken from `made`, whose work is thus queued before the host waits. All arrays are the taker's own.

    Args:
        made: tuples of contiguous tensors on one device, ready on its current stream; in a decode pixels uint8
            `[f, H, W, 3]` and a count int64 `[]`. An item that makes the host wait for the device undoes the gain.
        send: starts an item's copy and gives what waits for it, None where it is in host memory; of a `Side` unless given.

    Raises what `made` and copies raise; of `made` a RuntimeError or MemoryError after all items before it.
    """
    source, send = iter(made), send or Side().send
    arrive: Callable[[], Arrays] | None = None
    while True:
        try:
            tensors = next(source, None)
            following = None if tensors is None else send(tensors)
        except (RuntimeError, MemoryError):
            if arrive is not None:  # whole before the error, and whoever decodes on from it counts what came
                yield arrive()
            raise
        if arrive is not None:
            yield arrive()
        if tensors is None:
            return
        arrive = following
        if arrive is None:
            yield tuple(tensor.numpy() for tensor in tensors)


class Side:
    """A stream of a CUDA device for copies to the host, beside the current one."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def send(self, tensors: Tensors) -> Callable[[], Arrays] | None:
        """Start the copy of `tensors` into page-locked memory; what waits for it and gives arrays of their own.

        At most two items' such memory is in use at a time, and torch's allocator keeps it for the next. None on a CPU.
        """
        device = tensors[0].device
        if device.type != "cuda":
            return None
        side = self._stream = self._stream or torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # the encoder needs the core on which others would spin
            arrived.record(side)
        leaving = list(tensors)  # until the copy has run, nothing else may get their memory

        def arrive() -> Arrays:
            arrived.synchronize()
            leaving.clear()
            arrays = tuple(host.numpy().copy() for host in hosts)
            hosts.clear()
            return arrays

        return arrive
