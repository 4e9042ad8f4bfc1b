"""What a lost engine, a lost rank and a system without room for one cost a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_stub import Running, StubRunner, call, ended, running, until
from test_serve import SHORT, post


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
