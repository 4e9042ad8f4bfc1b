"""Ctrl-C and SIGTERM: a run ends at its next step or clip, in order; a second signal ends it at once.

Outside a run the first signal ends the command where it stands, in the same words and with the same exit codes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from .errors import Cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK = 0.02  # seconds between two looks at whether an import has ended
PATIENCE = 2.0  # seconds that a signal waits for that


class Stopped(KeyboardInterrupt):
    """A signal ended the command where it stood; `signal` is its number. Like Ctrl-C, `except Exception` misses it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextmanager
def stoppable(last: bool = False, leave: Callable[[Stopped], int] | None = None) -> Iterator[None]:
    """Inside the block a signal raises `Stopped`; the same one again, while things are put away, kills the process.

    It waits for the end of an import: torch and NumPy swallow an exception that comes from nowhere in the middle of
    theirs, abort on it, or are broken from then on. One that goes on for PATIENCE seconds is not waited for: `leave`
    says so, and the process ends at once with the exit code that it returns; without `leave` it is raised there.

    `last`: the process ends after the block, and what signals it then has nothing left to stop.
    """
    before: dict[signal.Signals, Any] = {}
    outside, ended = _imports(sys._getframe()), False
    streams = sys.stdout, sys.stderr

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        act(Stopped(number), time.monotonic() + PATIENCE, frame)

    def act(stopped: Stopped, end: float, frame: FrameType | None) -> None:
        if ended:
            return
        if _imports(frame) > outside:
            if time.monotonic() < end:
                before.setdefault(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
                signal.signal(signal.SIGALRM, lambda _, later: act(stopped, end, later))
                signal.setitimer(signal.ITIMER_REAL, LOOK)
                return
            if leave is not None:
                sys.stdout, sys.stderr = streams  # whoever has redirected them will not come back
                code = leave(stopped)
                sys.stdout.flush()
                os._exit(code)
        raise stopped

    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, stop)
        yield
    finally:
        ended = True
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)


def _imports(frame: FrameType | None) -> int:
    """How many frames of an import are on the stack; one that C code asks for has them as well."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return count


@contextmanager
def held_back() -> Iterator[None]:
    """Inside the block signals wait for its end, where no other thread can take them, and in processes that are started
    there for `let_through`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """In a process that was started under `held_back`: signals come again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


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
        elif error is None and self.number is not None:
            print("twinreel: it had no step left to stop at, and is finished", file=sys.stderr, flush=True)

    def heard(self) -> None:
        """Cancel again if a signal came before the run could hear it; for the watch of a run."""
        if self.number is not None:
            self._cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        self._cancel()  # before the words, which may find stderr blocked
        print("twinreel: stopping at the next step; once more ends it at once", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
