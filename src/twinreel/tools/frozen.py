"""The frozen requests: fixed prompts, seeds and media by which two setups are compared, on any checkpoint.

Provenance: the prompts were written for this project, in the words of its demo's small world so that the bundled model
understands them too, and the pictures, clips and sounds are drawn by the functions below from closed formulas. Nothing
was taken from elsewhere. Changing anything here is a new set: raise `FROZEN`, and figures of the old one are history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..request import Keyframe, Reference, Request
from ..sources import Clip, Picture, Sound
from ..spec import FPS

FROZEN = 1
RATE = 32_000
SECONDS = 2.0  # of reference clips and sounds: the shortest the released model takes
RED, BLUE, GREEN = (225, 30, 30), (40, 70, 235), (35, 185, 52)
FIRST_SEED, EXTRA_SEED = 11, 1000
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Named:
    """A request and the name it has in tables; `place`: where it stands in a list of its person's."""

    name: str
    request: Request
    place: str | None = None


@cache
def picture(color: tuple[int, int, int] = RED, across: float = 0.3, height: int = 96, width: int = 160) -> Picture:
    """A ball on a light background that darkens downwards, its centre at `across` of the width."""
    y, x = np.mgrid[0:height, 0:width] + 0.5
    shade = 222 - 40 * y / height
    ball = np.clip(0.5 + 0.22 * height - np.hypot(x - across * width, y - 0.6 * height), 0, 1)[..., None]
    pixels = shade[..., None] * (1 - ball) + np.array(color) * ball
    return Picture(np.round(pixels).astype(np.uint8))


@cache
def clip(sound: bool = True, color: tuple[int, int, int] = BLUE) -> Clip:
    """Two seconds of a ball that slides from left to right, with a hum that goes along when `sound`."""
    count = round(SECONDS * FPS)
    frames = [picture(color, 0.2 + 0.6 * i / (count - 1)).pixels for i in range(count)]
    return Clip(np.stack(frames), float(FPS), hum() if sound else None)


@cache
def hum(hertz: float = 290.0) -> Sound:
    """Two seconds of three partials that move from the left channel to the right."""
    t = np.arange(round(SECONDS * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * hertz * k * t) / k for k in (1, 2, 3)) * 0.15
    right = t / SECONDS
    return Sound(_sixteen_bits(np.stack([tone * (1 - right), tone * right])), RATE)


@cache
def bell(hertz: float = 740.0) -> Sound:
    """Two strokes of decaying partials, one second apart, in the middle."""
    t = np.arange(round(SECONDS * RATE)) / RATE
    ring = np.zeros_like(t)
    for k in (1.0, 2.76, 5.4):
        ring += np.sin(2 * np.pi * hertz * k * (t % 1.0)) * np.exp(-(3 + k) * (t % 1.0)) / k
    return Sound(_sixteen_bits(np.stack([0.3 * ring] * 2)), RATE)


def _sixteen_bits(samples: NDArray[np.float64]) -> NDArray[np.float32]:
    """To multiples of 2^-15: another machine's sine may end on another last bit, and is rounded to the same value."""
    return (np.round(samples * 2**15) / 2**15).astype(np.float32)


PROMPTS = {
    "t2va-bounce": "a red ball bounces in the middle on a light background and a middle bell rings at every bounce.",
    "t2va-slide": "a blue square slides from left to right with a low hum while it moves.",
    "t2va-orbit": "a green triangle circles on the left against a dark background, with a high click at every turn.",
    "t2va-appear": "suddenly a yellow ball appears on the right on a grey background and a high bell is heard.",
    "fl2va-first": "the red ball slides to the right with a low buzz as it moves.",
    "fl2va-both": "from <Picture 1> to <Picture 2>, the red ball slides from left to right.",
    "fl2va-last": "the red ball ends on the right and a low bell rings.",
    "ref2va-picture-sound": "the ball of <Picture 1> bounces and the sound of <Audio 1> is heard at every bounce.",
    "ref2va-clip": "the ball of <Video 1> slides to the left with its hum.",
}


def frozen_requests() -> tuple[Named, ...]:
    """Nine requests, nine seeds from 11 on, all three tasks; 50 steps and every other value at its default."""
    first, last = Keyframe(picture(RED, 0.3)), Keyframe(picture(RED, 0.7), -1)
    # five seconds are said where a sound would otherwise set the length
    given: dict[str, dict[str, Any]] = {
        "fl2va-first": {"keyframes": (first,)},
        "fl2va-both": {"keyframes": (first, last)},
        "fl2va-last": {"keyframes": (last,)},
        "ref2va-picture-sound": {
            "references": (Reference("image", picture(GREEN, 0.5)), Reference("audio", bell())),
            "duration": 5.0,
        },
        "ref2va-clip": {"references": (Reference("video", clip()),), "duration": 5.0},
    }
    return tuple(
        Named(name, Request(prompt, seed=FIRST_SEED + i, **given.get(name, {})))
        for i, (name, prompt) in enumerate(PROMPTS.items())
    )


def more_seeds(count: int) -> tuple[Named, ...]:
    """`count` further requests: the text prompts in turn, with seeds from 1000 on. Raises RequestError."""
    if not 0 <= count <= MOST_SEEDS:
        raise RequestError("more_seeds", f"got {count}; from 0 to {MOST_SEEDS}")
    text = [named for named in frozen_requests() if named.request.resolved_task == "t2va"]
    made = []
    for i in range(count):
        named, seed = text[i % len(text)], EXTRA_SEED + i
        made.append(Named(f"{named.name}-{seed}", replace(named.request, seed=seed)))
    return tuple(made)


def short(requests: Sequence[Named], steps: int | None, duration: float | None) -> tuple[Named, ...]:
    """The same with other steps or another duration, for quick checks; figures of such runs are not the frozen ones."""
    changes: dict[str, Any] = {
        key: value for key, value in (("steps", steps), ("duration", duration)) if value is not None
    }
    return tuple(replace(named, request=replace(named.request, **changes)) for named in requests)
