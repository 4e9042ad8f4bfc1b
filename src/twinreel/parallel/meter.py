"""What collectives cost a rank: how often, how many bytes of its own, how long its work stood still, and how much of
them went on beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

AHEAD = 2  # collectives that may be queued on a GPU behind the one that it works on
VOTE = ".vote"  # a rank that waits there waits for the others; little is moved


@dataclass
class Cost:
    """One kind of collective. exposed: seconds in which nothing else of this rank ran. carried: seconds that it was on
    its way, where that is measured apart because something else may run meanwhile."""

    calls: int = 0
    bytes: int = 0
    exposed: float = 0.0
    carried: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds on its way while something else ran."""
        return max(0.0, self.carried - self.exposed)


class Meter:
    """Always on: two clock readings a collective, on a GPU two events, or four, that are read when a `lap` is taken."""

    def __init__(self) -> None:
        self._costs: dict[str, Cost] = {}
        self._waits: list[tuple[Cost, Any, Any]] = []
        self._carried: list[tuple[Cost, Any, Any]] = []
        self._start = time.monotonic()

    @contextmanager
    def waiting(self, kind: str, size: int, device: Any, since: Any = None) -> Iterator[None]:
        """Measure a collective, or the wait for one, that moves `size` bytes of this rank; on a GPU from the event `since`
        on, where something else ran until then."""
        cost = self._costs.setdefault(kind, Cost())
        cost.calls, cost.bytes = cost.calls + 1, cost.bytes + size
        if device.type == "cuda":
            import torch

            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._waits.append((cost, since or start, end))
        else:
            begin = time.monotonic()
            yield
            cost.exposed += time.monotonic() - begin

    def keep_pace(self) -> None:
        """Before a collective is queued: wait until the GPU has done all but the last few. The time that a collective may
        take counts from when it is queued, and a GPU may have a whole step to do before it."""
        if len(self._waits) >= AHEAD:
            self._waits[-AHEAD][2].synchronize()

    def carried(self, kind: str, start: Any, end: Any) -> None:
        """Two events of another stream: a collective was on its way between them."""
        self._carried.append((self._costs.setdefault(kind, Cost()), start, end))

    def lap(self) -> dict[str, Any]:
        """What happened since the last lap; nothing where there was no collective. On a GPU it waits for the last one.

        seconds: of the clock; compute, exposed, hidden and waiting (for the others, in votes) ones of them; bytes of
        this rank; and the collectives by kind.
        """
        for cost, start, end in self._waits:
            end.synchronize()
            cost.exposed += max(0.0, start.elapsed_time(end)) / 1e3
        for cost, start, end in self._carried:
            end.synchronize()
            cost.carried += start.elapsed_time(end) / 1e3
        now, costs = time.monotonic(), self._costs
        seconds, self._start = now - self._start, now
        self._costs, self._waits, self._carried = {}, [], []
        if not costs:
            return {}
        votes = {kind: cost for kind, cost in costs.items() if kind.endswith(VOTE)}
        exposed = sum(cost.exposed for kind, cost in costs.items() if kind not in votes)
        waiting = sum(cost.exposed for cost in votes.values())
        return {
            "seconds": seconds,
            "compute_seconds": max(0.0, seconds - exposed - waiting),
            "exposed_seconds": exposed,
            "hidden_seconds": sum(cost.hidden for cost in costs.values()),
            "waiting_seconds": waiting,
            "bytes": sum(cost.bytes for cost in costs.values()),
            "collectives": {
                kind: {
                    "calls": cost.calls, "bytes": cost.bytes,
                    "exposed_seconds": cost.exposed, "hidden_seconds": cost.hidden,
                }
                for kind, cost in sorted(costs.items())
            },
        }  # fmt: skip
