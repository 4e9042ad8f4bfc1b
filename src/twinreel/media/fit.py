"""Sources at the size, length and rate of the plan (SPEC 4.4, 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..sources import Clip, Picture, Prepared, Sound, Source
from .resample import resample
from .slots import resized

if TYPE_CHECKING:
    from ..plan import Condition, Plan


def prepare(plan: Plan, sources: Sequence[Source]) -> tuple[Prepared, ...]:
    """One `Prepared` for each of `plan.conditions`, in order; `sources` are what the plan was made from.

    A picture is `[1, H, W, 3]`; a clip has the `condition.frames` frames that the conditioner sees, of which the video
    VAE takes the first `condition.vae_frames`; a sound is stereo at 32 kHz.
    """
    return tuple(_prepare(condition, sources[condition.source]) for condition in plan.conditions)


def _prepare(condition: Condition, source: Source) -> Prepared:
    if isinstance(source, Sound):
        return Prepared(None, _waveform(condition, source))
    if isinstance(source, Picture):
        fit = cover if condition.cover else resized
        return Prepared(fit(source.pixels, condition.width, condition.height)[None], None)
    assert isinstance(source, Clip) and source.frames.shape[1:3] == (condition.height, condition.width)
    sound = _waveform(condition, source.sound) if source.sound is not None and condition.samples else None
    return Prepared(source.frames[: condition.frames], sound)


def cover(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """LANCZOS to the smallest size of the same shape that covers `width` x `height`, then the middle of it."""
    own_height, own_width = pixels.shape[:2]
    if (own_height, own_width) == (height, width):
        return pixels
    scale = max(width / own_width, height / own_height)
    large = max(width, round(own_width * scale)), max(height, round(own_height * scale))
    image = Image.fromarray(np.ascontiguousarray(pixels)).resize(large, Image.Resampling.LANCZOS)
    left, top = max(0, (large[0] - width) // 2), max(0, (large[1] - height) // 2)
    return np.asarray(image.crop((left, top, left + width, top + height)))


def _waveform(condition: Condition, sound: Sound) -> NDArray[np.float32]:
    """Cut at the native rate, mono doubled, and only then resampled once: the contract's order."""
    import torch

    samples = sound.samples[:, : condition.samples]
    stereo = np.repeat(samples, 2, axis=0) if samples.shape[0] == 1 else samples
    with torch.no_grad():
        return resample(torch.from_numpy(np.array(stereo, dtype=np.float32)), sound.rate).numpy()
