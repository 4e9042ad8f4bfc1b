"""What is measured of a run's stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from interrupted import T2VA
from twinreel import Engine
from twinreel import finish as finishing
from twinreel.watch import Event, Stages, ignore


def test_writing_that_outlasts_the_decode_is_a_stage(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the encoder still holds when the last clip has come takes seconds at full size."""
    real, begun, told = finishing.write_media, threading.Event(), []

    def write(target: Path, clips: Any, *args: Any, **more: Any) -> Any:
        def slowly() -> Iterator[np.ndarray]:
            yield from clips
            told.append("written" if begun.wait(20) else "unmeasured")

        return real(target, slowly(), *args, **more)

    def watch(event: Event) -> None:
        told.append((event.stage, event.done))
        if event.stage == "mux":
            begun.set()

    monkeypatch.setattr(finishing, "write_media", write)
    report = engine.render(T2VA, tmp_path / "a.mp4", watch=watch)
    assert told[told.index(("decode", 22)) :] == [("decode", 22), ("mux", 0), "written", ("mux", 1)]
    assert report["stages"]["mux"]["seconds"] > 0


def test_what_a_device_has_queued_belongs_to_the_stage_that_queued_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def wait(device: object) -> None:
        now[0] += 5.0

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    stages = Stages(ignore, SimpleNamespace(type="cuda"))
    with stages.stage("encode"):
        now[0] += 1.0
    assert stages.records == {"encode": {"seconds": 6.0, "peak_bytes": 7}}
