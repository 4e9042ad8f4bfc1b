"""Pictures through Pillow: first frame, sRGB, over white, upright, eight bits."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from ..errors import RequestError
from ..sources import Picture
from .addresses import PICTURE, Opened

MOST_PIXELS = 2**26  # 8192 x 8192, as of a video: Pillow's copy and ours are 450 MB together
# These decoders hold a picture several times over.
MOST_PIXELS_OF = {"WEBP": 2**25, "AVIF": 2**25}
PIXELS_AT_ONCE = 2**20  # whose colours are settled together
ORIENTATION = 0x0112
SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # as profiles name them
# EXIF value: the picture as it was stored, as a view of the upright one
_STORED: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright),
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}
# what Pillow's readers raise for bytes that are no picture of their kind
UNREADABLE = (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, EOFError, TypeError, AttributeError,
              RuntimeError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError)  # fmt: skip


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
    notes: list[str] = []
    with _refusing(field, "is a picture"):
        _check_size(image, field, notes)
        notes += _frame_notes(image)
        # before the orientation is asked for: Pillow turns a TIFF itself while loading
        image.load()
        orientation = _orientation(image, notes)
        pixels = _pixels(image, orientation, notes)
    return Picture(pixels, tuple(f"{field}: {note}" for note in notes))


def _check_size(image: Image.Image, field: str, notes: list[str]) -> None:
    """Refuse what is too large to decode. A large photograph is decoded at half its size, where that is possible."""
    width, height = image.size
    most = MOST_PIXELS_OF.get(str(image.format), MOST_PIXELS)
    # a progressive JPEG is held whole before it is made smaller; other formats than JPEG have no draft
    if width * height > most and not image.info.get("progressive"):
        if image.draft(None, (width // 2, height // 2)):  # type: ignore[no-untyped-call]
            notes.append(f"is a picture of {width}x{height}, more than {most:,} pixels, and is read at half its size")
    if image.width * image.height > most:
        raise RequestError(field, f"is a picture of {width}x{height}; at most {most:,} pixels, so scale it down")


def _pixels(image: Image.Image, orientation: int, notes: list[str]) -> NDArray[np.uint8]:
    """uint8 `[H, W, 3]` of a loaded image, upright, in bands, so that no second copy of the whole is made on the way."""
    width, height = image.size
    turned = orientation in _STORED and orientation >= 5
    pixels = np.empty((width, height, 3) if turned else (height, width, 3), np.uint8)
    stored = _STORED[orientation](pixels) if orientation in _STORED else pixels
    rows = max(1, PIXELS_AT_ONCE // width)
    found: dict[str, None] = {}
    to_srgb: Callable[[Image.Image], Image.Image] | None = None
    for top in range(0, height, rows):
        band, alpha = _colour_and_alpha(image.crop((0, top, width, min(height, top + rows))))
        if to_srgb is None:
            to_srgb = _to_srgb(band.mode, image.info.get("icc_profile"), notes)
        band = to_srgb(band)
        if alpha is not None and alpha.getextrema() != (255, 255):
            band = Image.composite(band, Image.new("RGB", band.size, "white"), alpha)
            found["transparency is laid over white"] = None
        stored[top : top + rows] = np.asarray(band)
    notes += found
    if orientation in _STORED:
        notes.append("turned upright by its EXIF orientation")
    return pixels


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
    except Image.DecompressionBombError:
        raise RequestError(
            field, f"{what} that is too large; at most {MOST_PIXELS:,} pixels, so scale it down"
        ) from None
    except UnidentifiedImageError:
        raise RequestError(field, f"{what} that cannot be read (its header is broken); copy it again") from None
    except UNREADABLE as error:
        raise RequestError(field, f"{what} that cannot be read ({error}); if truncated, copy it again") from None


def _frame_notes(image: Image.Image) -> list[str]:
    count = getattr(image, "n_frames", 1)
    # a camera's MPO holds previews of the same picture
    return [f"has {count} frames, the first is used"] if count > 1 and image.format != "MPO" else []


def _orientation(image: Image.Image, notes: list[str]) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except UNREADABLE:
        notes.append("its EXIF data cannot be read, so its orientation is taken as upright")
        return 1


def _colour_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """(L, RGB or CMYK, the mask of what is opaque or None)."""
    if image.mode.startswith(("I", "F")):
        return _eight_bits(image)
    alpha = None
    grey = image.mode in ("1", "L", "LA", "La")  # and stays so: a profile is for the colours as they are stored
    if image.has_transparency_data:
        image = image.convert("LA" if grey else "RGBA")
        alpha = image.getchannel("A")
    mode = "L" if grey else "CMYK" if image.mode == "CMYK" else "RGB"
    return (image if image.mode == mode else image.convert(mode)), alpha


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey of 16 bits scaled, where Pillow's own conversion would clip at 255; floats are taken as [0, 1]."""
    values = np.asarray(image, dtype=np.float64)
    top = 1.0 if image.mode == "F" else 65535.0
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= top):
        raise ValueError(f"grey values of mode {image.mode} outside 0 to {top:g}")
    clear = image.info.get("transparency")
    alpha = None if clear is None else Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8))
    return Image.fromarray(np.round(values * (255.0 / top)).astype(np.uint8)), alpha


def _to_srgb(mode: str, profile: bytes | None, notes: list[str]) -> Callable[[Image.Image], Image.Image]:
    """What brings an image of `mode` to sRGB by an ICC profile; without one grey and RGB are sRGB already and CMYK is
    taken as plain ink."""

    def plain(image: Image.Image) -> Image.Image:
        return image.convert("RGB")

    def by_profile(image: Image.Image) -> Image.Image:
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None
        return converted

    if not profile:
        if mode == "CMYK":
            notes.append("CMYK without a colour profile, its colours are approximate")
        return plain
    why = "cannot be read"
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space.strip()
        if space != SPACES[mode] and space.isalnum():
            why = f"is for {space} and not for {SPACES[mode]}"
        transform: Any = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
        by_profile(Image.new(mode, (1, 1)))
        if _changes_nothing(transform, mode):
            return plain
    except (ImageCms.PyCMSError, *UNREADABLE):
        notes.append(f"its colour profile {why}, so it is taken as sRGB")
        return plain
    notes.append("its colour profile is converted to sRGB")
    return by_profile


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
