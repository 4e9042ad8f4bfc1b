"""The demo's little world: what a scene is, how one is drawn from a seed, where its things are, and what sounds when.

Lengths are pixels (x to the right, y downwards, pixel centres at half-integers), times are seconds from the first
frame. A thing's `size` is its half extent. Everything here is Python numbers or float64, so that a seed means the same
scene on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FPS = 24
RATE = 32_000
HOP = 800

# Hues are at least 26 degrees apart; every colour's chroma (largest minus smallest channel) is at least 160 of 255.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (225, 30, 30),
    "orange": (250, 132, 20),
    "yellow": (240, 222, 30),
    "green": (35, 185, 52),
    "cyan": (30, 208, 218),
    "blue": (40, 70, 235),
    "purple": (135, 40, 215),
    "pink": (250, 85, 180),
}
SHAPES = ("ball", "square", "triangle")
MOTIONS = ("bounce", "slide", "orbit", "appear", "rest")
PLACES = ("left", "middle", "right")
PITCHES = ("low", "middle", "high")
SOUNDS = ("bell", "click", "buzz", "hum", "none")
BACKGROUNDS: dict[str, int] = {"dark": 26, "grey": 112, "light": 222}
# An audio latent is 1/40 s. Every frequency is a multiple of 40 Hz and what sounds happens on the latents' grid, so a
# tone looks the same in every latent: what is left to learn is which tone, how loud, and when.
GRID = RATE // HOP
# Hertz of low, middle, high; neighbours are a factor of at least 2.2 apart.
HERTZ: dict[str, tuple[float, float, float]] = {
    "bell": (320.0, 720.0, 1640.0),
    "click": (520.0, 1200.0, 2880.0),
    "buzz": (120.0, 280.0, 640.0),
    "hum": (120.0, 280.0, 640.0),
}
SOUNDS_OF: dict[str, tuple[str, ...]] = {
    "bounce": ("bell", "click"),
    "slide": ("buzz", "hum"),
    "orbit": ("click", "hum"),
    "appear": ("bell",),
    "rest": ("none",),
}
PLACE_BOUNDS = (0.365, 0.635)
CANVASES = ((224, 128), (128, 128), (128, 224))
LENGTHS = (107, 124, 158)
MAX_THINGS = 2


@dataclass(frozen=True)
class Thing:
    """One coloured shape, its motion and its sound. Events fall on multiples of 1/40 s; an appearance on one of
    1/4 s, which is on the frames' grid too.

    bounce: rests on the floor with its centre at (`x`, `y`) at the contacts `start + k * period`, rises by `reach`.
    slide: from `x` at `start` to `end_x` at `stop`, still before and after.
    orbit: circle of radius `reach` around (`x`, `y`), angle `2 pi (turn * t / period + phase)` from +x towards +y.
    appear: at (`x`, `y`) from `start` (on the frame grid) to the end. rest: there all the time.
    `hertz` is the sound's fundamental (0 when `sound` is "none"); `pitch` its word ("" then). `place` is the word of
    `x` ("left", "middle", "right"); for a slide the side it starts from.
    """

    shape: str
    color: str
    size: float
    motion: str
    place: str
    x: float
    y: float
    sound: str = "none"
    pitch: str = ""
    hertz: float = 0.0
    start: float = 0.0
    stop: float = 0.0
    period: float = 1.0
    reach: float = 0.0
    turn: int = 1
    phase: float = 0.0
    end_x: float = 0.0

    @property
    def rgb(self) -> tuple[int, int, int]:
        """The colour's sRGB bytes."""
        return COLORS[self.color]


@dataclass(frozen=True)
class Scene:
    """One or two things on a canvas; `captions` are three sentences for it (see `captions.py` for the other tasks).

    `shade` is the background's grey level (0..255), `grade` the level difference from top to bottom, `floor` the y of
    the floor's upper edge (equal to `height` where none is drawn).
    """

    seed: int
    things: tuple[Thing, ...]
    background: str
    shade: float
    grade: float
    floor: float
    width: int
    height: int
    frames: int
    captions: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return self.frames / FPS

    @property
    def audio_latents(self) -> int:
        """A = round(frames / 24 * 40), the audio's length in hops of 800 samples."""
        return round(self.frames / FPS * 40)

    @property
    def samples(self) -> int:
        """Samples a channel: 800 A."""
        return HOP * self.audio_latents


