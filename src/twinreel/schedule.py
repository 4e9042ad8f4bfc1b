"""The two sigma grids, what an Euler step takes of them, and the distinct timesteps of a step (SPEC 5.3, 7). All in
float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import PackedLayout
from .spec import AUDIO_CONDITION_TIME, CONDITION_TIME


@dataclass(frozen=True)
class Grid:
    """One modality's grid: `sigmas` fp32 [N] from 1 to 0 and `times` fp32 [N-1], `t = 1 - sigma`."""

    sigmas: Tensor
    times: Tensor


@dataclass(frozen=True)
class Sigmas:
    """Both grids of a request; they share the step index."""

    video: Grid
    audio: Grid

    @property
    def calls(self) -> int:
        """Model calls: points minus one."""
        return len(self.video.times)


def make_grid(steps: int, shift: float) -> Grid:
    """The shifted grid of `steps` points, CPU fp32; the order of operations is the checkpoint's (SPEC 7)."""
    base = torch.linspace(1, 0, steps, dtype=torch.float32)
    sigmas = shift * base / (1 + (shift - 1) * base)
    sigmas = torch.unique_consecutive(sigmas)
    return Grid(sigmas, 1.0 - sigmas[:-1])


def make_sigmas(steps: int, shifts: tuple[float, float]) -> Sigmas:
    """Grids for (video, audio) shifts within `limits.SHIFTS`: beyond, points may fall together."""
    video, audio = (make_grid(steps, shift) for shift in shifts)
    assert len(video.times) == len(audio.times) == steps - 1, (steps, shifts)
    return Sigmas(video, audio)


Factors = tuple[float, float, float]


def factors(grid: Grid, step: int) -> Factors:
    """sigma, ratio and 1 - ratio of one Euler step, each a float32 value.

    Sigma of the denoised estimate is recovered from the timestep the model saw (below 0.5 the round trip `1 - (1 - s)`
    is not exact), while the ratio uses the stored grid.
    """
    ratio = grid.sigmas[step + 1] / grid.sigmas[step]
    return (1 - grid.times[step]).item(), ratio.item(), (1.0 - ratio).item()


def step_timesteps(layout: PackedLayout, sigmas: Sigmas, step: int) -> tuple[Tensor, Tensor]:
    """Distinct timesteps of a step, fp32 [M] ascending, and each row's index into them, int64 [S] (CPU)."""
    video, audio = sigmas.video.times[step], sigmas.audio.times[step]
    # order of layout.clock: target video and text, target audio, visual conditions, sound conditions
    clocks = torch.stack(
        [
            video,
            audio,
            torch.clamp(video, min=torch.tensor(CONDITION_TIME, dtype=torch.float32)),
            torch.tensor(AUDIO_CONDITION_TIME, dtype=torch.float32),
        ]
    )
    return torch.unique(clocks[layout.clock_S], sorted=True, return_inverse=True)
