"""Progress in memory: the newest state of each running job, and the readers that wait for the next one.

Nothing is queued for a reader: it is woken and takes what is newest, so a slow one costs nothing and misses only what
has been overtaken.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class State:
    """Where a running job is; `preview` counts the previews made."""

    stage: str = "start"
    done: int = 0
    total: int = 0
    eta: float | None = None
    note: str = ""
    preview: int = 0


class Hub:
    """States by job, and their readers. Any thread may publish; readers wait on their event loops."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's `close` may come inside a block of the event loop's own thread
        self._states: dict[str, State] = {}
        self._readers: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self.closed = False

    def state(self, job: str) -> State | None:
        """The newest state of a running job."""
        return self._states.get(job)

    def publish(self, job: str, state: State) -> None:
        """Set a running job's state and wake its readers."""
        with self._lock:
            self._states[job] = state
        self.touch(job)

    def advance(self, job: str, **changes: object) -> None:
        """Change parts of a running job's state."""
        self.publish(job, replace(self._states.get(job) or State(), **changes))  # type: ignore[arg-type]

    def forget(self, job: str) -> None:
        """A job runs no more; its readers look again."""
        with self._lock:
            self._states.pop(job, None)
        self.touch(job)

    def touch(self, job: str | None = None) -> None:
        """Wake the readers of `job`, or all."""
        with self._lock:
            chosen = self._readers.values() if job is None else [self._readers.get(job, set())]
            readers = [reader for group in chosen for reader in group]
        for loop, event in readers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Let every reader end."""
        self.closed = True
        self.touch()

    def readers(self) -> int:
        """How many wait."""
        with self._lock:
            return sum(map(len, self._readers.values()))

    def attend(self, job: str) -> Reader:
        """A reader of a job, as a `with` block on the running event loop."""
        return Reader(self, job)

    def _add(self, job: str, reader: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._readers.setdefault(job, set()).add(reader)

    def _drop(self, job: str, reader: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            group = self._readers.get(job, set())
            group.discard(reader)
            if not group:
                self._readers.pop(job, None)


class Reader:
    """Waits for news of one job."""

    def __init__(self, hub: Hub, job: str) -> None:
        self._hub, self._job = hub, job
        self._event = asyncio.Event()
        self._place = asyncio.get_running_loop(), self._event

    def __enter__(self) -> Reader:
        self._hub._add(self._job, self._place)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._hub._drop(self._job, self._place)

    async def news(self, timeout: float) -> bool:
        """Wait for news; False when there were none in `timeout` seconds."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout)
        except TimeoutError:
            return False
        self._event.clear()
        return True
