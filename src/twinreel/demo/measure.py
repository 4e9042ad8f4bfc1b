"""Scores of generated pixels and sound against the scene that was asked for: what issue-level figures are made of.

Nothing here looks at latents or calls the renderer. On 620 rendered scenes every measure is right, and an onset is
found 0.4 ms (median) before the contact; blur of 2 px and noise change neither (`tests/test_measure.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .hearing import Heard, listen
from .seeing import Seen, look
from .world import FPS, PLACE_BOUNDS, PLACES, Scene, Thing, events, pan_of

AGREE = 0.15  # stereo position: the largest median distance between where a thing is seen and where it is heard
PAIRED = 0.5  # seconds: a contact and an onset further apart than this have nothing to do with each other
STATED = ("color", "shape", "motion", "sound", "pitch", "place")

__all__ = ["Heard", "Seen", "listen", "look", "psnr", "score", "summarise", "synchrony"]


def score(
    scene: Scene, video: Tensor | np.ndarray, audio: Tensor | np.ndarray, says: Collection[str] | None = None
) -> dict[str, Any]:
    """Measure frames uint8 [F, H, W, 3] and a waveform float [2, n] against `scene`.

    Booleans: color, shape, motion, place, count of things; sound kind, pitch word, side (the heard place or direction),
    agrees (heard where it is seen), hertz (within 1 % of the scene's). Floats: hertz_ratio; offset_ms, the median of
    onset minus contact. `offsets`: those of every contact in seconds; `missed`: contacts without an onset.
    `says` (see `Caption.says`) leaves out what the sentence does not state. What does not apply is absent.
    """
    seen, heard = look(video), listen(audio)
    thing = scene.things[0]
    pairs = match(scene, seen)
    result: dict[str, Any] = {
        "color": all(s is not None and s.color == t.color for t, s in pairs),
        "shape": all(s is not None and s.shape == t.shape for t, s in pairs),
        "motion": all(s is not None and s.motion == t.motion for t, s in pairs),
        "place": all(s is not None and s.place == t.place for t, s in pairs),
        "count": len(seen) == len(scene.things),
        "sound": heard.kind == thing.sound,
    }
    if thing.sound != "none":
        result |= _score_sound(thing, pairs[0][1], heard, scene.width)
    if thing.motion == "bounce" and thing.sound != "none":
        contacts = pairs[0][1].contacts if pairs[0][1] is not None else ()
        offsets = synchrony(contacts, heard.onsets)
        result["offsets"] = offsets
        result["missed"] = float(len(contacts) - len(offsets)) if contacts else float(len(events(scene)))
        if offsets:
            result["offset_ms"] = 1000 * float(np.median(offsets))
    if says is None:
        return result
    unsaid = (
        set(STATED) - set(says) | (set() if "place" in says else {"side"}) | (set() if "pitch" in says else {"hertz"})
    )
    if thing.motion == "slide":  # its direction is always said
        unsaid -= {"place", "side"}
    return {name: value for name, value in result.items() if name not in unsaid}


def _score_sound(thing: Thing, seen: Seen | None, heard: Heard, width: int) -> dict[str, Any]:
    ratio = heard.hertz / thing.hertz
    result: dict[str, Any] = {
        "pitch": heard.pitch == thing.pitch,
        "hertz": abs(ratio - 1) < 0.01,
        "hertz_ratio": ratio,
        "side": heard_side(heard, thing.motion) == thing.place,
    }
    if seen is not None:
        result["agrees"] = _agrees(seen, heard, width)
    return result


def match(scene: Scene, seen: Sequence[Seen]) -> list[tuple[Thing, Seen | None]]:
    """Each thing of the scene with what was seen of it: the same colour if there is one, else the largest one left."""
    left = list(seen)
    found: dict[int, Seen] = {}
    for exact in (True, False):
        for i, thing in enumerate(scene.things):
            fits = [s for s in left if s.color == thing.color or not exact]
            if i not in found and fits:
                found[i] = fits[0]
                left = [s for s in left if s is not fits[0]]
    return [(thing, found.get(i)) for i, thing in enumerate(scene.things)]


def heard_side(heard: Heard, motion: str) -> str:
    """The heard place word: of an orbit its middle, of a slide the side from which the sound comes."""
    if len(heard.pans) < 6 or motion not in ("slide", "orbit"):
        return heard.side
    if motion == "orbit":
        # Half way between the extremes: the median leans to the side of an unfinished turn.
        middle = float(np.percentile(heard.pans, 4) + np.percentile(heard.pans, 96)) / 2
        return PLACES[sum(0.125 + 0.75 * middle > bound for bound in PLACE_BOUNDS)]
    third = len(heard.pans) // 3
    return "left" if np.median(heard.pans[-third:]) > np.median(heard.pans[:third]) else "right"


def _agrees(seen: Seen, heard: Heard, width: int) -> bool:
    """Whether the sound is where its thing is, at the median of the times at which it can be told."""
    at = np.clip(np.round(heard.pan_times * FPS).astype(int), 0, len(seen.x) - 1)
    there = seen.visible[at]
    if not there.any():
        return False
    apart = [abs(pan - pan_of(float(x), width)) for pan, x in zip(heard.pans[there], seen.x[at[there]], strict=True)]
    return bool(np.median(apart) < AGREE)


def synchrony(contacts: Sequence[float], onsets: Sequence[float]) -> tuple[float, ...]:
    """Seconds from each seen contact to its nearest heard onset (positive: heard late), where one is near enough."""
    if not len(onsets):
        return ()
    nearest = [min((onset - contact for onset in onsets), key=abs) for contact in contacts]
    return tuple(offset for offset in nearest if abs(offset) < PAIRED)


def psnr(one: Tensor | np.ndarray, other: Tensor | np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 arrays of one shape, such as a frame and its keyframe."""
    apart = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    return float(10 * np.log10(255**2 / max(np.square(apart).mean(), 1e-12)))


def summarise(scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the booleans over the scores that have them, and synchrony over all contacts.

    offset_median_ms (signed), offset_abs_median_ms, offset_abs_p90_ms, contacts, missed, scenes.
    """
    result: dict[str, float] = {"scenes": float(len(scores))}
    names = {name: None for one in scores for name, value in one.items() if isinstance(value, (bool, np.bool_))}
    for name in names:
        values = [one[name] for one in scores if name in one]
        result[name] = sum(map(bool, values)) / len(values)
    offsets = np.array([offset for one in scores for offset in one.get("offsets", ())])
    result["contacts"] = float(len(offsets))
    result["missed"] = sum(one.get("missed", 0.0) for one in scores)
    if len(offsets):
        result["offset_median_ms"] = 1000 * float(np.median(offsets))
        result["offset_abs_median_ms"] = 1000 * float(np.median(np.abs(offsets)))
        result["offset_abs_p90_ms"] = 1000 * float(np.percentile(np.abs(offsets), 90))
    return result
