"""Starting, ending and losing the processes of ranks, with no engine in them: each moment can be held."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from twinreel import Cancelled, ranks
from twinreel.ranks import CLOSED, RankLost, Ranks
from twinreel.stopping import Stopped
from twinreel.watch import ignore

MOST = 60.0  # seconds; nothing here takes one unless it hangs


class Gate:
    """Where ranks that start wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "open"
        self.open()

    def open(self) -> None:
        self.path.touch()

    def shut(self) -> None:
        self.path.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def made(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(ranks, "ENTRY", "stub_rank")
    made = Ranks(str(gate.path), 2)
    yield made
    gate.open()
    made.end()


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + MOST
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def run(made: Ranks, word: str, watch: Callable[..., None] = ignore) -> Any:
    return made.run((word,), watch, None)


class Beside(Thread):
    """A run in a thread of its own, and how it ended."""

    def __init__(self, made: Ranks, word: str) -> None:
        super().__init__()
        self._made, self._word = made, word
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = run(self._made, self._word)
        except Exception as error:
            self.error = error

    def ended(self) -> Beside:
        self.join(MOST)
        assert not self.is_alive()
        return self


def restarting(made: Ranks, gate: Gate, word: str) -> Beside:
    """A run that waits for ranks that are started anew, since one was killed."""
    gate.shut()
    before = made.pids
    os.kill(before[1], signal.SIGKILL)
    made._members[1].process.wait()
    beside = Beside(made, word)
    until(lambda: len(made.pids) == 2 and not set(made.pids) & set(before))
    return beside


def test_an_engine_closed_while_its_ranks_start_anew_ends_the_run_and_them(made: Ranks, gate: Gate) -> None:
    beside = restarting(made, gate, "word")
    started = made.pids
    made.end()
    error = beside.ended().error
    assert isinstance(error, RuntimeError) and str(error) == CLOSED
    assert not alive(started) and not made.pids


def test_close_at_any_moment_ends_every_process(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ENTRY", "stub_rank")
    every: list[int] = []
    start_rank = Ranks._start_rank

    def counted(self: Ranks, *given: Any) -> Any:
        member = start_rank(self, *given)
        every.append(member.process.pid)
        return member

    monkeypatch.setattr(Ranks, "_start_rank", counted)
    for pause in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        made = Ranks(str(gate.path), 2)
        made._members[0].process.kill()
        made._members[0].process.wait()
        beside = Beside(made, "word")
        time.sleep(pause)
        made.end()
        beside.ended()
        assert beside.result == "word" or (isinstance(beside.error, RuntimeError) and str(beside.error) == CLOSED)
    assert not alive(every)


def test_a_cancel_while_ranks_start_anew_is_not_lost(made: Ranks, gate: Gate) -> None:
    beside = restarting(made, gate, "wait")
    made.cancel()
    gate.open()
    assert isinstance(beside.ended().error, Cancelled)
    assert run(made, "next") == "next"


def test_a_cancel_of_one_run_is_not_heard_by_the_next(made: Ranks) -> None:
    made.cancel()
    assert run(made, "one") == "one"


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_rank_that_is_stopped_before_its_order_is_named(
    made: Ranks, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """A large order fills what the line holds."""
    made.end()
    monkeypatch.setattr(ranks, "SILENCE", 2.0)
    monkeypatch.setattr(ranks, "HUSH", 1.0)
    made = Ranks(made._settings, 2)
    os.kill(made.pids[1], signal.SIGSTOP)
    with pytest.raises(RankLost, match="rank 1"):
        made.run(("word", bytes(8 << 20 if large else 1)), ignore, None)
    assert run(made, "next") == "next"
    made.end()


def test_a_rank_that_is_not_ready_in_time_is_the_one_that_was_silent(
    made: Ranks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "MEETING", 4.0)
    monkeypatch.setattr(ranks, "SILENCE", 1.0)
    beside = restarting(made, gate, "word")
    os.kill(made.pids[1], signal.SIGSTOP)
    error = beside.ended().error
    assert isinstance(error, RankLost) and str(error).startswith("rank 1 was not ready after 4 s and gave no sign of")
    gate.open()
    assert run(made, "next") == "next"


def test_what_a_signal_cut_short_is_not_the_next_ones_result(made: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C in Python, while the first one's run is being ended."""

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ranks, "_abandon", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(made, "first", interrupt)
    monkeypatch.undo()
    monkeypatch.setattr(ranks, "ENTRY", "stub_rank")
    assert [run(made, word) for word in ("second", "third")] == ["second", "third"]


def test_a_second_signal_waits_for_nobody(made: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ENDING", MOST)
    before = made.pids

    def stop(*given: object) -> None:
        raise Stopped(signal.SIGTERM)

    start = time.monotonic()
    with pytest.raises(Stopped):
        run(made, "deaf", stop)
    assert time.monotonic() - start < MOST and not alive(before) and not made.pids
    assert run(made, "next") == "next"


def test_an_error_of_the_watch_beside_the_last_word_of_another_rank_costs_no_rank(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have ended by when the watch is called."""
    before = made.pids

    def late(*given: object) -> None:
        until(lambda: all(member.line.poll() for member in made._members))
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run(made, "word", late)
    assert made.pids == before and run(made, "next") == "next"


def test_a_caller_that_is_busy_for_long_costs_no_rank(made: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked terminal, a slow disk under what follows the values."""
    before = made.pids
    monkeypatch.setattr(ranks, "SILENCE", 0.5)

    def busy(*given: object) -> None:
        time.sleep(1.0)
        made.cancel()

    with pytest.raises(Cancelled):
        run(made, "wait", busy)
    assert made.pids == before and run(made, "next") == "next"


def test_a_rank_finds_the_modules_of_this_process_and_no_others(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ENTRY", "stub_rank")
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the working folder was run')")
    monkeypatch.chdir(tmp_path)
    made = Ranks(str(gate.path), 2)
    made.end()
    assert str(tmp_path) not in made.facts["path"] and made.facts["queue"] != str(tmp_path / "queue.py")


@pytest.mark.parametrize(
    ("error", "failed", "lost", "silent", "type_", "words", "notes"),
    [
        (RuntimeError("Timed out"), 0, {}, {1: 20}, RankLost, "rank 1 gave no sign of life for 20 s", []),
        (RuntimeError("closed"), 0, {1: -9}, {}, RankLost, "rank 1 ended by signal SIGKILL", []),
        (EOFError(), None, {0: -6}, {1: 20}, RankLost, "rank 1 gave no sign of life for 20 s", []),
        (EOFError(), None, {0: -6}, {}, RankLost, "an exchange between ranks took more than 20 s", []),
        (EOFError(), None, {0: -9}, {1: 20}, RankLost, "rank 0 ended by signal SIGKILL", []),
        (ValueError("mine"), 0, {}, {1: 1}, ValueError, "mine", ["on rank 0 of 2", "no answer from rank 1"]),
        (ValueError("mine"), 1, {}, {}, ValueError, "mine", ["on rank 1 of 2"]),
        (EOFError(), None, {}, {}, RankLost, "the line to a rank broke", []),
        (RankLost("rank 1 gave"), None, {}, {1: 25}, RankLost, "rank 1 gave", []),
    ],
)
def test_which_of_several_errors_is_the_cause(
    error: BaseException, failed: int | None, lost: dict[int, int], silent: dict[int, int], type_: type,
    words: str, notes: list[str],
) -> None:  # fmt: skip
    made = Ranks.__new__(Ranks)
    made._count, said = 2, dict[int, str]()
    now = time.monotonic()
    cause = made._cause(error, failed, lost, {rank: now - seconds for rank, seconds in silent.items()}, said)
    assert type(cause) is type_ and words in str(cause) and getattr(cause, "__notes__", []) == notes
    if lost == {0: -6} and silent:
        assert said.pop(0).startswith("ended by signal SIGABRT") and "rank 0" not in str(cause)
    assert said == ({failed: f"RuntimeError: {error}"} if isinstance(error, RuntimeError) and failed == 0 else {})
