"""The loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .layout import PackedLayout
from .noise import Rows
from .policy import StepPolicy
from .schedule import Sigmas, euler

VelocityAt = Callable[[int, Rows], Rows]
Vote = Callable[[int, Rows], None]


def denoise(
    rows: Rows, layout: PackedLayout, sigmas: Sigmas, velocity_at: VelocityAt, policy: StepPolicy, vote: Vote
) -> Rows:
    """Run every step; returns the final rows (same shapes, fp32, condition rows untouched).

    `velocity_at(step, rows)` is the model: velocities shaped like the rows. `vote(step, velocity)` is the one point of
    a step where all ranks agree to go on: it raises on cancel and on values that are not finite.
    """
    for step in range(sigmas.calls):
        update = policy.update(step, rows, partial(velocity_at, step, rows))
        vote(step, update.velocity)
        rows = advance(update.corrected(rows), update.velocity, sigmas, step, layout)
    return rows


def advance(rows: Rows, velocity: Rows, sigmas: Sigmas, step: int, layout: PackedLayout) -> Rows:
    """One Euler step of the target rows of both modalities; the leading condition rows are carried over as they are."""
    video, audio = layout.condition_video, layout.condition_audio
    return Rows(
        torch.cat([rows.video[:video], euler(rows.video[video:], velocity.video[video:], sigmas.video, step)]),
        torch.cat([rows.audio[:audio], euler(rows.audio[audio:], velocity.audio[audio:], sigmas.audio, step)]),
    )
