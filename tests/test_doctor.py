"""`doctor` tells the machine, the versions and the choices, and reads no weight."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from twinreel.config import EngineConfig
from twinreel.doctor import DECODERS, ENCODERS, PARTS, choices, codecs, disk, examine, machine, parts
from twinreel.machine import Card


def test_machine_is_this_one():
    facts = machine()
    assert facts["cpus"] == os.cpu_count()
    assert facts["cuda"].startswith(torch.version.cuda or "this build of torch is for CPUs")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert ("no CUDA device: everything runs on the CPU" in facts["cuda"]) == (devices == 0)
    assert sum(name.startswith("cuda:") for name in facts) == devices


def test_cards_are_told_without_a_context_on_them(monkeypatch: pytest.MonkeyPatch):
    """Ranks that start afterwards need the memory, and in exclusive mode the cards."""

    def opens(*_: object) -> None:
        raise AssertionError("a context is opened")

    for name in ("mem_get_info", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, opens)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cards = [Card(80 << 30, 7 << 29, name="One"), Card(24 << 30, 24 << 30, told=False, name="Two")]
    monkeypatch.setattr("twinreel.doctor.cuda_memory", lambda: cards)
    assert {name: told for name, told in machine().items() if name.startswith("cuda:")} == {
        "cuda:0": "One, 3.5 of 80.0 GiB free",
        "cuda:1": "Two, 24.0 GiB in all; the driver does not tell what is free",
        "cuda:2": "the driver does not tell its memory",
    }


def test_choices_are_the_engines_own(monkeypatch: pytest.MonkeyPatch):
    class Engine:
        def __init__(self, config: EngineConfig) -> None:
            self.config = config

        def close(self) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {"precision": self.config.precision}

    module = types.ModuleType("twinreel.engine")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twinreel.engine", module)
    assert choices(EngineConfig(precision="bf16")) == {"precision": "bf16"}


def test_what_is_here_depends_on_no_choice(tmp_path: Path):
    facts = examine(tmp_path / "out.mp4")
    assert str(tmp_path) in facts["machine"]["disk"] and set(PARTS) < set(facts["parts"])
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_what_is_missing_says_what_that_costs():
    found = parts({"here": (("torch",), "nothing"), "gone": (("torch", "no_such_module"), "no magic")})
    assert found["here"].startswith("torch " + torch.__version__.split("+")[0])
    assert "--no-" not in str(PARTS), "a flag leaves something out, and is never needed"
    assert found["gone"] == "absent (no_such_module): no magic"
    assert set(parts()) == set(PARTS)


def test_free_disk_beside_the_output(tmp_path: Path):
    assert f"GiB free in {tmp_path}" in disk(tmp_path / "a.mp4")
    assert disk(tmp_path / "new" / "a.mp4") == f"{tmp_path / 'new'} does not exist"


def test_codecs_are_those_the_writers_ask_for(monkeypatch: pytest.MonkeyPatch):
    from twinreel.output.writers import container

    assert {suffix: (kind.video, kind.audio) for suffix, kind in container.KINDS.items()} == dict(ENCODERS)
    found = codecs()
    assert {f"writes {suffix}" for suffix in ENCODERS} < set(found)
    read = set(found["reads"].split(", ")) | set(found.get("does not read", "").partition(":")[0].split(", ")) - {""}
    assert read == set(DECODERS)
    monkeypatch.setattr("twinreel.doctor._writes", lambda av, name: name != "libx264")
    assert codecs()["writes .mp4"] == "absent (libx264): no .mp4 files"
    monkeypatch.setitem(sys.modules, "av", None)
    assert codecs()["PyAV"].startswith("absent")
