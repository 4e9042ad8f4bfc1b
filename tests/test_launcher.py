"""A process that a launcher has started, or says it has: waiting for the others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from twinreel.launch import environment, module

MOST = 30.0  # seconds


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def waiting(model: str, rank: int, port: str, *more: str) -> subprocess.Popen[str]:
    """A launcher's process, one of two."""
    words = ["generate", "x", "--model", model, "--device", "cpu", "-o", str(Path(model) / "never.npz"), *more]
    place = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {**os.environ, **place, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    return subprocess.Popen([sys.executable, "-m", "twinreel", *words], stderr=subprocess.PIPE, text=True, env=own)


def test_a_process_that_waits_for_the_others_hears_signals(tiny_original: Path) -> None:
    with waiting(str(tiny_original), 0, free_port()) as first, waiting(str(tiny_original), 1, free_port()) as second:
        assert first.stderr is not None
        assert any("rank 0 waits at" in line for line in first.stderr)  # and rank 1 has as long to get there
        for process, number in ((first, signal.SIGINT), (second, signal.SIGTERM)):
            process.send_signal(number)
            start = time.monotonic()
            _, told = process.communicate(timeout=MOST)
            assert process.returncode == 128 + number, told
            assert time.monotonic() - start < MOST and "it ended where it stood" in told, told


def test_a_meeting_place_that_is_taken_is_named(tiny_original: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with waiting(str(tiny_original), 0, str(listener.getsockname()[1])) as process:
            _, told = process.communicate(timeout=MOST)
    assert process.returncode == 3 and "in use" in told and "name another MASTER_PORT" in told, told


def test_ranks_that_would_be_cut_otherwise_are_refused_by_each(tiny_original: Path) -> None:
    """As two cards of unlike memory would choose."""
    model, port = str(tiny_original), free_port()
    with waiting(model, 0, port, "--sp", "2") as first, waiting(model, 1, port, "--tp", "2") as second:
        for process in (first, second):
            _, told = process.communicate(timeout=4 * MOST)
            assert process.returncode == 3 and "name sp and tp" in told, told
            assert "rank 0 sp 2 x tp 1" in told and "rank 1 sp 1 x tp 2" in told, told


def test_a_process_of_ours_runs_no_file_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('run')")
    words = module("twinreel.tools.paper")
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 0 and "SP8" in done.stdout, done.stderr


def test_a_plan_is_told_by_rank_0_alone(tiny_original: Path) -> None:
    words = [sys.executable, "-m", "twinreel", "plan", "x", "--model", str(tiny_original), "--device", "cpu", "--json"]
    told = []
    for rank in ("0", "1"):
        place = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        told.append(
            subprocess.run(words, capture_output=True, text=True, env={**os.environ, **place}, check=True).stdout
        )
    assert '"ok": true' in told[0] and told[1] == ""
