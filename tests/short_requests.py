"""A short request of each task, with media, for runs of the tiny checkpoints on a device."""

from __future__ import annotations

import numpy as np

from twinreel import Clip, Keyframe, Picture, Reference, Request, Sound

RNG = np.random.default_rng(2)
PICTURE = Picture(RNG.integers(0, 256, (70, 100, 3), dtype=np.uint8))
SOUND = Sound((0.1 * RNG.standard_normal((2, 16_000))).astype(np.float32), 32_000)
CLIP = Clip(RNG.integers(0, 256, (24, 64, 64, 3), dtype=np.uint8), 24.0, SOUND)
SHORT = {"steps": 4, "duration": 0.9}
ALL = {
    "t2va": Request("A cat plays piano.", **SHORT),
    "fl2va": Request("The sea.", keyframes=(Keyframe(PICTURE), Keyframe(PICTURE, -1)), **SHORT),
    "ref2va": Request("<Picture 1>.", references=(Reference("image", PICTURE), Reference("video", CLIP)), **SHORT),
}
