"""Pictures through Pillow: first frame, sRGB, over white, upright, eight bits."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from ..errors import RequestError
from ..sources import Picture
from .addresses import PICTURE, Opened

MOST_PIXELS = 2**27  # decoded, 400 MB
ORIENTATION = 0x0112
# EXIF value: what brings the stored picture upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# what Pillow's readers raise for bytes that are no picture of their kind
_UNREADABLE = (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, EOFError, TypeError, AttributeError,
               RuntimeError, MemoryError, struct.error, zlib.error)  # fmt: skip


def read_picture(opened: Opened, field: str) -> Picture:
    """The picture in an open file. Raises RequestError."""
    if opened.family != PICTURE:
        raise RequestError(field, f"{opened.label} is {opened.what}; a PNG or JPEG picture is needed")
    Image.init()
    if opened.demuxer not in Image.OPEN:
        raise RequestError(
            field, f"{opened.label} is {opened.what}, which this Pillow does not read; save it as PNG or JPEG"
        )
    with _quiet(), _refusing(field, f"{opened.label} is {opened.what}"):
        # one format and not all: the kind was judged by content, and the fewer readers the better
        with Image.open(opened.stream, formats=[str(opened.demuxer)]) as image:
            return picture_of(image, field)


def picture_of(image: Image.Image, field: str) -> Picture:
    """A Pillow image, in memory or half read, as a Picture; what was changed is in its notes. Raises RequestError."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise RequestError(field, f"is a picture of {width}x{height}; at most {MOST_PIXELS:,} pixels, so scale it down")
    with _refusing(field, "is a picture"):
        notes = _frame_notes(image)
        # before the orientation is asked for: Pillow turns a TIFF itself while loading
        image.load()
        orientation = _orientation(image, notes)
        profile = image.info.get("icc_profile")
        image, alpha = _colour_and_alpha(image)
        image = _srgb(image, profile, notes)
        if alpha is not None and alpha.getextrema() != (255, 255):
            white = Image.new("RGB", image.size, "white")
            image = Image.composite(image, white, alpha)
            notes.append("transparency is laid over white")
        if orientation in _UPRIGHT:
            image = image.transpose(_UPRIGHT[orientation])
            notes.append("turned upright by its EXIF orientation")
        return Picture(np.array(image, np.uint8), tuple(f"{field}: {note}" for note in notes))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Pillow's warning on large pictures: the limit here is another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _refusing(field: str, what: str) -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError as error:
        raise RequestError(field, f"{what} that is too large ({error}); scale it down") from None
    except UnidentifiedImageError:
        raise RequestError(field, f"{what} that cannot be read (its header is broken); copy it again") from None
    except _UNREADABLE as error:
        raise RequestError(field, f"{what} that cannot be read ({error}); if truncated, copy it again") from None


def _frame_notes(image: Image.Image) -> list[str]:
    count = getattr(image, "n_frames", 1)
    # a camera's MPO holds previews of the same picture
    return [f"has {count} frames, the first is used"] if count > 1 and image.format != "MPO" else []


def _orientation(image: Image.Image, notes: list[str]) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except _UNREADABLE:
        notes.append("its EXIF data cannot be read, so its orientation is taken as upright")
        return 1


def _colour_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """(L, RGB or CMYK, the mask of what is opaque or None)."""
    if image.mode.startswith(("I", "F")):
        return _eight_bits(image)
    alpha = None
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    if image.mode == "1":
        image = image.convert("L")
    return (image if image.mode in ("L", "RGB", "CMYK") else image.convert("RGB")), alpha


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey of 16 bits scaled, where Pillow's own conversion would clip at 255; floats are taken as [0, 1]."""
    values = np.asarray(image, dtype=np.float64)
    top = 1.0 if image.mode == "F" else 65535.0
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= top):
        raise ValueError(f"grey values of mode {image.mode} outside 0 to {top:g}")
    clear = image.info.get("transparency")
    alpha = None if clear is None else Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
    return Image.fromarray(np.round(values * (255.0 / top)).astype(np.uint8)), alpha


def _srgb(image: Image.Image, profile: bytes | None, notes: list[str]) -> Image.Image:
    """`image` in sRGB by its ICC profile; without one grey and RGB are sRGB already and CMYK is taken as plain ink."""
    if not profile:
        if image.mode == "CMYK":
            notes.append("CMYK without a colour profile, its colours are approximate")
        return image.convert("RGB")
    try:
        transform: Any = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), image.mode, "RGB"
        )
        if _changes_nothing(transform, image.mode):
            return image.convert("RGB")
        converted = ImageCms.applyTransform(image, transform)
    except (ImageCms.PyCMSError, *_UNREADABLE):
        notes.append("its colour profile cannot be read, so it is taken as sRGB")
        return image.convert("RGB")
    assert converted is not None
    notes.append("its colour profile is converted to sRGB")
    return converted


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Whether a profile is sRGB by another writer: it moves no colour of a grid beyond rounding."""
    if mode not in ("L", "RGB"):
        return False
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    if mode == "L":
        grid = Image.fromarray(steps[None])
    else:
        grid = Image.fromarray(np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3))
    moved = ImageCms.applyTransform(grid, transform)
    before, after = np.asarray(grid.convert("RGB"), int), np.asarray(moved, int)
    return bool(np.abs(before - after).max() <= 2)
