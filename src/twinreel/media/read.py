"""What people give, read into `Picture`, `Clip` and `Sound`: files through `pictures` and `containers`, values here.

Frames come on the 24 fps slots of SPEC 4.5 and on the canvas of their own shape, resized one by one while decoding, so
that memory grows with the limit and not with the file. Nothing is cut silently: see `cut` and `notes` of the values.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import RequestError
from ..limits import clip_frames, shown
from ..request import Keyframe, Reference, Request
from ..sources import Clip, Picture, Prepared, Sound, Source
from ..spec import FPS, Spec
from .addresses import MEDIA, PICTURE, Opened, open_address
from .containers import read_clip, read_sound
from .fit import prepare
from .pictures import picture_of, read_picture
from .slots import FrameSlots, Window
from .soundtrack import check_level, check_rate

__all__ = ["Prepared", "Tell", "prepare", "read_source", "read_sources"]

Tell = Callable[[int, int, str], None]  # done, of how many, what
SLOWEST, FASTEST = 0.01, 1_000_000  # frames per second of a clip in memory


def read_source(
    item: Keyframe | Reference, spec: Spec, max_frames: int, where: str = "source", *, look: bool = False
) -> Source:
    """Read one keyframe or reference.

    Args:
        item: its medium is a path, `file:` or `data:` address, PIL image, array, `Picture`, `Clip` or `Sound`.
        spec: gives the canvas rule of a clip's own shape.
        max_frames: decoding stops after this many frames at 24 fps, or after as many seconds of sound.
        where: the item's place in the request, `references[2]`; errors name `references[2].source`.
        look: for plans: the same but for pixels of files, which are not kept and must not be looked at.

    Returns:
        Picture (uint8 `[H, W, 3]`), Clip (uint8 `[n, H, W, 3]` at 24 fps on its own canvas) or Sound (float32 `[c, n]`
        at its native rate), by the kind of the item.

    Raises RequestError: what was found and what to do.
    """
    if isinstance(item, Keyframe) or item.kind == "image":
        source, name = (item.image, "image") if isinstance(item, Keyframe) else (item.source, "source")
        picture = _picture(source, f"{where}.{name}")
        if look:
            return dataclasses.replace(picture, pixels=np.broadcast_to(np.uint8(0), picture.pixels.shape))
        return picture
    field = f"{where}.source"
    window = Window(item.start, item.end, max_frames, where, look)
    if item.kind == "audio":
        return _sound(item.source, field, window)
    clip = _clip(item.source, field, spec, window)
    if item.kind == "video_audio" and clip.sound is None:
        raise RequestError(field, "has no soundtrack, which kind video_audio needs; use kind video, or add one")
    return clip


def read_sources(request: Request, spec: Spec, tell: Tell | None = None, *, look: bool = False) -> list[Source]:
    """`read_source` of a request's media in order, keyframes before references; `tell` hears of each."""
    items: list[tuple[str, Keyframe | Reference]] = [(f"keyframes[{i}]", k) for i, k in enumerate(request.keyframes)]
    items += [(f"references[{i}]", item) for i, item in enumerate(request.references)]
    most = int(clip_frames(spec).high)
    sources: list[Source] = []
    for i, (where, item) in enumerate(items):
        if tell is not None:
            tell(i, len(items), where)
        sources.append(read_source(item, spec, most, where, look=look))
    if tell is not None and items:
        tell(len(items), len(items), items[-1][0])
    return sources


# --- pictures ---------------------------------------------------------------------------------------------------------


def _picture(source: Any, field: str) -> Picture:
    if isinstance(source, Picture):
        return dataclasses.replace(source, pixels=_bytes_of(_checked_array(source.pixels, field, 3), field))
    if isinstance(source, np.ndarray):
        return Picture(_bytes_of(_checked_array(source, field, 3), field))
    if isinstance(source, Image.Image):
        return picture_of(source, field)
    opened = _opened(source, field, "a picture: a path, an address, a PIL image, an array or a Picture")
    with opened.stream:
        return read_picture(opened, field)


def _checked_array(array: Any, field: str, ndim: int) -> NDArray[Any]:
    """An RGB array of `ndim` axes whose dtype `_bytes_of` takes."""
    shape = "[H, W, 3]" if ndim == 3 else "[n, H, W, 3]"
    if not isinstance(array, np.ndarray):
        raise RequestError(field, f"got {type(array).__name__}; an RGB array {shape} is needed")
    if array.ndim != ndim or array.shape[-1] != 3 or 0 in array.shape:
        raise RequestError(field, f"array of shape {list(array.shape)}; an RGB array {shape} is needed")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise RequestError(field, f"pixels of dtype {array.dtype}; uint8, or floats in [0, 1], are needed")
    return array


