"""The one thread between queue and runner: takes the next job, passes its events on, records how it ended."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from ..limits import counted
from .folder import leftovers
from .hub import Hub, State
from .jobs import CANCELLED, COMPLETED, FAILED, Job, Jobs
from .metrics import Metrics
from .options import GIB, ServeOptions
from .runner import EngineLost, Runner, Work, outcome_file

log = logging.getLogger("twinreel.serve")
RANK_LOST = "RankLost"  # `ranks.RankLost`, by name: nothing of the engine is loaded here
IDLE = 1.0  # seconds between looks at an empty queue, which is woken anyway
SWEEP = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # before an engine that did not start is started again


class Dispatcher:
    """Feeds one runner from the queue. `engine` is its state in a word, `cause` why it does not run."""

    def __init__(self, jobs: Jobs, hub: Hub, runner: Runner, metrics: Metrics, options: ServeOptions) -> None:
        self.jobs, self.hub, self.runner, self.metrics, self.options = jobs, hub, runner, metrics, options
        self.engine = "starting"
        self.cause: str | None = None
        self.described: dict[str, Any] | None = None
        self.current: str | None = None
        self.seconds_a_job, self.seconds_a_call = 10.0, 0.0
        self._wake, self._stop, self._drained = threading.Event(), threading.Event(), threading.Event()
        self._checkpoint = False
        self._unsettled = True  # a dead server's jobs, or one whose end was not written, still stand as running
        self._swept = 0.0
        self._thread = threading.Thread(target=self._loop, name="dispatch", daemon=True)

    def start(self) -> None:
        """Remove what a dead server left, then begin."""
        sweep(self.jobs)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()
        self.hub.touch()

    def cancel(self, job: str) -> str | None:
        """End a job; see `Jobs.cancel`."""
        state = self.jobs.cancel(job)
        if state == CANCELLED:
            self.jobs.grow(job, folder_bytes(self.jobs.path(job)))
        if state is not None:
            self.runner.cancel(job)
            self.hub.touch()
        return state

    def stop(self) -> None:
        """Give the running job `drain_seconds`, then put it back; end the engine."""
        self._stop.set()
        self._wake.set()
        if self.current is not None and not self._drained.wait(self.options.drain_seconds):
            self._checkpoint = True
            current = self.current
            if current is not None:
                self.runner.cancel(current)
                self._drained.wait(min(30.0, self.options.drain_seconds + 5.0))
        self.runner.stop()
        self._thread.join(10)
        self.engine = "stopped"

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._go_on():
                    self._wake.wait(IDLE)
                    self._wake.clear()
        except Exception as error:  # the edge of the thread: `/ready` says that no job runs any more, and why
            log.exception("the queue stands still")
            self.engine, self.cause = "failed", f"start the server again: {type(error).__name__}: {error}"
        finally:
            self._drained.set()

    def _go_on(self) -> bool:
        """Do what comes next; False when there is nothing, or no way to do it now."""
        try:
            if self._unsettled:
                recover(self.jobs, self.options.max_starts)
                self._unsettled, self.cause = False, None
            if self.engine == "ready" and not self.runner.alive:
                self.engine, self.cause = "failed", "the engine has ended"
                log.error(self.cause)
                self.metrics.restarts.inc()
            if self.engine != "ready" and not self._start_engine():
                return False
            self._tidy()
            job = self.jobs.take()
            if job is not None:
                self._run(job)
            return job is not None
        except (sqlite3.Error, OSError) as error:
            # a full or read-only disk: a job keeps its last recorded state, and is settled once writing works
            self._unsettled, self.cause = True, f"the queue's folder cannot be written: {error}"
            log.error(self.cause)
            return False

    def _start_engine(self) -> bool:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            try:
                self.described = self.runner.start()
                ranks = self.described.get("topology", {}).get("ranks", 1)
                self.metrics.ranks.set(ranks)
                self.engine, self.cause = "ready", None
                model, device = (self.described.get(name, "untold") for name in ("model", "device"))
                log.info("engine ready: %s on %s, %s", model, device, counted(ranks, "rank"))
                return True
            except (EngineLost, OSError) as error:  # such as no process or file to be had
                if self._stop.is_set():  # it is ours to end then
                    return False
                self.engine, self.cause = "failed", str(error)
                log.error("engine did not start: %s", error)
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _run(self, job: Job) -> None:
        folder = self.jobs.path(job.id)
        self.current = job.id
        self.hub.publish(job.id, State())
        log.info("job %s begins (%s)", job.id, job.task)
        begun = False
        try:
            with closing(self.runner.run(work_of(job, folder, self.options))) as events:
                for event in events:
                    if not begun and self._is_cancelled(job):
                        self.runner.cancel(job.id)  # asked for after the job was taken and before it ran
                    begun = True
                    self._note(job, folder, event)
        except EngineLost as error:
            self.engine, self.cause = "restarting", str(error)
            self.metrics.restarts.inc()
            self._again(job, type(error).__name__, str(error), blamed=begun)
        finally:
            self.current = None
            self.hub.forget(job.id)
            self.hub.touch()

    def _note(self, job: Job, folder: Path, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "progress":
            names = ("stage", "done", "total", "eta", "note")
            self.hub.advance(job.id, **{name: event[name] for name in names if name in event})
            self.metrics.progress(event)
        elif kind == "preview":
            state = self.hub.state(job.id) or State()
            self.hub.advance(job.id, preview=state.preview + 1)
        elif kind == "done":
            self._complete(job, folder, event["outcome"])
        elif kind == "failed" and event.get("kind") == RANK_LOST:  # the others live, and so does the engine
            self._again(job, RANK_LOST, str(event.get("message")), blamed=True)
        elif kind == "failed":
            error = {name: event.get(name) for name in ("kind", "field", "message")}
            error["message"] = str(error["message"]).replace(f"{folder}/", "")
            self._end(job, FAILED, error=error)
        elif kind == "cancelled":
            self._cancelled(job)

    def _is_cancelled(self, job: Job) -> bool:
        fresh = self.jobs.get(job.id)
        return fresh is not None and fresh.cancelling

    def _cancelled(self, job: Job) -> None:
        if self._checkpoint and not self._is_cancelled(job):
            self.jobs.put_back(job.id, counted=False)
            log.info("job %s goes back to the queue", job.id)
        else:
            self._end(job, CANCELLED)

    def _complete(self, job: Job, folder: Path, outcome: dict[str, Any]) -> None:
        size = sync_folder(folder)
        self._end(job, COMPLETED, outcome=outcome, size=size)
        took = time.time() - (job.started or time.time())
        self.seconds_a_job += 0.3 * (took - self.seconds_a_job)
        calls, denoise = outcome.get("calls") or 0, outcome.get("stages", {}).get("denoise")
        if calls and denoise:
            self.seconds_a_call = denoise / calls
        self.metrics.finished(took, outcome)

    def _end(self, job: Job, status: str, **values: Any) -> None:
        values.setdefault("size", folder_bytes(self.jobs.path(job.id)))
        self.jobs.end(job.id, status, **values)
        self.metrics.ended.labels(status).inc()
        log.info("job %s %s", job.id, status)

    def _again(self, job: Job, kind: str, cause: str, blamed: bool) -> None:
        """A process went down with the job: try again once from what is saved, then fail with the cause. A job that had not
        begun is not `blamed` for it, the first time."""
        fresh = self.jobs.get(job.id) or job
        left, blamed = fresh.starts < self.options.max_starts, blamed or fresh.starts > fresh.crashes + 1
        if self._stop.is_set():
            self.jobs.put_back(job.id, counted=False)
        elif fresh.cancelling:
            self._end(job, CANCELLED)
        elif left and (not blamed or fresh.crashes < self.options.retries):
            self.jobs.put_back(job.id, crashed=blamed)
            self.metrics.retried.inc()
            log.error("job %s is tried again: %s", job.id, cause)
        else:
            tries = fresh.crashes + 1
            message = f"{cause} (tried {tries} time{'s' * (tries > 1)})"
            self._end(job, FAILED, error={"kind": kind, "field": None, "message": message})

    def _tidy(self) -> None:
        if time.monotonic() - self._swept > SWEEP:
            self._swept = time.monotonic()
            expire(self.jobs, self.options.keep_days, self.options.keep_gib * GIB)


def work_of(job: Job, folder: Path, options: ServeOptions) -> Work:
    """The job as a runner takes it: addresses `input:N` become paths in the job's folder."""
    body = dict(job.body)
    body["conditions"] = [
        {**item, "uri": str(folder / f"in-{item['uri'].removeprefix('input:')}")} for item in body["conditions"]
    ]
    width, height = job.facts["canvas"]
    sizes = job.facts["video_latents"], width, height
    return Work(job.id, body, str(folder), {"keep_latents": not options.drop_latents, "sizes": sizes})


