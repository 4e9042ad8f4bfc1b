"""Two streams of a GPU: where a kernel on one leaves multiprocessors idle as it ends, the next one begins on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lanes:
    """Pieces of work that do not need each other, on the current stream and `aside` on another one; on a CPU in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Any = None
        self._other: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What was queued before the block comes before all its pieces, what is queued after it after all."""
        self._last = None
        if self._other is None:
            yield
            return
        main = torch.cuda.current_stream(self._device)
        self._other.wait_stream(main)
        yield
        main.wait_stream(self._other)

    @contextmanager
    def piece(self, aside: bool, ready: Any) -> Iterator[Any]:
        """Queue the next piece, after the event `ready` if there is one. Gives an event after the piece before it, None for
        the first one: what this one waits costs time from there on."""
        if self._other is None:
            yield None
            return
        stream = self._other if aside else torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            yield self._last
            self._last = torch.cuda.Event(enable_timing=True)
            self._last.record()

    def mark(self) -> Any:
        """An event after what the current stream has been given; None on a CPU."""
        if self._other is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
