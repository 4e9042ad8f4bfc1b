"""The durable queue: SQLite in WAL mode with a full sync at every change of state, and a folder a job.

A row is the truth about a job's state; files follow it. A job is created by one commit after its inputs lie synced in
its folder, and it ends by one commit after its results do: whatever dies in between, `recover` knows what to do.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED = "queued", "in_progress", "completed", "failed", "cancelled"
ENDED = (COMPLETED, FAILED, CANCELLED)
OURS, NEW, FOREIGN = "ours", "new", "foreign"
QUEUE = "queue.sqlite"
VERSION = 1
APPLICATION = 0x74777266  # says that a file is a queue of ours: SQLite's application_id
SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    priority INTEGER NOT NULL,
    task TEXT NOT NULL,
    prompt TEXT NOT NULL,
    family TEXT NOT NULL,
    body TEXT NOT NULL,
    facts TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    starts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,
    error TEXT,
    once TEXT,
    print TEXT
);
CREATE INDEX line ON jobs (status, priority DESC, seq);
CREATE INDEX onces ON jobs (once) WHERE once IS NOT NULL;
CREATE INDEX families ON jobs (family);
"""


@dataclass(frozen=True)
class Draft:
    """A job to be created: the SPEC 11 body with `input:N` addresses, and facts that never change (sizes, labels)."""

    id: str
    task: str
    body: dict[str, Any]
    facts: dict[str, Any]
    priority: int = 0


@dataclass(frozen=True)
class Job:
    """A row of the queue. Times are seconds since 1970; `crashes` counts engines that this job took down."""

    seq: int
    id: str
    status: str
    priority: int
    task: str
    prompt: str
    family: str
    body: dict[str, Any]
    facts: dict[str, Any]
    created: float
    started: float | None
    ended: float | None
    starts: int
    crashes: int
    cancelling: bool
    bytes: int
    outcome: dict[str, Any] | None
    error: dict[str, Any] | None
    once: str | None
    print: str | None


class QueueFull(Exception):
    """There is no room for so many further jobs."""


class Conflict(Exception):
    """An idempotency key came again with another body."""


def kind_of(path: Path) -> str:
    """What the database at `path` is: OURS, NEW (nothing is in it) or FOREIGN. Only reads. Raises sqlite3.Error."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        mark = db.execute("PRAGMA application_id").fetchone()[0]
        columns = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
        parts = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    finally:
        db.close()
    if mark == APPLICATION or columns == [item.name for item in fields(Job)]:  # the first queues bore no mark
        return OURS
    return FOREIGN if mark or parts else NEW


def new_id() -> str:
    """A job's public name, which cannot be guessed."""
    return f"video_{secrets.token_hex(12)}"