def recover(jobs: Jobs, max_starts: int) -> None:
    """Settle jobs that a dead server left running: finished ones are delivered, the others wait again, or have failed
    when they were begun `max_starts` times: one of them may be what takes the machine down."""
    for job in jobs.running():
        outcome = finished(jobs.path(job.id))
        if outcome is not None:
            jobs.end(job.id, COMPLETED, outcome=outcome, size=sync_folder(jobs.path(job.id)))
        elif job.cancelling:
            jobs.end(job.id, CANCELLED, size=folder_bytes(jobs.path(job.id)))
        elif job.starts >= max_starts:
            message = f"begun {job.starts} times, and not once to its end"
            error = {"kind": "EngineLost", "field": None, "message": message}
            jobs.end(job.id, FAILED, error=error, size=folder_bytes(jobs.path(job.id)))
        else:
            jobs.put_back(job.id)


def sweep(jobs: Jobs) -> None:
    """Remove what of ours no row knows and every unfinished upload: only while nobody can be sending any."""
    for path in leftovers(jobs.folder, jobs.ids()):
        shutil.rmtree(path, ignore_errors=True)


def finished(folder: Path) -> dict[str, Any] | None:
    """The outcome a runner left in `folder`, when it and all its files are whole."""
    try:
        outcome = json.loads(outcome_file(folder).read_bytes())
        whole = all((folder / name).stat().st_size == size for name, size in outcome["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return outcome if whole and outcome["sizes"] else None


def folder_bytes(folder: Path) -> int:
    """Bytes of a job's files: its media, and whatever it has left."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:  # removed meanwhile, or a preview that gives way to the next
        return 0


def sync_folder(folder: Path) -> int:
    """Have every file of a job on the disk, and return their bytes."""
    total = 0
    for path in [*sorted(folder.iterdir()), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            total += os.fstat(number).st_size if path != folder else 0
        finally:
            os.close(number)
    return total


def expire(jobs: Jobs, days: float, most: float) -> list[str]:
    """Remove ended jobs that are too old, then the oldest until the rest takes at most `most` bytes; their ids."""
    ended, limit = jobs.ended(), time.time() - days * 86400
    total, gone = sum(job.bytes for job in ended), []
    for job in ended:
        if (job.ended or 0) >= limit and total <= most:
            break
        total -= job.bytes
        if jobs.remove(job.id):
            gone.append(job.id)
    return gone
