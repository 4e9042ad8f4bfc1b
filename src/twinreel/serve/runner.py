"""The seam between the queue and what makes videos: a job is handed in, events come out.

Everything above it (queue, HTTP) knows no engine, and a runner knows no queue: another one may hand the job to an
engine on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .child import Child, ChildLost

START_SECONDS = 3600.0  # loading and warming a large model from a slow disk
STOP_SECONDS = 10.0
POLL = 0.5


@dataclass(frozen=True)
class Work:
    """A job for a runner: the SPEC 11 body with paths it can read, and the folder that results go into.

    A runner that finds saved latents in `folder` resumes from them. `options`: `keep_latents`, and the
    target's `sizes` (latent frames, width, height in pixels).
    """

    id: str
    body: dict[str, Any]
    folder: str
    options: dict[str, Any]


class EngineLost(Exception):
    """The engine ended, or was ended, in the middle; the message says how."""


class Runner(Protocol):
    """Runs one job at a time.

    Events are dicts with a key `event`: `progress` (`stage`, `done`, `total`, `eta`, `note`), `preview` (`file`), and
    as the last one `done` (`outcome`: `files` by variant, their `sizes`, `sha256`, figures), `failed` (`kind`, `field`,
    `message`, `last` when the engine is not `alive` after it) or `cancelled`. Files are named relative to the job's folder.
    """

    @property
    def alive(self) -> bool:
        """Whether the engine is up."""
        ...

    def start(self) -> dict[str, Any]:
        """Bring the engine up, warm; returns what it says of itself. Raises EngineLost."""
        ...

    def run(self, work: Work) -> Generator[dict[str, Any]]:
        """The events of a job; closed before the last one, it ends the engine. Raises EngineLost. After either `start` is
        called again."""
        ...

    def cancel(self, job: str) -> None:
        """Ask the running job to end at its next step; a job that is not running is no concern."""
        ...

    def stop(self) -> None:
        """End the engine."""
        ...


class EngineRunner:
    """The engine in a process (and group) of its own on this machine; `command` starts it (`worker.main`)."""

    def __init__(self, command: Sequence[str], *, stall_seconds: float = 3600.0, cancel_seconds: float = 120.0) -> None:
        self._command = list(command)
        self._stall, self._patience = stall_seconds, cancel_seconds
        self._child: Child | None = None
        self._stopping = False
        self._job, self._cancelled_at, self._turn = "", 0.0, 0

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        return self._child.pid if self._child else None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        child = self._child
        return child is not None and child.alive

    def start(self) -> dict[str, Any]:
        """Start the process and wait until it is warm."""
        self._end()
        try:
            self._child = child = Child(self._command)
            for event in self._events(child, START_SECONDS):
                if event["event"] == "ready":
                    return dict(event["engine"])
                if event["event"] == "failed":
                    raise EngineLost(event["message"])
            raise EngineLost("the engine was stopped while it started")
        except EngineLost:
            self._end()
            raise

    def run(self, work: Work) -> Generator[dict[str, Any]]:
        """Hand the job over and pass its events on."""
        child = self._child
        if child is None or not self.alive:
            raise EngineLost("the engine is not running")
        self._cancelled_at, self._job, self._turn = 0.0, work.id, self._turn + 1
        free = False  # whether the engine is done with it and takes another
        try:
            child.send({"do": "run", "turn": self._turn, **asdict(work)})
            for event in self._events(child, self._stall):
                if event.get("turn") != self._turn:  # of an earlier job
                    continue
                over = event["event"] in ("done", "failed", "cancelled")
                free = over and not event.get("last")
                yield event
                if over:
                    return
            raise EngineLost("the engine was stopped")
        except ChildLost as error:
            raise EngineLost(f"the engine ended: {error}") from None
        finally:  # be it that nobody listens any more: the next job must not wait for this one
            if not free:
                self._end()
            self._job, self._cancelled_at = "", 0.0

    def cancel(self, job: str) -> None:
        """Tell the engine; one that does not end the job in time is ended itself."""
        child = self._child
        if child is None or self._job != job:
            return
        self._cancelled_at = self._cancelled_at or time.monotonic()
        try:
            # by turn, not by job: a late one must not meet the same job's next run
            child.send({"do": "cancel", "turn": self._turn})
        except ChildLost:
            pass  # `run` meets the same and tells

    def stop(self) -> None:
        """Close its line; it ends at once, or is killed."""
        self._stopping = True
        self._end()

    def _events(self, child: Child, silence: float) -> Iterator[dict[str, Any]]:
        heard = time.monotonic()
        while not self._stopping:
            try:
                event = child.receive(POLL)
            except ChildLost as error:
                raise EngineLost(f"the engine ended: {error}") from None
            now = time.monotonic()
            if event is not None:
                heard = now
                yield event
            elif now - heard > silence:
                raise EngineLost(f"the engine said nothing for {silence:g} s and was ended")
            if self._cancelled_at and now - self._cancelled_at > self._patience:
                raise EngineLost(f"the engine did not end a cancelled job in {self._patience:g} s and was ended")

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop(STOP_SECONDS if child.alive and not self._job else 0.0)


def outcome_file(folder: Path) -> Path:
    """Where a runner leaves a finished job's outcome, as the last file it writes."""
    return folder / "outcome.json"
