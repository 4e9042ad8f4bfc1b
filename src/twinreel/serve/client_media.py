"""A request's media as bytes to upload: files as they are, values in memory in lossless forms."""

from __future__ import annotations

import io
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError
from ..media.addresses import path_of
from ..sources import Clip, Picture, Sound

BLOCK = 1 << 18
FLOAT_WAV = 3
SOUND_BLOCK = 1024


@dataclass(frozen=True)
class Medium:
    """Bytes in memory, or the file at `path`."""

    data: bytes | None = None
    path: Path | None = None

    def size(self) -> int:
        """How many bytes."""
        return len(self.data) if self.data is not None else self._file().stat().st_size

    def blocks(self) -> Iterator[bytes]:
        """The bytes, a file's in blocks."""
        if self.data is not None:
            yield self.data
            return
        with self._file().open("rb") as file:
            while block := file.read(BLOCK):
                yield block

    def _file(self) -> Path:
        assert self.path is not None
        return self.path


def medium_of(source: Any, field: str) -> Medium | str:
    """What to upload of `source`, or the address itself where the server may read it (http, https, data).

    Raises RequestError for a file that is not there.
    """
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        scheme = str(text).partition(":")[0].lower()
        if isinstance(text, str) and scheme in ("http", "https", "data"):
            return text
        path = path_of(str(text), field)
        if not path.is_file():
            raise RequestError(field, f"no file at {path}; check the path")
        return Medium(path=path)
    if isinstance(source, Clip):
        return Medium(data=clip_bytes(source))
    if isinstance(source, Sound):
        return Medium(data=wav_bytes(source))
    return Medium(data=picture_bytes(source, field))


def picture_bytes(source: Any, field: str) -> bytes:
    """PNG of a `Picture`, a uint8 array `[H, W, 3]` or a PIL image."""
    from PIL import Image

    pixels = source.pixels if isinstance(source, Picture) else source
    if isinstance(pixels, np.ndarray):
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise RequestError(field, f"an array {pixels.dtype} {list(pixels.shape)}; uint8 [H, W, 3] is needed")
        pixels = Image.fromarray(pixels)
    if "PIL.Image" not in sys.modules or not isinstance(pixels, Image.Image):
        raise RequestError(field, f"got {type(source).__name__}; give a path, an address, a picture, clip or sound")
    data = io.BytesIO()
    pixels.save(data, "PNG", exif=pixels.getexif())
    return data.getvalue()


def wav_bytes(sound: Sound) -> bytes:
    """32-bit float WAV: the samples themselves."""
    samples = np.ascontiguousarray(sound.samples.T, dtype="<f4")
    channels, size = sound.samples.shape[0], samples.nbytes
    head = struct.pack("<HHIIHH", FLOAT_WAV, channels, sound.rate, sound.rate * channels * 4, channels * 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", size) + samples.tobytes()
    return b"RIFF" + struct.pack("<I", len(body)) + body


def clip_bytes(clip: Clip) -> bytes:
    """Matroska with FFV1 pictures and 32-bit float sound, both lossless."""
    import av

    data = io.BytesIO()
    rate = Fraction(clip.fps).limit_denominator(1001)
    with av.open(data, "w", format="matroska") as container:
        video: Any = container.add_stream("ffv1", rate=rate)
        video.height, video.width = clip.frames.shape[1:3]
        video.pix_fmt = "bgr0"
        sound = None
        if clip.sound is not None:
            layout = "stereo" if clip.sound.samples.shape[0] == 2 else "mono"
            sound = container.add_stream("pcm_f32le", rate=clip.sound.rate, layout=layout)
        for number, pixels in enumerate(clip.frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24").reformat(format="bgr0")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None and clip.sound is not None:
            _add_sound(container, sound, clip.sound)
    return data.getvalue()


def _add_sound(container: Any, stream: Any, sound: Sound) -> None:
    import av

    layout = "stereo" if sound.samples.shape[0] == 2 else "mono"
    for start in range(0, sound.samples.shape[1], SOUND_BLOCK):
        part = np.ascontiguousarray(sound.samples[:, start : start + SOUND_BLOCK].T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(part, format="flt", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = sound.rate, start, Fraction(1, sound.rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
