"""The process of a rank without an engine: it says what it is told to, and waits for a file before it is ready."""

from __future__ import annotations

import queue  # a name that a file of the working folder may have
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from twinreel.errors import Cancelled
from twinreel.line import get, put

WHILE = 0.1


def main() -> int:
    line = Connection(int(sys.argv[1]))
    gate = Path(get(line))
    cancelled: set[int] = set()
    orders: list[tuple[int, str]] = []

    def listen() -> None:
        while True:
            kind, *more = get(line)
            if kind == "cancel":
                cancelled.add(more[0])
            elif kind == "run":
                orders.append((more[0], more[2][0]))

    while not gate.exists():
        put(line, ("alive",))
        time.sleep(WHILE)
    put(line, ("ready", {"path": sys.path, "queue": queue.__file__}))
    Thread(target=listen, daemon=True).start()
    while True:
        if not orders:
            time.sleep(0.01)
            continue
        number, word = orders.pop(0)
        put(line, ("event", word))
        while word in ("wait", "deaf") and (word == "deaf" or number not in cancelled):
            put(line, ("alive",))
            time.sleep(WHILE)
        if word == "wait":
            put(line, ("failed", Cancelled("as it was asked to"), True))
        else:
            put(line, ("done", word))


if __name__ == "__main__":
    sys.exit(main())
