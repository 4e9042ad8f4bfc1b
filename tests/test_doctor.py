"""`doctor` tells the machine, the versions and the choices, and reads no weight."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch

from twinreel.config import EngineConfig
from twinreel.doctor import examine, machine


def test_machine_is_this_one():
    facts = machine()
    assert facts["cpus"] == os.cpu_count()
    assert facts["cuda"] == (torch.version.cuda or "this build of torch is for CPUs")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert sum(name.startswith("cuda:") for name in facts) == devices


def test_choices_are_the_engines_own(monkeypatch: pytest.MonkeyPatch):
    class Engine:
        def __init__(self, config: EngineConfig) -> None:
            self.config = config

        def describe(self) -> dict[str, Any]:
            return {"precision": self.config.precision}

    module = types.ModuleType("twinreel.engine")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twinreel.engine", module)
    facts = examine(EngineConfig(precision="bf16"))
    assert facts["choices"] == {"precision": "bf16"}
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
