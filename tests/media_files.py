"""Small media files made by code, for the tests of reading and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

TICKS = 90_000
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def flat(color: Sequence[int], width: int = 64, height: int = 48) -> np.ndarray:
    """uint8 [H, W, 3] of one colour."""
    return np.full((height, width, 3), color, np.uint8)


def barred(width: int = 64, height: int = 48) -> np.ndarray:
    """A blue picture whose top quarter is red and whose left eighth below is green."""
    pixels = flat((0, 0, 255), width, height)
    pixels[:, : width // 8] = (0, 255, 0)
    pixels[: height // 4] = (255, 0, 0)
    return pixels


def tone(hertz: float, seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """float32 [c, n], amplitude 0.5."""
    time = np.arange(int(seconds * rate)) / rate
    return np.tile(0.5 * np.sin(2 * np.pi * hertz * time), (channels, 1)).astype(np.float32)


def clicked(second: float, seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """Silence with one loud millisecond that starts at `second`."""
    samples = np.zeros((channels, int(seconds * rate)), np.float32)
    at = round(second * rate)
    samples[:, at : at + rate // 1000] = 0.9
    return samples


def onset(samples: np.ndarray, rate: int) -> float:
    """Seconds at which the first loud sample lies."""
    level = np.abs(samples).max(axis=0)
    return float(np.argmax(level > 0.5 * level.max())) / rate


def write_mp4(
    path: Path,
    frames: Sequence[np.ndarray | av.VideoFrame],
    times: Sequence[float] | None = None,
    sound: np.ndarray | None = None,
    *,
    rate: int = 48_000,
    fps: float = 24,
    sound_at: float = 0.0,
    turn: int | None = None,
    aspect: Fraction | None = None,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    audio: str = "aac",
    ticks: int = TICKS,
) -> Path:
    """`frames` shown at `times` (or at `fps`) with `sound` [c, n] from `sound_at` seconds on, in any container."""
    times = times if times is not None else [i / fps for i in range(len(frames))]
    frames = [frame if isinstance(frame, av.VideoFrame) else picture_frame(frame) for frame in frames]
    with av.open(str(path), "w") as container:
        video: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        video.width, video.height, video.pix_fmt = frames[0].width, frames[0].height, pixels
        video.options = options or ({"crf": "10", "preset": "ultrafast"} if codec == "libx264" else {})
        video.codec_context.time_base = Fraction(1, ticks)
        if aspect is not None:
            video.codec_context.sample_aspect_ratio = aspect
        if turn is not None:
            video.set_display_rotation(turn)
        for name in ("colorspace", "color_range", "color_trc"):
            setattr(video.codec_context, name, getattr(frames[0], name))
        stream: Any = None
        if sound is not None:
            stream = container.add_stream(audio, rate=rate, layout=LAYOUTS[len(sound)])
            stream.bit_rate = 128_000
        for frame, time in zip(frames, times, strict=True):
            frame.pts, frame.time_base = round(time * ticks), Fraction(1, ticks)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            _encode_sound(container, stream, sound, rate, round(sound_at * rate), "fltp", 1024)
    return path


def picture_frame(pixels: np.ndarray) -> av.VideoFrame:
    """A frame of uint8 [H, W, 3]."""
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")


def yuv_frame(rgb: Sequence[int], kr: float, kb: float, full: bool, pixels: str, colorspace: int) -> av.VideoFrame:
    """A frame of one colour by the matrix's own equations (ITU-R BT.601, BT.709, BT.2020), not by FFmpeg's."""
    bits = 10 if "10" in pixels else 8
    r, g, b = (value / 255 for value in rgb)
    y = kr * r + (1 - kr - kb) * g + kb * b
    u, v = (b - y) / (2 - 2 * kb), (r - y) / (2 - 2 * kr)
    scale, top = 2 ** (bits - 8), 2**bits - 1
    values = [y * top, u * top + 128 * scale, v * top + 128 * scale]
    if not full:
        values = [scale * (16 + 219 * y), scale * (128 + 224 * u), scale * (128 + 224 * v)]
    frame = av.VideoFrame(64, 48, pixels)
    for plane, value in zip(frame.planes, values, strict=True):
        word = min(top, round(value)).to_bytes(1 if bits == 8 else 2, "little")
        plane.update(word * (plane.buffer_size // len(word)))
    frame.colorspace, frame.color_range = colorspace, 2 if full else 1
    return frame


def write_sound(path: Path, samples: np.ndarray, rate: int, codec: str, sample_format: str, *, bits: int = 0) -> Path:
    """`samples` float [c, n] in a file of sound."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=LAYOUTS[len(samples)])
        stream.format = sample_format
        if bits:
            stream.bit_rate = bits
        scale, kind = {
            "u8": (127, np.uint8),
            "s16": (32767, np.int16),
            "s32": (2**31 - 129, np.int32),
            "flt": (1, np.float32),
            "fltp": (1, np.float32),
        }[sample_format]
        whole = samples.astype(np.float64) * scale + (128 if sample_format == "u8" else 0)
        values = whole.astype(kind) if scale == 1 else np.round(whole).astype(kind)
        _encode_sound(container, stream, values, rate, 0, sample_format, stream.codec_context.frame_size or 1152)
    return path


def id3(frames: Mapping[bytes, bytes]) -> bytes:
    """An ID3v2.3 tag, which stands before a sound."""
    body = b"".join(name + len(data).to_bytes(4, "big") + b"\0\0" + data for name, data in frames.items())
    return b"ID3\3\0\0" + bytes(len(body) >> 7 * i & 0x7F for i in (3, 2, 1, 0)) + body


def _encode_sound(
    container: Any, stream: Any, samples: np.ndarray, rate: int, first: int, sample_format: str, block: int
) -> None:
    for at in range(0, samples.shape[1], block):
        part = samples[:, at : at + block]
        part = np.ascontiguousarray(part if sample_format.endswith("p") else part.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(part, format=sample_format, layout=LAYOUTS[len(samples)])
        frame.sample_rate, frame.pts, frame.time_base = rate, first + at, Fraction(1, rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
