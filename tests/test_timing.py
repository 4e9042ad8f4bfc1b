"""Timing on a card that is not the current one, whose numbers are not nvidia-smi's: on cards that are made up."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinreel.tools import timing
from twinreel.tools.timing import card, kernels, measure

SECOND = torch.device("cuda", 1)


class Event:
    """Notes on which stream it was recorded."""

    recorded: list[Any] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any = "of the current device") -> None:
        self.recorded.append(stream)

    def elapsed_time(self, after: Event) -> float:
        return 2.0


def test_work_is_timed_on_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(Event, "recorded", [])
    assert measure(lambda: None, SECOND, 0.006)["seconds"] == 2e-3
    assert set(Event.recorded) == {("stream", SECOND)} and set(waited) == {SECOND}


FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
UUID = "e0b4dd5d-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("facts", "code", "told"),
    [
        ({"uuid": UUID}, 0, dict(zip(FIELDS, ("1980 MHz", "3201 MHz", "121.07 W", "38"), strict=True))),
        ({"uuid": UUID}, 6, {}),  # such as a part of a card, which it does not find by this name
        ({}, 0, {}),
    ],
)
def test_a_card_is_asked_for_by_its_uuid(
    facts: dict[str, str], code: int, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(word for word in command if word.startswith("--id"))
        out = "No devices were found\n" if code else "1980 MHz, 3201 MHz, 121.07 W, 38\n"
        return subprocess.CompletedProcess(command, code, out)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**facts))
    monkeypatch.setattr(timing.shutil, "which", lambda name: name)
    monkeypatch.setattr(timing.subprocess, "run", run)
    assert card(SECOND) == {"device": "card of cuda:1"} | told
    assert asked == [f"--id=GPU-{UUID}"] * bool(facts)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cuda:1", [("_kernel", 3, 6.0, 0.75), ("copy", 1, 2.0, 0.25)]),
        ("cpu", [("cudaDeviceSynchronize", 2, 9.0, 0.9), ("cuLaunchKernelEx", 3, 1.0, 0.1)]),
    ],
)
def test_only_what_ran_on_the_device_is_a_kernel(
    device: str, told: list[tuple[str, int, float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        SimpleNamespace(key=key, count=count, self_device_time_total=there, self_cpu_time_total=here)
        for key, count, there, here in (
            ("cudaDeviceSynchronize", 2, 0, 9000), ("copy", 1, 2000, 0), ("_kernel", 3, 6000, 0),
            ("cuLaunchKernelEx", 3, 0, 1000),
        )
    ]  # fmt: skip
    seen = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(seen))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    assert [tuple(row.values()) for row in kernels(lambda: None, torch.device(device))] == told
