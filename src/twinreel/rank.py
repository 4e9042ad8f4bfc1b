"""The process of one rank: orders come over a line from `ranks.Ranks`, an engine carries them out with the others."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from .errors import is_fatal
from .launch import seat
from .line import get, put
from .parallel.team import is_agreed, portable
from .ranks import PULSE
from .stopping import let_through
from .watch import Event

if TYPE_CHECKING:
    from .engine import Engine


class Line:
    """Our end: orders in, outcomes out. It reads in the background, so that a cancel is heard in the middle of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._speaking = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self.working = False  # on an order, or on an engine
        self.recorded = threading.Semaphore(0)  # values that the other end is done with

    def settings(self) -> Any:
        """What comes first; without an other end this process ends."""
        try:
            return get(self._connection)
        except (EOFError, OSError):
            os._exit(0)

    def listen(self) -> None:
        """Read until the other end is gone, then end this process, wherever its work stands."""
        while True:
            try:
                kind, *values = get(self._connection)
            except (EOFError, OSError):
                os._exit(0)
            if kind == "cancel":
                self._cancelled.add(values[0])
            elif kind == "recorded":
                self.recorded.release()
            else:
                self._orders.put((kind, *values))

    def pulse(self) -> None:
        """While there is work say again and again that this process runs, whatever the work waits for."""
        while True:
            time.sleep(PULSE)
            with self._speaking:
                if self.working:
                    put(self._connection, ("alive",))

    def next(self) -> tuple[int, str, tuple[Any, ...], bool]:
        """The next order's number, its working folder, what it is, and whether the values between stages are wanted."""
        _, number, folder, order, followed = self._orders.get()
        self.working, self.recorded = True, threading.Semaphore(0)
        return number, folder, order, followed

    def cancelled(self, number: int) -> bool:
        """Whether the order is to end."""
        return number in self._cancelled

    def say(self, kind: str, *values: Any) -> None:
        """Tell the other end; how a work has ended is the last that it hears of it."""
        with self._speaking:
            self.working &= kind not in ("ready", "done", "failed")
            put(self._connection, (kind, *values))


def main() -> int:
    """Serve orders; the arguments are the line's file descriptor and, for rank 0, that of the meeting place."""
    descriptors = [int(word) for word in sys.argv[1:]]
    for word in (signal.SIGINT, signal.SIGTERM):
        signal.signal(word, signal.SIG_IGN)  # the process that started us decides what they mean
    let_through()
    line = Line(Connection(descriptors[0]))
    config, cache = line.settings()
    for background in (line.listen, line.pulse):
        threading.Thread(target=background, daemon=True).start()
    try:
        from .engine import Engine

        line.working = True  # not in an import, which may hold Python up
        place = seat(descriptors[1] if len(descriptors) > 1 else None, started_here=True)
        engine = Engine(config, cache, place)
        engine.kept = lambda told: line.say("kept", told)
        line.say("ready", engine.describe())
    except Exception as error:  # the edge of the process: whoever started it is told why there is no engine
        line.say("failed", portable(error), True)
        return 1
    while True:
        number, folder, order, followed = line.next()
        try:
            os.chdir(folder)
            result = perform(engine, line, number, order, followed)
        except Exception as error:  # the edge of the run: it ends with its cause
            line.say("failed", portable(error), is_agreed(error) and not is_fatal(error))
        else:
            line.say("done", result if engine.team.leads else None)


def perform(engine: Engine, line: Line, number: int, order: tuple[Any, ...], followed: bool) -> Any:
    """Call the engine's method that `order` names; rank 0 tells of it."""
    leads = engine.team.leads

    def watch(event: Event) -> None:
        if line.cancelled(number):
            engine.cancel()
        if leads:
            line.say("event", event)

    def boundary(name: str, values: Mapping[str, Any], part: int = 0, parts: int = 1) -> None:
        if leads:
            line.say("boundary", name, {key: _on_host(value) for key, value in values.items()}, part, parts)
            line.recorded.acquire()

    method, *arguments = order
    follow = {"boundary": boundary} if followed else {}
    return getattr(engine, method)(*arguments, watch=watch, **follow)


def _on_host(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


if __name__ == "__main__":
    sys.exit(main())
