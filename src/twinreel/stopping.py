"""Ctrl-C and SIGTERM: a run ends at its next step or clip, in order; a second signal ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from .errors import Cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Inside the block the first signal calls `cancel` and is remembered; `Cancelled` leaves with its number.

    Signals that a process was told to ignore stay ignored, and only the main thread can listen.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._before: dict[signal.Signals, Any] = {}
        self.number: int | None = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()
        if isinstance(error, Cancelled):
            error.signal = self.number

    def heard(self) -> None:
        """Cancel again if a signal came before the run could hear it; for the watch of a run."""
        if self.number is not None:
            self._cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        print("twinreel: stopping at the next step; once more ends it at once", file=sys.stderr, flush=True)
        self._cancel()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