class Jobs:
    """The queue in `folder`. Its methods are short transactions that any thread may call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        kind = kind_of(folder / QUEUE) if (folder / QUEUE).exists() else NEW
        if kind == FOREIGN:
            raise sqlite3.DatabaseError("it is another program's")
        self._db = sqlite3.connect(folder / QUEUE, check_same_thread=False, isolation_level=None, timeout=10)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        # FULL: a commit is on the disk when it returns, power cut or not
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if kind == NEW:
            marks = f"PRAGMA application_id={APPLICATION};PRAGMA user_version={VERSION};"
            self._db.executescript(f"BEGIN;{SCHEMA}{marks}COMMIT;")
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}; this program writes {VERSION}")

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def path(self, job: str) -> Path:
        """The folder of a job."""
        return self.folder / "jobs" / job

    def create(self, drafts: Sequence[Draft], limit: int, once: str | None = None, print: str = "") -> list[Job]:
        """Queue all of `drafts`, or none. With a known idempotency key `once`, the jobs that it made before.

        Raises QueueFull, Conflict, sqlite3.Error.
        """
        family = drafts[0].id
        with self._lock, _Transaction(self._db):
            if once is not None and (made := self.made_by(once, print)):
                return made
            if self.waiting() + len(drafts) > limit:
                raise QueueFull
            now = time.time()
            for draft in drafts:
                self._db.execute(
                    "INSERT INTO jobs (id, status, priority, task, prompt, family, body, facts, created, once, print)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (draft.id, QUEUED, draft.priority, draft.task, draft.body["prompt"], family, json.dumps(draft.body),
                     json.dumps(draft.facts), now, once, print),
                )  # fmt: skip
        return self.family(family)

    def made_by(self, once: str, print: str) -> list[Job]:
        """The jobs an idempotency key made, in order; Conflict when their request was another one."""
        jobs = self._select("WHERE once = ? ORDER BY seq", once)
        if jobs and jobs[0].print != print:
            raise Conflict
        return jobs

    def family(self, family: str) -> list[Job]:
        """The variants of one request, in order."""
        return self._select("WHERE family = ? ORDER BY seq", family)

    def get(self, job: str) -> Job | None:
        """One job, or None."""
        found = self._select("WHERE id = ?", job)
        return found[0] if found else None

    def take(self) -> Job | None:
        """Begin the job that is next, or None."""
        with self._lock:
            row = self._db.execute(
                "UPDATE jobs SET status = ?, started = ?, starts = starts + 1 WHERE seq = (SELECT seq FROM jobs"
                " WHERE status = ? ORDER BY priority DESC, seq LIMIT 1) RETURNING id",
                (RUNNING, time.time(), QUEUED),
            ).fetchall()
        return self.get(row[0]["id"]) if row else None

    def put_back(self, job: str, crashed: bool = False, counted: bool = True) -> None:
        """A running job waits again, at its old place; a start that is not `counted` leaves `starts` as it was before."""
        changes = "status = ?, started = NULL, crashes = crashes + ?, starts = starts - ?"
        self._change(job, RUNNING, changes, QUEUED, int(crashed), int(not counted))

    def end(self, job: str, status: str, outcome: Any = None, error: Any = None, size: int = 0) -> bool:
        """End a running job, once: False when it had ended before."""
        values = status, time.time(), _dumped(outcome), _dumped(error), size
        return self._change(job, RUNNING, "status = ?, ended = ?, outcome = ?, error = ?, bytes = ?", *values)

    def cancel(self, job: str) -> str | None:
        """`cancelled` when it waited and is ended now, `in_progress` when it runs and was marked, None otherwise."""
        with self._lock:  # a job that goes back to the queue must not slip through between the two
            if self._change(job, QUEUED, "status = ?, ended = ?, cancelling = 1", CANCELLED, time.time()):
                return CANCELLED
            return RUNNING if self._change(job, RUNNING, "cancelling = 1") else None

    def grow(self, job: str, size: int) -> None:
        """A job that has ended takes `size` bytes more."""
        with self._lock:
            self._db.execute("UPDATE jobs SET bytes = bytes + ? WHERE id = ?", (size, job))

    def remove(self, job: str) -> bool:
        """Forget a job that has ended, and remove its folder. False when it has not, or is unknown.

        On a full disk the files go first: without the room they give, the row cannot be removed.
        """
        found = self.get(job)
        if found is None or found.status not in ENDED:
            return False
        try:
            self._forget(job)
        except sqlite3.OperationalError:
            shutil.rmtree(self.path(job), ignore_errors=True)
            self._forget(job)
        shutil.rmtree(self.path(job), ignore_errors=True)
        return True

    def _forget(self, job: str) -> None:
        with self._lock:
            self._db.execute("DELETE FROM jobs WHERE id = ?", (job,))  # an ended job never goes back

    def running(self) -> list[Job]:
        """Jobs a dead server left running."""
        return self._select("WHERE status = ? ORDER BY seq", RUNNING)

    def ended(self) -> list[Job]:
        """Jobs that have ended, oldest end first."""
        return self._select(f"WHERE status IN ({','.join('?' * len(ENDED))}) ORDER BY ended, seq", *ENDED)

    def waiting(self) -> int:
        """How many jobs are queued."""
        return self._number("SELECT count(*) FROM jobs WHERE status = ?", QUEUED)

    def position(self, job: Job) -> int:
        """How many queued jobs run before this one."""
        ahead = "SELECT count(*) FROM jobs WHERE status = ? AND (priority > ? OR priority = ? AND seq < ?)"
        return self._number(ahead, QUEUED, job.priority, job.priority, job.seq)

    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        with self._lock:
            rows = self._db.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall()
        return dict.fromkeys((QUEUED, RUNNING, *ENDED), 0) | {row[0]: row[1] for row in rows}

    def ids(self) -> set[str]:
        """Every job there is."""
        with self._lock:
            return {row[0] for row in self._db.execute("SELECT id FROM jobs")}

    def page(self, limit: int, after: str | None, down: bool, filters: dict[str, Any]) -> list[Job]:
        """At most `limit` jobs by age, behind the job `after`; `filters`: status, task, words of the prompt `q`."""
        clauses, values = [], []
        for column in ("status", "task"):
            if filters.get(column):
                clauses.append(f"{column} = ?")
                values.append(filters[column])
        for word in str(filters.get("q") or "").split():
            clauses.append("instr(lower(prompt), lower(?)) > 0")
            values.append(word)
        if after is not None:
            clauses.append(f"seq {'<' if down else '>'} (SELECT seq FROM jobs WHERE id = ?)")
            values.append(after)
        where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
        return self._select(f"{where} ORDER BY seq {'DESC' if down else ''} LIMIT ?", *values, limit)

    def _change(self, job: str, status: str, assignments: str, *values: Any) -> bool:
        with self._lock:
            text = f"UPDATE jobs SET {assignments} WHERE id = ? AND status = ?"
            return self._db.execute(text, (*values, job, status)).rowcount == 1

    def _select(self, rest: str, *values: Any) -> list[Job]:
        with self._lock:
            rows = self._db.execute(f"SELECT * FROM jobs {rest}", values).fetchall()
        return [_job(row) for row in rows]

    def _number(self, text: str, *values: Any) -> int:
        with self._lock:
            return int(self._db.execute(text, values).fetchone()[0])


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.db.execute("COMMIT")
        elif self.db.in_transaction:  # a full disk has rolled back by itself
            self.db.execute("ROLLBACK")


def _job(row: sqlite3.Row) -> Job:
    values = dict(row) | {"cancelling": bool(row["cancelling"])}
    for name in ("body", "facts", "outcome", "error"):
        values[name] = None if row[name] is None else json.loads(row[name])
    return Job(**values)


def _dumped(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
