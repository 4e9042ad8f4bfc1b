"""What a lost engine, a lost rank, a full disk and a fault of the server cost a job."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_stub import Running, StubRunner, call, ended, running, until
from test_serve import SHORT, post
from twinreel.serve import dispatch as dispatch_module
from twinreel.serve.jobs import Job
from twinreel.serve.runner import EngineRunner


@pytest.fixture(scope="module")
def runner() -> StubRunner:
    return StubRunner()


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory, runner: StubRunner) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("losses") / "data", tiny_original, runner) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


def test_a_crash_is_retried_once_from_saved_latents(site: Running, runner: StubRunner) -> None:
    starts = runner.starts
    _, made = post(site, {"prompt": "crash once", **SHORT})
    job = ended(site.url, made["id"])
    assert (job["status"], job["retried"]) == ("completed", 1) and made["id"] in runner.resumed
    _, bad = post(site, {"prompt": "crash", **SHORT})
    _, good = post(site, {"prompt": "after it", **SHORT})
    job = ended(site.url, bad["id"])
    assert job["status"] == "failed" and "SIGKILL" in job["error"]["message"] and "2 times" in job["error"]["message"]
    assert "OSError: part.safetensors" in job["error"]["message"]  # nothing says where it lies
    assert ended(site.url, good["id"])["status"] == "completed" and runner.starts == starts + 3


def test_a_lost_rank_is_retried_as_a_lost_engine_is_and_the_engine_stays(site: Running, runner: StubRunner) -> None:
    starts = runner.starts
    job = ended(site.url, post(site, {"prompt": "rank once", **SHORT})[1]["id"])
    assert (job["status"], job["retried"]) == ("completed", 1) and job["id"] in runner.resumed
    job = ended(site.url, post(site, {"prompt": "rank", **SHORT})[1]["id"])
    assert job["status"] == "failed" and job["error"]["code"] == "RankLost" and "2 times" in job["error"]["message"]
    assert runner.starts == starts


def test_a_job_that_had_not_begun_is_not_blamed_for_the_engine(site: Running, runner: StubRunner) -> None:
    starts = runner.starts
    job = ended(site.url, post(site, {"prompt": "gone", **SHORT})[1]["id"])
    assert (job["status"], job["retried"]) == ("completed", 0) and runner.starts == starts + 1


def test_a_job_that_ends_every_engine_before_it_begins_fails(site: Running, runner: StubRunner) -> None:
    job = ended(site.url, post(site, {"prompt": "gone for good", **SHORT})[1]["id"])
    assert (job["status"], job["retried"]) == ("failed", 1) and runner.ran.count(job["id"]) == 3


def test_an_engine_that_the_system_cannot_start_is_tried_again(
    site: Running, runner: StubRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(24, "Too many open files")]

    def start() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {"model": "stub", "device": "none"}

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(runner, "alive", False)
    until(lambda: not failures)
    monkeypatch.setattr(runner, "alive", True)
    assert ended(site.url, post(site, {"prompt": "after it", **SHORT})[1]["id"])["status"] == "completed"


def test_a_disk_that_fills_while_a_job_ends(site: Running, runner: StubRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's end cannot be recorded: it is delivered once writing works again, and not run twice.

    Only what takes room fails: a change of no rows does not.
    """
    seen, jobs = [], site.service.jobs
    write = jobs.end

    def end(*words: Any, **values: Any) -> bool:
        if len(seen) == 3:
            return write(*words, **values)
        seen.append(call(f"{site.url}/ready")[0])
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(jobs, "end", end)
    monkeypatch.setattr(dispatch_module, "IDLE", 0.01)
    until(lambda: call(f"{site.url}/ready")[0] == 200)
    _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "unlucky", **SHORT})
    assert ended(site.url, made["id"], 10)["status"] == "completed" and runner.ran.count(made["id"]) == 1
    until(lambda: call(f"{site.url}/ready")[0] == 200)
    assert seen == [200, 503, 503]


def test_a_disk_that_is_full_at_the_start(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead server left is settled once there is room; until then `/ready` says what is missing."""
    settle, room = dispatch_module.recover, threading.Event()

    def recover(*words: Any) -> None:
        if not room.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        settle(*words)

    monkeypatch.setattr(dispatch_module, "recover", recover)
    monkeypatch.setattr(dispatch_module, "IDLE", 0.01)
    with running(tmp_path / "data", tiny_original, StubRunner()) as site:
        until(lambda: "disk is full" in str(call(f"{site.url}/ready")[1]))
        room.set()
        until(lambda: call(f"{site.url}/ready")[0] == 200)


def test_a_job_that_is_left_gives_its_end_to_no_other(
    tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue cannot be read in the middle of the first job: it is run again, and every job gets what it has made."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    runner = EngineRunner([sys.executable, str(Path(__file__).with_name("stub_worker.py")), "good"])
    words, failures = ("first", "second", "torn", "fourth"), [sqlite3.OperationalError("disk I/O error")]
    with running(tmp_path / "data", tiny_original, runner) as site:
        dispatcher = site.service.dispatcher
        look = dispatcher._is_cancelled

        def unlucky(job: Job) -> bool:
            if failures:
                raise failures.pop()
            return look(job)

        monkeypatch.setattr(dispatcher, "_is_cancelled", unlucky)
        made = [post(site, {"prompt": word, **SHORT})[1]["id"] for word in words]
        states = [ended(site.url, job)["status"] for job in made]
        found = [site.service.jobs.get(job) for job in made]
    assert states == ["completed", "completed", "failed", "completed"] and not failures
    assert [job and job.outcome for job in found] == [None if word == "torn" else {"word": word} for word in words]
    assert [job and job.starts for job in found] == [2, 1, 2, 1] and "SIGKILL" in found[2].error["message"]  # type: ignore


def test_a_fault_of_the_server_is_told(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "data", tiny_original, StubRunner()) as site:
        until(lambda: call(f"{site.url}/ready")[0] == 200)
        monkeypatch.setattr(site.service.dispatcher, "_note", lambda *words: 1 / 0)
        post(site, {"prompt": "unlucky", **SHORT})
        status, told, _ = until(lambda: (found := call(f"{site.url}/ready"))[0] == 503 and found)
        assert told["engine"] == "failed" and "ZeroDivisionError: division by zero" in told["cause"], told
