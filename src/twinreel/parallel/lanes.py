"""Two streams of a GPU by turns: where one kernel leaves multiprocessors idle as it ends, the next one begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lanes:
    """Pieces of work that do not need each other, on the current stream and on another one by turns; on a CPU in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._after: Any = None
        self._other: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What was queued before the block comes before all its pieces, what is queued after it after all."""
        self._after = None
        if self._other is None:
            yield
            return
        main = torch.cuda.current_stream(self._device)
        self._other.wait_stream(main)
        yield
        main.wait_stream(self._other)

    @contextmanager
    def piece(self, number: int) -> Iterator[Any]:
        """Queue piece `number`. Gives an event after the piece before it, None for the first one: time that this one
        waits is lost only from there on."""
        if self._other is None:
            yield None
            return
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._other if number % 2 else main):
            yield self._after
            after = torch.cuda.Event(enable_timing=True)
            after.record()
        self._after = after
