"""Step policies: the plain one."""

from __future__ import annotations

import torch

from twinreel.noise import Rows
from twinreel.policy import EveryStep, Update

ROWS = Rows(torch.ones(2, 3), torch.zeros(1, 2))
OTHER = Rows(torch.zeros(2, 3), torch.ones(1, 2))


def test_every_step_calls_and_counts() -> None:
    policy = EveryStep()
    update = policy.update(3, ROWS, lambda: OTHER)
    assert update.velocity is OTHER and update.corrected(ROWS) is ROWS
    assert policy.report() == {"name": "every-step", "calls": 1, "computed": [3]}
    assert EveryStep().computed == []


def test_a_correction_replaces_the_rows() -> None:
    assert Update(OTHER, correction=OTHER).corrected(ROWS) is OTHER
