"""Small media files made by code, for the tests of reading and writing."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

TICKS = 90_000


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
    frames: Sequence[np.ndarray],
    times: Sequence[float] | None = None,
    sound: np.ndarray | None = None,
    *,
    rate: int = 48_000,
    fps: float = 24,
    sound_at: float = 0.0,
    turn: int | None = None,
    aspect: Fraction | None = None,
    codec: str = "libx264",
) -> Path:
    """`frames` shown at `times` (or at `fps`) with `sound` [c, n] from `sound_at` seconds on."""
    times = times if times is not None else [i / fps for i in range(len(frames))]
    with av.open(str(path), "w") as container:
        video: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        video.width, video.height, video.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuv420p"
        if codec == "libx264":
            video.options = {"crf": "10", "preset": "ultrafast"}
        video.codec_context.time_base = Fraction(1, TICKS)
        if aspect is not None:
            video.codec_context.sample_aspect_ratio = aspect
        if turn is not None:
            video.set_display_rotation(turn)
        audio: Any = None
        if sound is not None:
            audio = container.add_stream("aac", rate=rate, layout="mono" if len(sound) == 1 else "stereo")
        for pixels, time in zip(frames, times, strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = round(time * TICKS), Fraction(1, TICKS)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            _encode_sound(container, audio, sound, rate, round(sound_at * rate), "fltp", 1024)
    return path


def write_sound(path: Path, samples: np.ndarray, rate: int, codec: str, sample_format: str) -> Path:
    """`samples` float [c, n] in a file of sound."""
    with av.open(str(path), "w") as container:
        audio = container.add_stream(codec, rate=rate, layout="mono" if len(samples) == 1 else "stereo")
        if codec.startswith("pcm"):
            scale = {"u8": 127, "s16": 32767, "s32": 2**31 - 129, "flt": 1}[sample_format]
            kind = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "flt": np.float32}[sample_format]
            whole = samples.astype(np.float64) * scale + (128 if sample_format == "u8" else 0)
            samples = (whole if sample_format == "flt" else np.round(whole)).astype(kind)
        _encode_sound(container, audio, samples, rate, 0, sample_format, 1152)
    return path


def _encode_sound(
    container: Any, stream: Any, samples: np.ndarray, rate: int, first: int, sample_format: str, block: int
) -> None:
    layout = "mono" if len(samples) == 1 else "stereo"
    for at in range(0, samples.shape[1], block):
        part = samples[:, at : at + block]
        part = np.ascontiguousarray(part if sample_format.endswith("p") else part.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(part, format=sample_format, layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, first + at, Fraction(1, rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
