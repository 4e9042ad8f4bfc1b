"""Broken bytes: a small file of every kind, cut and flipped in many ways, is read or refused by name, and soon."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from media_files import flat, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.request import Reference
from twinreel.sources import Clip, Picture, Sound
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))
CASES = 40
VIDEOS = {
    "mp4": ("libx264", "aac", 90_000),
    "mov": ("mpeg4", "aac", 24),
    "mkv": ("libx264", "flac", 90_000),
    "webm": ("libvpx", "libopus", 1000),
    "avi": ("mpeg4", "mp2", 24),
    "ts": ("mpeg2video", "mp2", 24),
    "mpg": ("mpeg2video", "mp2", 24),
    "flv": ("flv", "aac", 1000),
    "wmv": ("wmv2", "wmav2", 24),
}
SOUNDS = {
    "wav": ("pcm_s16le", "s16"),
    "flac": ("flac", "s16"),
    "mp3": ("libmp3lame", "fltp"),
    "m4a": ("aac", "fltp"),
    "ogg": ("libopus", "flt"),
    "aac": ("aac", "fltp"),
    "aiff": ("pcm_s16be", "s16"),
}
PICTURES = ("png", "jpg", "gif", "webp", "bmp", "tiff", "avif")


def whole_file(folder: Path, suffix: str) -> bytes:
    path = folder / f"whole.{suffix}"
    if suffix in VIDEOS:
        codec, audio, ticks = VIDEOS[suffix]
        frames = [flat((30 + 10 * i, 60, 200 - 5 * i)) for i in range(8)]
        rate = 44_100 if audio == "wmav2" else 48_000
        write_mp4(path, frames, sound=tone(440, 0.3, rate, 2), rate=rate, codec=codec, audio=audio, ticks=ticks)
    elif suffix in SOUNDS:
        write_sound(path, tone(440, 0.3, 48_000, 2), 48_000, *SOUNDS[suffix])
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        frames = [Image.fromarray(np.roll(pixels, i)) for i in range(2)]
        options = {} if suffix in ("gif", "bmp") else {"exif": exif}
        if suffix in ("gif", "webp", "tiff"):
            options |= {"save_all": True, "append_images": frames[1:]}
        frames[0].save(path, **options)
    return path.read_bytes()


def cut(data: bytearray, dice: random.Random) -> bytearray:
    return data[: dice.randrange(len(data))]


def overwrite_head(data: bytearray, dice: random.Random) -> bytearray:
    for _ in range(dice.randrange(1, 20)):
        data[dice.randrange(min(len(data), 600))] = dice.randrange(256)
    return data


def flip_bits(data: bytearray, dice: random.Random) -> bytearray:
    for _ in range(dice.randrange(1, 40)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return data


def replace_piece(data: bytearray, dice: random.Random) -> bytearray:
    at = dice.randrange(len(data))
    data[at : at + dice.randrange(1, 200)] = dice.randbytes(dice.randrange(50))
    return data


def large_numbers(data: bytearray, dice: random.Random) -> bytearray:
    """Four bytes of a header become a size or a count at its limit."""
    at = dice.randrange(min(len(data) - 4, 2000))
    data[at : at + 4] = dice.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\0\0\0\1"])
    return data


WAYS: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    cut,
    overwrite_head,
    flip_bits,
    replace_piece,
    large_numbers,
)


HEADS = (
    b"\x1a\x45\xdf\xa3",
    b"OggS",
    b"fLaC",
    b"RIFF\xff\xff\xff\xffWAVEfmt ",
    b"RIFF\0\0\1\0AVI LIST",
    b"ID3\4\0\0\0\0\0\0",
    b"\0\0\0\x20ftypisom",
    b"\0\0\0\1moov",
    b"FLV\1\5\0\0\0\x09",
    b"\0\0\1\xba\x44",
    b"\xff\xfb\x90\x64",
    b"\xff\xf1\x50\x80",
    b"FORM\0\1\0\0AIFFCOMM",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9",
    (b"\x47" + bytes(187)) * 6,
)


def check(source: object) -> None:
    if isinstance(source, Picture):
        assert source.pixels.dtype == np.uint8 and source.pixels.ndim == 3 and source.pixels.size
    if isinstance(source, Clip):
        assert source.frames.dtype == np.uint8 and len(source.frames) and source.fps == 24
        source = source.sound
    if isinstance(source, Sound):
        assert source.samples.dtype == np.float32 and source.samples.shape[1] and np.isfinite(source.samples).all()


@pytest.mark.parametrize("suffix", [*VIDEOS, *SOUNDS, *PICTURES])
def test_broken_bytes_are_refused_or_read(tmp_path: Path, suffix: str):
    whole, dice = whole_file(tmp_path, suffix), random.Random(suffix)
    kind = "video" if suffix in VIDEOS else "audio" if suffix in SOUNDS else "image"
    assert len(whole) < 100_000
    (tmp_path / "a").write_bytes(whole)
    check(read_source(Reference(kind, tmp_path / "a"), SPEC, 60))
    ends = {"read": 0, "refused": 0}
    for i in range(CASES):
        data = WAYS[i % len(WAYS)](bytearray(whole), dice)
        (tmp_path / "a").write_bytes(data)
        start = None if kind == "image" else dice.choice([None, None, 0.1, 4.0])
        begin = time.perf_counter()
        try:
            check(read_source(Reference(kind, tmp_path / "a", start), SPEC, 60, "references[0]"))
            ends["read"] += 1
        except RequestError as error:
            assert error.field.startswith("references[0]") and len(str(error)) < 600
            ends["refused"] += 1
        assert time.perf_counter() - begin < 10, (suffix, i)
    assert ends["refused"], ends


def test_noise_after_every_magic_is_refused_or_read(tmp_path: Path):
    dice = random.Random(0)
    for head in HEADS:
        for kind in ("video", "audio"):
            (tmp_path / "a").write_bytes(head + dice.randbytes(3000))
            try:
                check(read_source(Reference(kind, tmp_path / "a"), SPEC, 60))
            except RequestError:
                continue


def test_a_picture_stays_readable_while_its_extras_break():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG", icc_profile=b"broken", exif=b"Exif\0\0broken")
    picture = read_source(Reference("image", Image.open(stream)), SPEC, 1)
    assert isinstance(picture, Picture) and (picture.pixels == (255, 0, 0)).all() and picture.notes
