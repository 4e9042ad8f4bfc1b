"""The golden denoising runs of SPEC 13.7, without diffusers."""

from __future__ import annotations

import pytest
import torch

from golden_dit import TINY, golden_pair
from golden_runs import RUNS, run


@pytest.mark.parametrize("name", RUNS)
def test_golden_sums(name: str) -> None:
    case = RUNS[name]()
    _, end = run(case, *golden_pair(TINY, torch.float32))
    sums = [rows.double().sum().item() for rows in (end.video, end.audio)]
    assert sums == pytest.approx(list(case.sums), rel=1e-4)
    if name == "t2va":
        absolute = [rows.double().abs().sum().item() for rows in (end.video, end.audio)]
        assert absolute == pytest.approx([19186.65702054475, 11676.334025538526], rel=1e-6)