def _bytes_of(pixels: NDArray[Any], field: str) -> NDArray[np.uint8]:
    """uint8 of uint8, or of floats in [0, 1] by round-half-even of 255x (SPEC 4.5)."""
    if pixels.dtype == np.uint8:
        return pixels
    if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
        raise RequestError(field, "float pixels outside [0, 1]; scale them, or give uint8")
    return np.round(pixels * 255.0).astype(np.uint8)


# --- clips and sounds -------------------------------------------------------------------------------------------------


def _clip(source: Any, field: str, spec: Spec, window: Window) -> Clip:
    if isinstance(source, Clip):
        return _clip_in_memory(source, field, spec, window)
    if isinstance(source, np.ndarray):
        raise RequestError(field, "an array has no frame rate; give Clip(frames, fps, sound)")
    opened = _opened(source, field, "a video: a path, an address or a Clip")
    with opened.stream:
        _need_media(opened, field, "a video such as MP4")
        return read_clip(opened, field, spec, window)


def _sound(source: Any, field: str, window: Window) -> Sound:
    if isinstance(source, Sound):
        sound = _sound_in_memory(source, field, window)
        if sound.samples.shape[1] == 0:
            raise window.refuse_late_start(field, source.seconds)
        return sound
    if isinstance(source, np.ndarray):
        raise RequestError(field, "an array has no sample rate; give Sound(samples, rate)")
    opened = _opened(source, field, "a sound: a path, an address or a Sound")
    with opened.stream:
        _need_media(opened, field, "a sound such as WAV or MP3")
        return read_sound(opened, field, window)


def _clip_in_memory(clip: Clip, field: str, spec: Spec, window: Window) -> Clip:
    frames = _checked_array(clip.frames, field, 4)
    fps = clip.fps
    if isinstance(fps, bool) or not isinstance(fps, numbers.Real) or not SLOWEST <= fps <= FASTEST:
        why = f"a number of frames per second from {SLOWEST} to {FASTEST:,} is needed"
        raise RequestError(field, f"frame rate {shown(fps)}; {why}")
    sound = None if clip.sound is None else _sound_in_memory(clip.sound, field, window)
    # values are checked as they are converted, so a look converts them too
    slots = FrameSlots(frames.shape[2], frames.shape[1], field, spec, dataclasses.replace(window, look=False))
    # float64 and this order, not exact fractions: the oracle's slots for frames in memory
    scale = FPS / float(fps)
    for i in range(len(frames)):
        if slots.full:
            break
        slots.put(i * scale, lambda i=i: _bytes_of(frames[i], field))  # type: ignore[misc]
    slots.close(len(frames) * scale)
    notes = clip.notes + slots.notes + (() if fps == FPS else (f"{field}: {fps:g} fps brought to {FPS}",))
    if sound is not None and sound.samples.shape[1] == 0:
        sound, notes = None, (*notes, f"{field}: its soundtrack holds no samples here")
    return Clip(slots.frames(), float(FPS), sound, clip.cut or slots.cut, notes)


def _sound_in_memory(sound: Any, field: str, window: Window) -> Sound:
    samples = sound.samples if isinstance(sound, Sound) else sound
    if not isinstance(sound, Sound) or not isinstance(samples, np.ndarray):
        raise RequestError(field, f"got {type(samples).__name__} for a sound; give Sound(samples, rate) with an array")
    if samples.ndim != 2 or samples.shape[0] not in (1, 2):
        raise RequestError(field, f"samples of shape {list(samples.shape)}; mono [1, n] or stereo [2, n] is needed")
    if not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(field, f"samples of dtype {samples.dtype}; finite floats of full scale 1 are needed")
    check_level(samples, field)
    rate = sound.rate
    if isinstance(rate, bool) or not isinstance(rate, numbers.Integral) or rate <= 0:
        raise RequestError(field, f"sample rate {rate!r}; a positive whole number is needed")
    whole = dataclasses.replace(sound, samples=samples.astype(np.float32, copy=False), rate=int(rate))
    check_rate(whole.rate, field)
    return window.cut_sound(whole, field)


def _opened(source: Any, field: str, needed: str) -> Opened:
    if not isinstance(source, str | os.PathLike):
        raise RequestError(field, f"got {type(source).__name__}; give {needed}")
    return open_address(source, field)


def _need_media(opened: Opened, field: str, needed: str) -> None:
    if opened.family != MEDIA:
        hint = "; use kind image for a picture" if opened.family == PICTURE else ""
        raise RequestError(field, f"{opened.label} is {opened.what}; {needed} is needed{hint}")
