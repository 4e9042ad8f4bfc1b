"""The command line on one GPU and on two: what a person types, and that all of it makes the same file."""

# ruff: noqa: E402 what is not installed skips these tests before it is imported

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("tyro", "rich", "av"):
    pytest.importorskip(name)

from test_launcher import free_port
from twinreel.demo.tiny import tiny_spec, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MOST = 120.0  # seconds for one command
SHORT = ("A bell.", "--steps", "4", "--duration", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With heads for the chunks of two ranks."""
    spec = tiny_spec()
    return str(write_tiny(tmp_path_factory.mktemp("typed"), spec=replace(spec, dit=replace(spec.dit, heads=8))))


@pytest.fixture(params=[1, 2])
def gpus(request: pytest.FixtureRequest) -> str:
    """How many."""
    if request.param > torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    return str(request.param)


def command(*words: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON object of a command that ends well."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    typed = [sys.executable, *launcher, "-m", "twinreel", *words, "--json"]
    done = subprocess.run(typed, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=MOST)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["ok"]
    return told


def test_plan_doctor_and_verify(model: str, gpus: str) -> None:
    planned = command("plan", *SHORT, "--model", model, "--gpus", gpus)
    found = command("doctor", "--model", model, "--gpus", gpus)["choices"]
    assert found["device"].startswith("cuda:0") and command("verify", model)
    topology = found["topology"]
    assert topology["ranks"] == int(gpus) and topology["attend"] == ("local" if gpus == "1" else "overlapped")
    assert gpus == "1" or planned["topology"]["attend"] == topology["attend"]


def test_ranks_started_here_and_by_a_launcher_make_one_file(model: str, tmp_path: Path, gpus: str) -> None:
    own, launched = str(tmp_path / "own.mp4"), str(tmp_path / "launched.mp4")
    words = ("generate", *SHORT, "--model", model)
    first = command(*words, "--gpus", gpus, "-o", own)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", gpus, "--master-port", free_port())
    second = command(*words, "-o", launched, launcher=launcher)
    assert first["sha256"] == second["sha256"] and Path(own).read_bytes() == Path(launched).read_bytes()


def test_a_signal_in_decode_keeps_latents_that_finish_the_file(model: str, tmp_path: Path, gpus: str) -> None:
    whole, stopped = tmp_path / "whole.mp4", tmp_path / "stopped.mp4"
    words = ["generate", "A bell.", "--steps", "4", "--duration", "6", "--model", model, "--gpus", gpus]
    wanted = command(*words, "-o", str(whole))["sha256"]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    typed = [sys.executable, "-m", "twinreel", *words, "-o", str(stopped)]
    with subprocess.Popen(typed, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stderr is not None
        latents, end = stopped.with_suffix(".latents.safetensors"), time.monotonic() + MOST
        while not latents.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
    if process.returncode == 0:
        assert "no step left to stop at" in told  # it was faster
        return
    assert process.returncode == 143 and str(latents) in told, told
    found = command("decode", str(latents), "-o", str(stopped), "--model", model, "--gpus", gpus)
    assert found["sha256"] == wanted and not latents.exists()
