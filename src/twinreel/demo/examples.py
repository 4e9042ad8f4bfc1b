"""Requests that need nothing from their person: one of each task, in the world of the bundled miniature.

Provenance: the sentences are of `captions.py`, and every pixel and sample is computed by `render.py` and `sounds.py`; no
photograph, no recording and no other person's work is in them. They are in the public domain (CC0).
"""

from __future__ import annotations

from ..request import Keyframe, Reference, Request
from ..sources import Picture, Sound
from .data import REFERENCE_SECONDS
from .scenes import RATE, caption, render_reference_image, render_reference_sound, render_video, sample_scene


def example(name: str) -> Request:
    """The request called `t2va` (a sentence), `fl2va` (with its first frame) or `ref2va` (with a picture and a sound)."""
    if name == "t2va":
        return Request("a red ball bounces and a low bell rings at every bounce", seed=4)
    if name == "fl2va":
        scene = sample_scene(4, motion="slide", sound="hum", count=1)
        first = Keyframe(Picture(render_video([scene], "cpu", frames=1)[0, 0].numpy()))
        return Request(caption(scene, 0, first=True).text, keyframes=(first,))
    assert name == "ref2va", name
    scene = sample_scene(12, motion="bounce", sound="bell", count=1)
    thing = scene.things[0]
    sound = Sound(render_reference_sound(thing, seconds=REFERENCE_SECONDS).numpy(), RATE)
    references = Reference("image", Picture(render_reference_image(thing).numpy())), Reference("audio", sound)
    return Request(caption(scene, 0, picture=True, audio=True).text, references=references, duration=5.0)