class Event(NamedTuple):
    """Something that happens: `kind` is bounce, turn, appear, start or stop; `pitch` in hertz, 0 for a silent thing."""

    time: float
    kind: str
    x: float
    pitch: float
    thing: int
    sound: str


def pan_of(x: float, width: int) -> float:
    """Stereo position 0 (left) .. 1 (right) of a horizontal position; the middle three quarters span the range."""
    return min(max((x / width - 0.125) / 0.75, 0.0), 1.0)


def place_of(x: float, width: int) -> str:
    """The place word of a horizontal position."""
    return PLACES[sum(x / width > bound for bound in PLACE_BOUNDS)]


def thing_events(scene: Scene, index: int) -> list[Event]:
    """The events of one thing in order of time, inside the video."""
    thing = scene.things[index]

    def event(time: float, kind: str, x: float) -> Event:
        return Event(time, kind, x, thing.hertz, index, thing.sound)

    if thing.motion == "slide":
        return [event(thing.start, "start", thing.x), event(thing.stop, "stop", thing.end_x)]
    if thing.motion == "appear":
        return [event(thing.start, "appear", thing.x)]
    if thing.motion not in ("bounce", "orbit"):
        return []
    # An orbit's event is its passage of the top, where the angle is three quarters of a turn.
    first = thing.start if thing.motion == "bounce" else (0.75 - thing.phase) * thing.turn * thing.period
    first -= math.floor(first / thing.period) * thing.period
    kind = "bounce" if thing.motion == "bounce" else "turn"
    count = math.ceil((scene.seconds - first) / thing.period)
    return [event(first + k * thing.period, kind, thing.x) for k in range(count)]


def events(scene: Scene) -> list[Event]:
    """Ground truth: every event of the scene in order of time."""
    return sorted(event for index in range(len(scene.things)) for event in thing_events(scene, index))


def columns(scenes: Sequence[Scene], index: int, device: torch.device | str) -> dict[str, Tensor]:
    """Numbers of every scene's thing `index` as float64 [B, 1] columns, `motion` as int64 and `there` as a mask."""
    things = [scene.things[index] if index < len(scene.things) else None for scene in scenes]
    names = ("size", "x", "y", "start", "stop", "period", "reach", "turn", "phase", "end_x", "hertz")
    rows = [[float(getattr(t, n)) if t else 1.0 for n in names] for t in things]
    table = torch.tensor(rows, dtype=torch.float64).to(device)
    found = {name: table[:, i : i + 1] for i, name in enumerate(names)}
    motion = [[MOTIONS.index(t.motion) if t else MOTIONS.index("rest")] for t in things]
    found["motion"] = torch.tensor(motion).to(device)
    found["there"] = torch.tensor([[t is not None] for t in things]).to(device)
    return found


def positions(at: dict[str, Tensor], t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre x, y (float64 [B, F]) and visibility (bool [B, F]) of `columns` at times `t`, float64 [F] or [B, F]."""
    motion = at["motion"]
    since = (t - at["start"]) / at["period"]
    part = since - since.floor()
    rise = torch.where(motion == MOTIONS.index("bounce"), 4 * at["reach"] * part * (1 - part), 0.0)
    done = ((t - at["start"]) / (at["stop"] - at["start"]).clamp(min=1e-3)).clamp(0, 1)
    move = torch.where(motion == MOTIONS.index("slide"), (at["end_x"] - at["x"]) * done, 0.0)
    angle = 2 * math.pi * (at["turn"] * t / at["period"] + at["phase"])
    circle = torch.where(motion == MOTIONS.index("orbit"), at["reach"], 0.0)
    seen = at["there"] & ((motion != MOTIONS.index("appear")) | (t > at["start"] - 1e-6))
    return at["x"] + move + circle * angle.cos(), at["y"] - rise + circle * angle.sin(), seen
