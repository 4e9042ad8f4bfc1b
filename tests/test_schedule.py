"""Sigmas, Euler, timesteps: the golden schedule of SPEC 13.1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinreel.layout import build_layout
from twinreel.limits import SHIFTS, STEPS
from twinreel.ops import select
from twinreel.plan import make_plan
from twinreel.request import Keyframe, Request
from twinreel.schedule import factors, make_grid, make_sigmas, step_timesteps
from twinreel.sources import Picture
from twinreel.spec import Spec

GOLDEN = {
    0: (1.0, 1.0),
    1: (0.998266875743866, 0.9931034445762634),
    2: (0.9964664578437805, 0.9860140085220337),
    3: (0.9945946335792542, 0.978723406791687),
    24: (0.9259259700775146, 0.7575757503509521),
    25: (0.9201277494430542, 0.7422680258750916),
    45: (0.5161290168762207, 0.21052631735801697),
    46: (0.4390243887901306, 0.16363637149333954),
    47: (0.3380281627178192, 0.11320754885673523),
    48: (0.20000000298023224, 0.05882352963089943),
    49: (0.0, 0.0),
}


def test_golden_schedule() -> None:
    sigmas = make_sigmas(50, (12.0, 3.0))
    assert sigmas.calls == 49
    for i, (video, audio) in GOLDEN.items():
        assert (sigmas.video.sigmas[i].item(), sigmas.audio.sigmas[i].item()) == (video, audio)
    assert sigmas.video.times[48].item() == 0.800000011920929
    assert sigmas.audio.times[48].item() == 0.9411764740943909
    assert sigmas.video.sigmas.double().sum().item() == pytest.approx(41.858964428305626, abs=1e-12)
    assert sigmas.audio.sigmas.double().sum().item() == pytest.approx(33.62146346643567, abs=1e-12)
    assert sigmas.video.times.double().sum().item() == pytest.approx(7.141035556793213, abs=1e-12)
    assert sigmas.audio.times.double().sum().item() == pytest.approx(15.378536462783813, abs=1e-12)


@pytest.mark.parametrize("steps", [2, 3, 50, 1000])
def test_the_linspace_recipe(steps: int) -> None:
    """The grid is torch's own linspace: first half by one fused product, second half mirrored from the end."""
    step = np.float32(np.float32(0 - 1) / np.float32(steps - 1))
    base = [
        np.float32(np.float64(step) * i + 1.0) if i < steps // 2 else np.float32(0) - np.float32(step * (steps - 1 - i))
        for i in range(steps)
    ]
    b = torch.tensor(np.array(base, np.float32))
    assert torch.equal(torch.linspace(1, 0, steps), b)
    assert torch.equal(make_grid(steps, 12.0).sigmas, (12.0 * b) / (1 + 11.0 * b))


def test_round_trips_that_are_not_exact() -> None:
    """Sigma recovered from the timestep differs from the stored one at 2 video and 8 audio steps of 49."""
    sigmas = make_sigmas(50, (12.0, 3.0))
    for grid, count in ((sigmas.video, 2), (sigmas.audio, 8)):
        assert int(((1 - grid.times) != grid.sigmas[:-1]).sum()) == count


def test_euler_ends_on_the_denoised_estimate() -> None:
    grid = make_grid(50, 3.0)
    x, v = torch.randn(5, 7), torch.randn(5, 7)
    last, middle = torch.empty_like(x), torch.empty_like(x)
    select().euler([(x, v, last, factors(grid, 48)), (x, v, middle, factors(grid, 20))])
    assert torch.equal(last, x + (1 - grid.times[48]) * v)
    assert not torch.equal(middle, x) and not torch.equal(middle, x + (1 - grid.times[20]) * v)


@pytest.mark.parametrize("shifts", [(SHIFTS.low, SHIFTS.high), (SHIFTS.high, SHIFTS.low)])
@pytest.mark.parametrize("steps", [STEPS.low, STEPS.high])
def test_no_points_fall_together_within_the_limits(steps: int, shifts: tuple[float, float]) -> None:
    assert make_sigmas(int(steps), shifts).calls == steps - 1


def test_row_timesteps() -> None:
    spec = Spec()
    request = Request("a", keyframes=(Keyframe("x"),), duration=4)
    plan = make_plan(request, spec, [Picture(np.zeros((9, 16, 3), np.uint8))])
    layout = build_layout(plan, torch.ones(6, dtype=torch.int64), spec)
    sigmas = make_sigmas(50, plan.shifts)
    times, rows = step_timesteps(layout, sigmas, 0)
    assert times.tolist() == [0.0, torch.tensor(0.999).item()]
    times, rows = step_timesteps(layout, sigmas, 10)
    video, audio = sigmas.video.times[10], sigmas.audio.times[10]
    expected = sorted({video.item(), audio.item(), torch.tensor(0.999).item()})
    assert times.tolist() == expected
    per_row = times[rows]
    assert (per_row[layout.text_indices] == video).all()
    assert (per_row[layout.video_indices[: layout.condition_video]] == times[-1]).all()
    assert (per_row[layout.video_indices[layout.condition_video :]] == video).all()
    assert (per_row[layout.audio_indices] == audio).all()
