"""The engine's process: started, asked, cancelled, lost, ended with everything it started; and the reading process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_stub import until
from twinreel import RequestError
from twinreel.serve.child import Child, ChildLost
from twinreel.serve.probe import Probe
from twinreel.serve.runner import EngineLost, EngineRunner, Work

WORKER = Path(__file__).with_name("stub_worker.py")
LOST = {
    "die": "SIGKILL",
    "torn": "SIGKILL",
    "noise": "is no answer: b'noise",
    "number": r"is no answer: b'\[1\]",
    "leave": "exit code 7; its last words: the last words",
    "hang": "said nothing for 1.5 s",
}


def work(prompt: str, job: str = "video_1") -> Work:
    return Work(job, {"prompt": prompt}, "/nowhere", {})


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def runner() -> Iterator[EngineRunner]:
    made = EngineRunner([sys.executable, str(WORKER), "good"], stall_seconds=1.5, cancel_seconds=0.3)
    yield made
    made.stop()


def names(events: Iterator[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_jobs_run_one_after_another(runner: EngineRunner) -> None:
    assert runner.start()["pid"] == runner.pid
    assert os.getpgid(runner.pid) == runner.pid != os.getpgrp()
    for _ in range(2):
        assert names(runner.run(work("short"))) == ["progress", "done"]


def test_cancel_is_heard_within_a_step(runner: EngineRunner) -> None:
    runner.start()
    pid, events = runner.pid, []
    for event in runner.run(work("long")):
        events.append(event["event"])
        runner.cancel("another")
        runner.cancel("video_1")
    assert events == ["progress", "cancelled"] and runner.pid == pid
    assert names(runner.run(work("short"))) == ["progress", "done"]


def test_an_engine_that_does_not_hear_is_ended(runner: EngineRunner) -> None:
    runner.start()
    pid = runner.pid
    with pytest.raises(EngineLost, match="did not end a cancelled job"):
        for _ in runner.run(work("deaf")):
            runner.cancel("video_1")
    assert not alive(pid)
    assert runner.start()["pid"] != pid and names(runner.run(work("short")))[-1] == "done"


def test_an_engine_that_dies_says_how(runner: EngineRunner) -> None:
    with pytest.raises(EngineLost, match="not running"):
        list(runner.run(work("short")))
    for word, told in LOST.items():
        runner.start()
        with pytest.raises(EngineLost, match=told):
            list(runner.run(work(word)))
        assert not runner.alive


def test_a_run_that_is_left_goes_on_nowhere(runner: EngineRunner) -> None:
    """Before its last event the engine ends with it; afterwards it is free, and what comes late is nobody else's."""
    pid = runner.start()["pid"]
    run = runner.run(work("long"))
    next(run)
    run.close()
    assert not runner.alive and not alive(pid)
    pid, run = runner.start()["pid"], runner.run(work("short"))
    while next(run)["event"] != "done":
        pass
    run.close()
    assert [event.get("outcome") for event in runner.run(work("late"))] == [None, {"word": "late"}]
    assert runner.pid == pid and runner.alive


def test_an_engine_takes_no_job_after_its_last(runner: EngineRunner) -> None:
    pid = runner.start()["pid"]
    assert names(runner.run(work("last"))) == ["progress", "failed"] and not runner.alive and not alive(pid)
    assert runner.start()["pid"] != pid and runner.alive and names(runner.run(work("short")))[-1] == "done"


def test_an_engine_that_cannot_start_says_why() -> None:
    runner = EngineRunner([sys.executable, str(WORKER), "broken"])
    with pytest.raises(EngineLost, match="no such weights"):
        runner.start()
    assert runner.pid is None


def test_stop_ends_a_running_job_and_the_whole_group(capfd: pytest.CaptureFixture[str]) -> None:
    runner = EngineRunner([sys.executable, str(WORKER), "child"])
    runner.start()
    pid = runner.pid
    assert pid is not None
    failed: list[str] = []

    def run() -> None:
        try:
            list(runner.run(work("long")))
        except EngineLost as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    runner.stop()
    thread.join(5)
    assert failed and not alive(pid)
    child = int(capfd.readouterr().err.split("child ")[1].split()[0])
    until(lambda: not alive(child))


def test_the_engine_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from twinreel.serve.runner import EngineRunner\n"
        f"made = EngineRunner([sys.executable, {str(WORKER)!r}, 'child'])\n"
        "print(made.start()['pid'], flush=True); time.sleep(99)"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stderr is not None
    pid = int(server.stdout.readline())
    words = iter(server.stderr.readline, "")
    child = next(int(line.split()[1]) for line in words if line.startswith("child "))
    assert alive(pid) and alive(child)
    server.send_signal(signal.SIGKILL)
    server.wait()
    until(lambda: not alive(pid) and not alive(child))
    server.stdout.close()
    server.stderr.close()


def test_an_engine_that_is_stopped_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Child] = []

    def late(command: list[str]) -> Child:
        runner.stop()
        made.append(Child(command))
        return made[0]

    runner = EngineRunner([sys.executable, str(WORKER), "good"])
    monkeypatch.setattr("twinreel.serve.runner.Child", late)
    with pytest.raises(EngineLost, match="stopped while it started"):
        runner.start()
    assert not made[0].alive


@pytest.mark.parametrize("had", [0, 1])
def test_a_process_is_ended_when_there_is_no_thread_to_hear_it(monkeypatch: pytest.MonkeyPatch, had: int) -> None:
    made: list[subprocess.Popen[bytes]] = []
    popen, start, left = subprocess.Popen, threading.Thread.start, [None] * had

    def refuse(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    def note(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*words, **more))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        Child(["sleep", "1000"])
    assert made[0].poll() == -signal.SIGKILL


def test_half_an_order_is_none() -> None:
    """The server died in the middle of it: whoever hears orders ends in order."""
    script = "from twinreel.serve.child import Voice; print(list(Voice.orders()))"
    done = subprocess.run([sys.executable, "-c", script], input='{"do": 1}\n{"do', capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[{'do': 1}]\n"), done.stderr


def test_a_reader_that_breaks_is_replaced() -> None:
    """The reading process is killed by a medium: that request is refused, the next one gets a new process."""
    script = "import sys\nfor line in sys.stdin: sys.exit(3)"
    probe = Probe([sys.executable, "-c", script])
    for _ in range(2):
        with pytest.raises(RequestError, match="exit code 3"):
            probe.frames(Path("a"), Path("b"))
    slow = Probe([sys.executable, "-c", "import time; time.sleep(99)"], seconds=0.3)
    with pytest.raises(RequestError, match="more than 0.3 s"):
        slow.frames(Path("a"), Path("b"))
    probe.stop()
    slow.stop()


def test_a_gone_process_is_told_apart() -> None:
    child = Child([sys.executable, "-c", "pass"])
    with pytest.raises(ChildLost, match="exit code 0"):
        child.receive(10)
    with pytest.raises(ChildLost):
        child.send({})
        child.send({"more": "x" * 100_000})
    child.stop(1)


def test_an_engine_that_cannot_be_built_says_why_and_ends_in_order(tmp_path: Path) -> None:
    settings = {
        "lock": str(tmp_path / "lock"),
        "engine": {"model": str(tmp_path / "none"), "device": "cpu"},
        "warm": [],
    }
    command = [sys.executable, "-m", "twinreel.serve.worker", json.dumps(settings | {"cache_mib": 0})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        told, log = json.loads(process.stdout.readline()), process.stderr.read().decode()
        assert process.wait() == 1 and "Fatal Python error" not in log, log
    assert told["event"] == "failed" and "no such folder" in told["message"]
