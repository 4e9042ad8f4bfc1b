"""The loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from .layout import PackedLayout
from .noise import Rows
from .policy import StepPolicy
from .schedule import Factors, Sigmas, factors

VelocityAt = Callable[[int, Rows], Rows]
Vote = Callable[[int, Rows], None]
# Moves (x, velocity, out, factors) of the video and of the audio rows: an entry of the ops table.
Euler = Callable[[Sequence[tuple[Tensor, Tensor, Tensor, Factors]]], None]


def denoise(
    rows: Rows,
    layout: PackedLayout,
    sigmas: Sigmas,
    velocity_at: VelocityAt,
    policy: StepPolicy,
    vote: Vote,
    *,
    move: Euler,
) -> Rows:
    """Run every step; returns the final rows (same shapes, fp32, condition rows untouched).

    `velocity_at(step, rows)` is the model: velocities shaped like the rows. `vote(step, velocity)` is the one point of
    a step where all ranks agree to go on: it raises on cancel and on values that are not finite. `move` updates both
    modalities at once. The loop writes to rows of its own, the same in every step.
    """
    steps = [(factors(sigmas.video, step), factors(sigmas.audio, step)) for step in range(sigmas.calls)]
    rows = Rows(rows.video.clone(), rows.audio.clone())
    for step in range(sigmas.calls):
        update = policy.update(step, rows, partial(velocity_at, step, rows))
        vote(step, update.velocity)
        advance(update.corrected(rows), update.velocity, rows, steps[step], layout, move)
    return rows


def advance(
    rows: Rows, velocity: Rows, out: Rows, steps: tuple[Factors, Factors], layout: PackedLayout, move: Euler
) -> None:
    """One Euler step of both modalities' target rows into `out`, whose leading condition rows stay as they are."""
    first = layout.condition_video, layout.condition_audio
    pairs = zip(vars(rows).values(), vars(velocity).values(), vars(out).values(), first, steps, strict=True)
    move([(x[start:], v[start:], to[start:], values) for x, v, to, start, values in pairs])
