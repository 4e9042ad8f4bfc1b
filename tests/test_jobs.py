"""The queue: order, idempotency, every change of state, what a dead server leaves, retention, a full disk."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinreel.serve.dispatch import expire, recover, sweep
from twinreel.serve.folder import new_incoming
from twinreel.serve.jobs import Conflict, Draft, Jobs, QueueFull, new_id
from twinreel.serve.runner import outcome_file


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


def draft(prompt: str = "a", priority: int = 0) -> Draft:
    return Draft(new_id(), "t2va", {"prompt": prompt, "conditions": []}, {"seed": 1}, priority)


def add(jobs: Jobs, prompt: str = "a", priority: int = 0) -> str:
    return jobs.create([draft(prompt, priority)], 100)[0].id


def finish(jobs: Jobs, job: str, size: int = 10) -> None:
    assert jobs.end(job, "completed", outcome={"files": {}}, size=size)


def test_every_commit_is_synced(jobs: Jobs) -> None:
    assert jobs._db.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert jobs._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_order_is_priority_then_age(jobs: Jobs) -> None:
    first, second, urgent = add(jobs, "a"), add(jobs, "b"), add(jobs, "c", 5)
    assert [jobs.position(jobs.get(job)) for job in (first, second, urgent)] == [1, 2, 0]  # type: ignore[arg-type]
    taken = [jobs.take().id for _ in range(3)]  # type: ignore[union-attr]
    assert taken == [urgent, first, second]
    assert jobs.take() is None and jobs.counts()["in_progress"] == 3


def test_a_batch_is_queued_whole_or_not_at_all(jobs: Jobs) -> None:
    add(jobs)
    with pytest.raises(QueueFull):
        jobs.create([draft(), draft()], 2)
    assert jobs.counts()["queued"] == 1
    made = jobs.create([draft(), draft(), draft()], 4)
    assert {job.family for job in made} == {made[0].id} and len(jobs.family(made[0].id)) == 3


def test_idempotency(jobs: Jobs) -> None:
    first = jobs.create([draft(), draft()], 9, "key", "print")
    assert [job.id for job in jobs.create([draft(), draft()], 2, "key", "print")] == [job.id for job in first]
    with pytest.raises(Conflict):
        jobs.create([draft()], 9, "key", "other")
    assert jobs.counts()["queued"] == 2


def test_one_winner_of_many_with_one_key(jobs: Jobs) -> None:
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(jobs.create([draft()], 99, "key", "p")[0].id)) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 20 and len(set(made)) == 1


def test_a_job_ends_once(jobs: Jobs) -> None:
    job = add(jobs)
    assert not jobs.end(job, "completed") and jobs.get(job).status == "queued"  # type: ignore[union-attr]
    jobs.take()
    assert jobs.end(job, "failed", error={"kind": "X"}) and not jobs.end(job, "completed")
    found = jobs.get(job)
    assert found is not None and (found.status, found.error) == ("failed", {"kind": "X"})


def test_cancel(jobs: Jobs) -> None:
    waiting, running = add(jobs, priority=0), add(jobs, priority=1)
    jobs.take()
    assert jobs.cancel(running) == "in_progress" and jobs.cancel(waiting) == "cancelled"
    assert jobs.cancel(waiting) is None and jobs.cancel("video_none") is None
    assert jobs.get(running).cancelling  # type: ignore[union-attr]
    assert jobs.take() is None


def test_a_job_that_goes_back_while_it_is_cancelled_is_cancelled(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = add(jobs)
    jobs.take()
    back, change = threading.Thread(target=jobs.put_back, args=(job,)), jobs._change

    def changed(job: str, status: str, *words: object) -> bool:
        done = change(job, status, *words)
        if threading.current_thread() is not back and not back.ident:
            back.start()
            back.join(0.2)  # it gets there, unless it must wait for `cancel`
        return done

    monkeypatch.setattr(jobs, "_change", changed)
    assert jobs.cancel(job) == "in_progress"
    back.join()
    assert jobs.get(job).cancelling  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ends", "status", "starts"),
    [
        (["orderly"] * 9, "queued", 0),
        (["orderly", "server"] * 2, "queued", 2),
        (["server"] * 2 + ["orderly"], "queued", 2),
        (["server"] * 3, "failed", 3),
    ],
)
def test_which_starts_count(jobs: Jobs, ends: list[str], status: str, starts: int) -> None:
    job = add(jobs)
    for end in ends:
        assert jobs.take()
        if end == "orderly":
            jobs.put_back(job, counted=False)
        else:
            recover(jobs, 3)
    found = jobs.get(job)
    assert found is not None and (found.status, found.starts) == (status, starts)
    assert status == "queued" or "3 times" in found.error["message"]  # type: ignore[index]


def test_a_new_server_settles_what_ran(jobs: Jobs, tmp_path: Path) -> None:
    done, cut, stopped = (add(jobs) for _ in range(3))
    for job in (done, cut, stopped):
        jobs.take()
        jobs.path(job).mkdir(parents=True)
        (jobs.path(job) / "video.mp4").write_bytes(b"123456")
    whole, half = {"files": {"video": "video.mp4"}, "sizes": {"video.mp4": 6}}, {"sizes": {"video.mp4": 7}}
    outcome_file(jobs.path(done)).write_text(json.dumps(whole))
    outcome_file(jobs.path(cut)).write_text(json.dumps(half))
    jobs.cancel(stopped)
    (tmp_path / "jobs" / new_id()).mkdir()
    received = new_incoming(tmp_path)
    theirs = [tmp_path / name for name in ("jobs/video_stranger", "jobs/Holiday", "incoming/x", "incoming/" + "A" * 16)]
    for path in theirs:
        path.mkdir()
    jobs.close()

    again = Jobs(tmp_path)
    recover(again, 20)
    sweep(again)
    assert [again.get(job).status for job in (done, cut, stopped)] == ["completed", "queued", "cancelled"]  # type: ignore[union-attr]
    left = [path for part in ("jobs", "incoming") for path in (tmp_path / part).iterdir() if path not in theirs]
    assert sorted(path.name for path in left) == sorted((done, cut, stopped)) and not received.exists()
    assert all(path.is_dir() for path in theirs)
    assert again.take().id == cut and again.get(cut).starts == 2  # type: ignore[union-attr]
    again.close()


def test_retention_by_age_and_size(jobs: Jobs) -> None:
    made = [add(jobs) for _ in range(4)]
    for job in made[:3]:
        jobs.take()
        jobs.path(job).mkdir(parents=True)
        finish(jobs, job, 100)
    assert expire(jobs, 1.0, 250.0) == [made[0]] and not jobs.path(made[0]).exists()
    assert expire(jobs, 1.0, 250.0) == []
    jobs._db.execute("UPDATE jobs SET ended = ended - 90000 WHERE id = ?", (made[2],))
    assert expire(jobs, 1.0, 250.0) == [made[2]]
    assert jobs.ids() == {made[1], made[3]}


def test_pages_and_filters(jobs: Jobs) -> None:
    made = [add(jobs, f"Prompt {word}") for word in ("red ball", "blue ball", "red sea", "50% O'Brien_")]
    assert [job.id for job in jobs.page(2, None, True, {})] == made[:1:-1]
    assert [job.id for job in jobs.page(9, made[1], False, {})] == made[2:]
    assert [job.id for job in jobs.page(9, None, False, {"q": "RED prompt"})] == [made[0], made[2]]
    assert [job.id for job in jobs.page(9, None, False, {"q": "% o'b"})] == [made[3]]
    assert jobs.page(9, None, False, {"q": "red " * 8 + "nowhere"}) == []  # every word counts
    assert jobs.page(9, None, True, {"status": "failed"}) == [] and len(jobs.page(9, None, True, {"task": "t2va"})) == 4


def test_a_full_disk_leaves_the_queue_whole(jobs: Jobs) -> None:
    add(jobs)
    pages = jobs._db.execute("PRAGMA page_count").fetchone()[0]
    jobs._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        for _ in range(200):
            jobs.create([draft("x" * 5000)], 10_000)
    before = jobs.counts()["queued"]
    jobs._db.execute("PRAGMA max_page_count=100000")
    add(jobs)
    assert jobs.counts()["queued"] == before + 1
    assert jobs._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


@pytest.mark.parametrize("way", ["asked for", "retention"])
def test_a_full_disk_is_freed_by_removal(jobs: Jobs, way: str) -> None:
    """A row that cannot be removed before its files give room is removed after them."""
    job = add(jobs)
    jobs.take()
    jobs.path(job).mkdir(parents=True)
    (jobs.path(job) / "video.mp4").write_bytes(b"123456")
    finish(jobs, job)
    real = jobs._db

    class Full:
        def execute(self, text: str, *values: object) -> sqlite3.Cursor:
            if text.startswith("DELETE") and jobs.path(job).exists():
                raise sqlite3.OperationalError("database or disk is full")
            return real.execute(text, *values)

    jobs._db = Full()  # type: ignore[assignment]
    assert jobs.remove(job) if way == "asked for" else expire(jobs, 1.0, 0.0) == [job]
    jobs._db = real
    assert jobs.get(job) is None and not jobs.path(job).exists()


def test_another_version_is_refused(tmp_path: Path) -> None:
    made = Jobs(tmp_path)
    made._db.execute("PRAGMA user_version=99")
    made.close()
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        Jobs(tmp_path)
