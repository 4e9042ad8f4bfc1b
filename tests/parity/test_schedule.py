"""Sigma grids and Euler updates equal diffusers' scheduler bit for bit."""

from __future__ import annotations

import pytest
import torch

from twinreel.ops import select
from twinreel.schedule import factors, make_grid

pytest.importorskip("diffusers")

from diffusers import MiniMaxH3Scheduler  # noqa: E402


@pytest.mark.parametrize("shift", [12.0, 3.0])
@pytest.mark.parametrize("steps", [2, 5, 20, 50, 1000])
def test_grid_and_updates(steps: int, shift: float) -> None:
    oracle = MiniMaxH3Scheduler(shift=shift)
    oracle.set_timesteps(steps)
    grid = make_grid(steps, shift)
    assert torch.equal(grid.sigmas, oracle.sigmas) and torch.equal(grid.times, oracle.timesteps)
    generator = torch.Generator().manual_seed(3)
    mine = theirs = torch.randn(11, 96, generator=generator)
    for step, time in enumerate(oracle.timesteps):
        velocity = torch.randn(11, 96, generator=generator)
        select().euler([(mine, velocity, mine := torch.empty_like(mine), factors(grid, step))])
        theirs = oracle.step(velocity, time, theirs, return_dict=False)[0]
        assert torch.equal(mine, theirs)
