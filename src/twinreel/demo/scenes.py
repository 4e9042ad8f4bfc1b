"""The public door of the demo's procedural world: scenes, captions, rendering and ground truth.

>>> scene = sample_scene(7)                       # 224 x 128, 124 frames
>>> render_video([scene], "cpu").shape            # uint8 [1, 124, 128, 224, 3]
>>> render_audio([scene], "cpu").shape            # float32 [1, 2, 165600]
>>> scene.captions[0], events(scene)
"""

from __future__ import annotations

from .captions import WORDS, Caption, caption, write_captions
from .render import render_reference_image, render_reference_images, render_video
from .sampling import sample_scene
from .sounds import render_audio, render_reference_sound
from .world import (
    BACKGROUNDS,
    CANVASES,
    COLORS,
    FPS,
    HERTZ,
    HOP,
    LENGTHS,
    MOTIONS,
    PITCHES,
    PLACES,
    RATE,
    SHAPES,
    SOUNDS,
    Event,
    Scene,
    Thing,
    events,
)

__all__ = [
    "BACKGROUNDS",
    "CANVASES",
    "COLORS",
    "FPS",
    "HERTZ",
    "HOP",
    "LENGTHS",
    "MOTIONS",
    "PITCHES",
    "PLACES",
    "RATE",
    "SHAPES",
    "SOUNDS",
    "WORDS",
    "Caption",
    "Event",
    "Scene",
    "Thing",
    "caption",
    "events",
    "render_audio",
    "render_reference_image",
    "render_reference_images",
    "render_reference_sound",
    "render_video",
    "sample_scene",
    "write_captions",
]
