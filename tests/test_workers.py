"""workers: what processes find, what they raise, and that none outlives its work, a signal, or its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinreel.complaint import explain
from twinreel.errors import RequestError
from twinreel.ranks import RankLost
from twinreel.tools.workers import Elsewhere, divide
from twinreel.watch import Event, Watch

SCRIPT = """
import os, sys, time
from twinreel.stopping import stoppable
from twinreel.tools.workers import divide
from twinreel.watch import Event

def work(part, watch):
    watch(Event(str(os.getpid()), 1, 1, 0.0))
    time.sleep(3600)

if __name__ == "__main__":
    try:
        with stoppable():
            divide(work, [0, 1], lambda event: print(event.stage, flush=True))
    except KeyboardInterrupt as error:
        sys.exit(128 + error.signal)
"""


def act(part: str, watch: Watch) -> str:
    """One worker's work: what its part says."""
    watch(Event(part, 1, 1, 0.0))
    if part == "refuse":
        error = RequestError("requests[1].conditions[0].uri", "no file at x; name another")
        error.add_note("a note")
        raise error
    if part == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "sleep":
        time.sleep(3600)
    return part.upper()


def test_results_come_in_the_order_of_the_parts_and_events_to_one_watch() -> None:
    heard: list[str] = []
    assert divide(act, ["a", "b"], lambda event: heard.append(event.stage)) == ["A", "B"]
    assert sorted(heard) == ["a", "b"]


@pytest.mark.parametrize("parts", [["refuse", "sleep"], ["sleep", "die"]], ids=" ".join)
def test_the_first_that_fails_or_is_lost_ends_all(parts: list[str]) -> None:
    with pytest.raises((RequestError, RankLost)) as caught:
        divide(act, parts)  # does not wait for the sleeper
    if "die" in parts:
        assert str(caught.value).startswith("worker 2 ended with signal SIGKILL")
        assert explain(caught.value).what == "a process of the run was lost"
    else:
        assert isinstance(caught.value, RequestError) and caught.value.field == "requests[1].conditions[0].uri"
        assert caught.value.__notes__ == ["a note"] and "in act" in str(caught.value.__cause__)
        assert isinstance(caught.value.__cause__, Elsewhere)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_worker_outlives_its_parent(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert len(set(workers)) == 2
        parent.send_signal(number)
        try:
            parent.communicate(timeout=60)  # until nobody is left who could write
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
        assert parent.returncode == code
