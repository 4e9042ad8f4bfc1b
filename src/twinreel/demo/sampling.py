"""A scene from a seed: which things, where, when, and how they sound. Plain Python numbers, the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from .captions import write_captions
from .world import (
    BACKGROUNDS,
    COLORS,
    HERTZ,
    PITCHES,
    PLACES,
    SHAPES,
    SOUNDS_OF,
    Scene,
    Thing,
    place_of,
)

FLOOR = 14  # px, height of the floor stripe
EDGE = 4  # px, kept free between a thing and the picture's edge
# Few rhythms, so that a small model gets them right: a bounce a second on one beat, a turn every two. All times are
# multiples of 1/40 s, an audio latent; what appears does so on a frame too.
BOUNCE, BEAT = 1.0, 0.7  # seconds: the period, and the first contact
PAIR_SHARE, SILENT_SHARE = 0.2, 0.04
CENTRES = {"left": (0.18, 0.28), "middle": (0.46, 0.54), "right": (0.72, 0.82)}


def sample_scene(
    seed: int,
    *,
    width: int = 224,
    height: int = 128,
    frames: int = 124,
    motion: str | None = None,
    sound: str | None = None,
    count: int | None = None,
) -> Scene:
    """The scene of `seed` on a canvas (multiples of 32 with a short edge of 128, for example), `frames` = 17 n + 5.

    `motion`, `sound` ("none" for silence) and `count` (1 or 2 things) narrow the draw. The second thing rests.
    Raises ValueError when a motion cannot sound so.
    """
    # A string seed: hashed by content, so neighbouring seeds share nothing.
    random = Random(f"{seed}-{width}-{height}-{frames}")
    background = random.choice(list(BACKGROUNDS))
    shade = BACKGROUNDS[background] + random.uniform(-8, 8)
    two = count == 2 if count is not None else random.random() < PAIR_SHARE
    motion = motion or random.choice(_motions(width, two))
    if sound is not None and sound != "none" and sound not in SOUNDS_OF[motion]:
        raise ValueError(f"a thing that does '{motion}' sounds like one of {SOUNDS_OF[motion]}, not '{sound}'")
    floored = motion in ("bounce", "slide")
    floor = height - FLOOR if floored else height
    scene = Scene(seed, (), background, shade, random.uniform(-14, 14), floor, width, height, frames)
    colors = random.sample(list(COLORS), 2)
    first = _place_thing(random, scene, colors[0], motion, two)
    things = [_give_sound(random, first, sound)]
    if two:
        things.append(_companion(random, scene, first, colors[1]))
    scene = replace(scene, things=tuple(things))
    return replace(scene, captions=write_captions(scene))


def _motions(width: int, two: bool) -> Sequence[str]:
    if not two:
        return ("bounce", "slide", "orbit", "appear")
    # A companion needs a part of the picture that the first thing never enters.
    return ("bounce", "orbit", "appear") if width >= 192 else ("bounce", "appear")


def _place_thing(random: Random, scene: Scene, color: str, motion: str, two: bool) -> Thing:
    short = min(scene.width, scene.height)
    size = random.uniform(0.128, 0.15 if motion == "orbit" else 0.16) * short
    places = ("left", "right") if two else PLACES
    thing = Thing(random.choice(SHAPES), color, size, motion, random.choice(places), 0.0, 0.0)
    return _MAKE[motion](random, scene, thing)


def _across(random: Random, scene: Scene, place: str, margin: float) -> float:
    """An x of the place word, `margin` px away from both edges."""
    low, high = CENTRES[place]
    x = random.uniform(low, high) * scene.width
    return min(max(x, margin), scene.width - margin)


def _bounce(random: Random, scene: Scene, thing: Thing) -> Thing:
    room = scene.floor - 2 * thing.size - EDGE
    reach = random.uniform(0.72, 1.0) * min(room, 90)
    x = _across(random, scene, thing.place, thing.size + EDGE)
    return replace(thing, x=x, y=scene.floor - thing.size, start=BEAT, period=BOUNCE, reach=reach)


def _slide(random: Random, scene: Scene, thing: Thing) -> Thing:
    margin = thing.size + EDGE
    ends = [margin + random.uniform(0, 6), scene.width - margin - random.uniform(0, 6)]
    leftward = random.random() < 0.5
    x, end_x = reversed(ends) if leftward else ends
    start = random.choice((0.5, 0.75, 1.0))
    stop = start + random.choice([length for length in (2.5, 3.0, 3.5) if start + length < scene.seconds - 0.3])
    place = "right" if leftward else "left"
    return replace(thing, place=place, x=x, y=scene.floor - thing.size, start=start, stop=stop, end_x=end_x)


def _orbit(random: Random, scene: Scene, thing: Thing) -> Thing:
    short = min(scene.width, scene.height)
    reach = random.uniform(0.22, 0.27) * short
    margin = reach + thing.size + EDGE
    x = _across(random, scene, thing.place, margin)
    y = scene.height / 2 + random.uniform(-0.5, 0.5) * max(scene.height - 2 * margin, 0)
    turn, period = random.choice((-1, 1)), 2.0
    top = random.randrange(8) / 4  # when it first passes there
    phase = (0.75 - turn * top / period) % 1.0
    return replace(thing, x=x, y=y, place=place_of(x, scene.width), reach=reach, turn=turn, period=period, phase=phase)


def _appear(random: Random, scene: Scene, thing: Thing) -> Thing:
    x = _across(random, scene, thing.place, thing.size + EDGE)
    y = random.uniform(0.35, 0.65) * scene.height
    start = random.randint(2, math.floor(0.55 * scene.seconds * 4)) / 4
    return replace(thing, x=x, y=y, start=start)


_MAKE: dict[str, Callable[[Random, Scene, Thing], Thing]] = {
    "bounce": _bounce,
    "slide": _slide,
    "orbit": _orbit,
    "appear": _appear,
}


def _give_sound(random: Random, thing: Thing, sound: str | None) -> Thing:
    chosen = sound or ("none" if random.random() < SILENT_SHARE else random.choice(SOUNDS_OF[thing.motion]))
    if chosen == "none":
        return thing
    pitch = random.choice(PITCHES)
    return replace(thing, sound=chosen, pitch=pitch, hertz=HERTZ[chosen][PITCHES.index(pitch)])


def _companion(random: Random, scene: Scene, first: Thing, color: str) -> Thing:
    """A still, silent thing in the side of the picture that the first one never enters."""
    size = random.uniform(0.128, 0.15) * min(scene.width, scene.height)
    place = "right" if first.place == "left" else "left"
    x = _across(random, scene, place, size + EDGE)
    y = scene.floor - size if scene.floor < scene.height else random.uniform(0.4, 0.6) * scene.height
    return Thing(random.choice(SHAPES), color, size, "rest", place, x, y)
