"""The soak in small: a few requests, half of them failing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from soak import soak_round
from twinreel import Engine, EngineConfig


def test_a_short_soak(tiny_all: Path, capsys: pytest.CaptureFixture[str]):
    soak_round(Engine(EngineConfig(model=str(tiny_all), device="cpu", threads=2)), random.Random(3), 6, 4, (0.9,))
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 6 and sum(" at " in line for line in said.splitlines()) == 4
