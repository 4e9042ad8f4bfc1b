"""What collectives cost a rank: how often, how many bytes of its own, and for how long its work stood still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Cost:
    """One kind of collective. seconds: those in which nothing else of this rank ran (exposed)."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, calls: int, size: int, seconds: float) -> None:
        """Add to it."""
        self.calls, self.bytes, self.seconds = self.calls + calls, self.bytes + size, self.seconds + seconds


class Meter:
    """Always on: two clock readings a collective, on a GPU two events that are read when a `lap` is taken."""

    def __init__(self) -> None:
        self._costs: dict[str, Cost] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def waiting(self, kind: str, size: int, device: Any) -> Iterator[None]:
        """Measure a collective, or the wait for one, that moves `size` bytes of this rank."""
        self._costs.setdefault(kind, Cost()).plus(1, size, 0.0)
        if device.type == "cuda":
            import torch

            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((kind, start, end))
        else:
            begin = time.monotonic()
            yield
            self._costs[kind].seconds += time.monotonic() - begin

    def lap(self) -> dict[str, dict[str, float]]:
        """Costs by kind since the last lap. On a GPU it waits for the last collective to be over."""
        for kind, start, end in self._events:
            end.synchronize()
            self._costs[kind].seconds += start.elapsed_time(end) / 1e3
        costs, self._costs, self._events = self._costs, {}, []
        return {
            kind: {"calls": cost.calls, "bytes": cost.bytes, "exposed_seconds": cost.seconds}
            for kind, cost in sorted(costs.items())
        }
