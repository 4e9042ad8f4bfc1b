"""Frames and sound into one MP4: streamed frame by frame, the same bytes on every run (SPEC 10)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .report import FrameHasher, hash_file, hash_waveform, replacing, write_report
from .spec import FPS, SAMPLE_RATE

CRF = 18
PRESET = "fast"
# x264 spreads rate decisions over its threads: another count is another file
ENCODER_THREADS = 4
# x264's AVX-512 macroblock tree gives other bits on every run (measured on the library of PyAV 18.1): without it the
# file's hash is stable, for some 5 % more bytes
X264_PARAMS = "mbtree=0"
AUDIO_BITS_PER_SECOND = 192_000
AUDIO_FRAME = 1024
BT709 = 1
LIMITED = 1


@dataclass(frozen=True)
class Written:
    """A finished file: its path, frame count, and SHA-256 of raw frames, of the waveform and of the file."""

    path: Path
    frames: int
    sha256: dict[str, str]


@dataclass(frozen=True, eq=False)
class Media:
    """A finished generation.

    Args:
        video: uint8 `[F, H, W, 3]` at 24 fps.
        audio: float32 `[2, n]` at 32 kHz, channel 0 left.
        report: how it was made, as plain JSON values.
    """

    video: NDArray[np.uint8]
    audio: NDArray[np.float32]
    report: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str], crf: int = CRF, preset: str = PRESET) -> Path:
        """Write the MP4 and its JSON report beside it, the same bytes as the command line. Returns the MP4's path."""
        written = write_video(path, [self.video], self.audio, crf=crf, preset=preset)
        write_report(written.path, {**self.report, "encoder": encoder_settings(crf, preset), "sha256": written.sha256})
        return written.path


def encoder_settings(crf: int = CRF, preset: str = PRESET) -> dict[str, Any]:
    """What decides the file's bytes besides frames and waveform, for the report."""
    return {
        "video": "libx264 yuv420p, BT.709 limited range",
        "crf": crf,
        "preset": preset,
        "threads": ENCODER_THREADS,
        "x264_params": X264_PARAMS,
        "audio": "aac",
        "audio_bits_per_second": AUDIO_BITS_PER_SECOND,
    }


def write_video(
    path: str | os.PathLike[str],
    clips: Iterable[NDArray[np.uint8]],
    waveform: NDArray[np.float32],
    size: tuple[int, int] | None = None,
    *,
    crf: int = CRF,
    preset: str = PRESET,
) -> Written:
    """Encode clips as they come and rename the file into place when it is whole.

    Args:
        path: the MP4; its folder must exist.
        clips: uint8 `[f, H, W, 3]` in order, any f; both sides even.
        waveform: float32 `[2, n]` in [-1, 1] at 32 kHz, channel 0 left.
        size: (width, height) the frames must have; None takes the first clip's.
        crf, preset: of x264.

    Raises ValueError for clips or a waveform of another shape; whatever happens, no partial file stays at `path`.
    """
    path = Path(path).absolute()
    waveform = np.asarray(waveform)
    if waveform.ndim != 2 or waveform.shape[0] != 2 or waveform.dtype != np.float32 or not np.isfinite(waveform).all():
        raise ValueError(f"waveform {waveform.dtype} {list(waveform.shape)}; finite float32 [2, n] is needed")
    hasher = FrameHasher()
    with replacing(path) as temporary:
        options = {"crf": str(crf), "preset": preset, "x264-params": X264_PARAMS}
        _encode(temporary, hasher.through(clips), waveform, size, options)
        if not hasher.frames:
            raise ValueError("no frames to write")
        sha256 = {"frames": hasher.hexdigest(), "waveform": hash_waveform(waveform), "file": hash_file(temporary)}
    return Written(path, hasher.frames, sha256)


def _encode(
    path: Path,
    clips: Iterable[NDArray[np.uint8]],
    waveform: NDArray[np.float32],
    size: tuple[int, int] | None,
    options: dict[str, str],
) -> None:
    import av

    # faststart puts the index in front, so that a browser can play what it has not loaded whole
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        video: Any = container.add_stream("libx264", rate=FPS, options=options)
        audio = _Soundtrack(container, waveform)
        frames = _Pictures(container, video)
        for clip in clips:
            width, height = size = size or (clip.shape[2], clip.shape[1])
            if clip.shape[1:] != (height, width, 3):
                raise ValueError(f"clip {list(clip.shape)}; [f, {height}, {width}, 3] is needed")
            for picture in clip:
                frames.add(picture)
                # sound follows the picture step by step, so that the muxer never holds more than the encoders' delay
                audio.add_until(Fraction(frames.count, FPS))
        frames.finish()
        audio.finish()


class _Pictures:
    """The H.264 stream."""

    def __init__(self, container: Any, stream: Any) -> None:
        from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

        self.container, self.stream, self.count = container, stream, 0
        self._reformat = VideoReformatter().reformat
        self._conversion: dict[str, Any] = {
            "format": "yuv420p",
            "src_color_range": ColorRange.JPEG,
            "dst_color_range": ColorRange.MPEG,
            "dst_colorspace": Colorspace.ITU709,
            # one thread and exact rounding: the short-cut kernels lose up to two levels and depend on the machine
            "interpolation": Interpolation.BICUBIC
            | Interpolation.ACCURATE_RND
            | Interpolation.FULL_CHR_H_INP
            | Interpolation.BITEXACT,
            "threads": 1,
        }

    def add(self, pixels: NDArray[np.uint8]) -> None:
        import av

        if not self.count:
            self._open(pixels.shape[1], pixels.shape[0])
        frame = self._reformat(av.VideoFrame.from_ndarray(pixels, format="rgb24"), **self._conversion)
        frame.pts, frame.time_base = self.count, Fraction(1, FPS)
        self.container.mux(self.stream.encode(frame))
        self.count += 1

    def finish(self) -> None:
        if self.count:
            self.container.mux(self.stream.encode(None))

    def _open(self, width: int, height: int) -> None:
        codec = self.stream.codec_context
        codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
        codec.thread_count, codec.thread_type = ENCODER_THREADS, "FRAME"
        codec.color_primaries = codec.color_trc = codec.colorspace = BT709
        codec.color_range = LIMITED


class _Soundtrack:
    """The AAC stream."""

    def __init__(self, container: Any, waveform: NDArray[np.float32]) -> None:
        self.container, self.waveform, self.position = container, waveform, 0
        self.stream = container.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
        self.stream.bit_rate = AUDIO_BITS_PER_SECOND

    def add_until(self, seconds: Fraction | None) -> None:
        import av

        length = self.waveform.shape[1]
        while self.position < length and (seconds is None or Fraction(self.position, SAMPLE_RATE) < seconds):
            part = np.ascontiguousarray(self.waveform[:, self.position : self.position + AUDIO_FRAME])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, self.position, Fraction(1, SAMPLE_RATE)
            self.container.mux(self.stream.encode(frame))
            self.position += part.shape[1]

    def finish(self) -> None:
        self.add_until(None)
        self.container.mux(self.stream.encode(None))
