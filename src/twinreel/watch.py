"""What an engine tells while it works, and what it measures of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Event:
    """One piece of progress: `done` of `total` units of `stage` after `seconds`; `eta` is seconds left in it.

    Stages, one after the other: `read`, `load` (before each that needs it), `encode`, `denoise` (a unit is one model
    call), `decode` (a unit is one frame), `mux`: what is left of the writing once the last clip is made, and the reading
    back. All else that a run does takes no time to speak of.
    """

    stage: str
    done: int
    total: int
    seconds: float
    eta: float | None = None
    note: str = ""


Watch = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The watch that looks away."""


class Boundary(Protocol):
    """Receives the values between stages, as they pass: tensors or arrays by name, on whatever device they are.

    `part` of `parts` counts values that come several times: steps for `velocity`, clips (of an unknown number, 0) for
    `frames`. It must not change them, and copies what it keeps.
    """

    def __call__(self, name: str, values: Mapping[str, Any], part: int = 0, parts: int = 1) -> None:
        """Take one boundary."""
        ...


def pass_by(name: str, values: Mapping[str, Any], part: int = 0, parts: int = 1) -> None:
    """The boundary that keeps nothing."""


class Stages:
    """Times and peak memory of a request's stages, the events that tell of them, and `boundary` for their values.

    `gate` is called where all ranks pass between two pieces of work; it raises when they are to stop.
    """

    def __init__(
        self, watch: Watch, device: Any, boundary: Boundary | None = None, gate: Callable[[], None] | None = None
    ) -> None:
        self._watch, self._device = watch, device
        self.boundary: Boundary = boundary or pass_by
        self.followed = boundary is not None
        self.gate: Callable[[], None] = gate or (lambda: None)
        self.records: dict[str, dict[str, float]] = {}
        self._stage, self._start = "", 0.0

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[None]:
        """Measure a stage; nested and repeated stages add up under their names."""
        outer = self._stage, self._start
        self._stage, self._start = name, time.monotonic()
        self._reset_peak()
        self.tell(0, total)
        try:
            yield
        finally:
            peak = self._peak()  # waits for a device that has work queued, which is this stage's
            record = self.records.setdefault(name, {"seconds": 0.0, "peak_bytes": 0})
            record["seconds"] += time.monotonic() - self._start
            record["peak_bytes"] = max(record["peak_bytes"], peak)
            self._stage, self._start = outer

    def tell(self, done: int, total: int, note: str = "") -> None:
        """Report `done` of `total` units of the running stage."""
        seconds = time.monotonic() - self._start
        eta = seconds / done * (total - done) if done else None
        self._watch(Event(self._stage, done, total, seconds, eta, note))

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the process's peak so far, not the stage's
