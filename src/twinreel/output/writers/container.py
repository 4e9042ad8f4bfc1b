"""MP4, Matroska and WebM through PyAV: streamed frame by frame, the same bytes on every run (SPEC 10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import FPS, SAMPLE_RATE
from .. import PRESETS, OutputOptions
from .content import Content

# x264 spreads rate decisions over its threads: another count is another file, so it is the same on every machine. With
# fewer than this a file comes long after what one GPU decodes, 27 frames of 1344x768 a second.
ENCODER_THREADS = 16
# x264's AVX-512 macroblock tree gives other bits on every run (measured on the library of PyAV 18.1): without it the
# file's hash is stable, for some 5 % more bytes
X264_PARAMS = "mbtree=0"
AUDIO_FRAME = 1024
BT709 = 1
LIMITED = 1
OPUS_RATE = 48_000  # Opus has no 32 kHz


@dataclass(frozen=True)
class Kind:
    """One container. `sample` is PyAV's sample format, `bit_rate` 0 for a lossless codec."""

    format: str
    video: str
    audio: str
    sample: str
    rate: int
    bit_rate: int
    options: dict[str, str]


KINDS = {
    # faststart puts the index in front, so that a browser can play what it has not loaded whole
    ".mp4": Kind("mp4", "libx264", "aac", "fltp", SAMPLE_RATE, 192_000, {"movflags": "+faststart"}),
    # bitexact: Matroska otherwise draws a random identifier for every file
    ".mkv": Kind("matroska", "libx264", "flac", "s32", SAMPLE_RATE, 0, {"fflags": "+bitexact"}),
    ".webm": Kind("webm", "libvpx-vp9", "libopus", "flt", OPUS_RATE, 192_000, {"fflags": "+bitexact"}),
}


def encoder_settings(suffix: str, output: OutputOptions) -> dict[str, Any]:
    """What decides the file's bytes besides frames and waveform, for the report."""
    kind = KINDS[suffix]
    settings: dict[str, Any] = {
        "video": f"{kind.video} yuv420p, BT.709 limited range",
        "crf": output.crf,
        "preset": output.preset,
        "threads": ENCODER_THREADS,
    }
    if kind.video == "libx264":
        settings["x264_params"] = X264_PARAMS
    if output.audio:
        settings |= {"audio": kind.audio, "audio_bits_per_second": kind.bit_rate or "lossless, 24 bits"}
    return settings


def write(path: Path, suffix: str, content: Content) -> None:
    """Encode `content` into `path`."""
    import av

    kind = KINDS[suffix]
    with av.open(str(path), "w", format=kind.format, options=dict(kind.options)) as container:
        video = container.add_stream(kind.video, rate=FPS, options=_video_options(kind, content.output))
        sound = None if content.waveform is None else _Soundtrack(container, kind, content.waveform)
        frames = _Pictures(container, video)
        for picture in content.pictures():
            frames.add(picture)
            if sound is not None:
                # sound follows the picture step by step, so that the muxer never holds more than the encoders' delay
                sound.add_until(Fraction(frames.count, FPS))
        frames.finish()
        if sound is not None:
            sound.finish()


def _video_options(kind: Kind, output: OutputOptions) -> dict[str, str]:
    if kind.video == "libx264":
        return {"crf": str(output.crf), "preset": output.preset, "x264-params": X264_PARAMS}
    speed = len(PRESETS) - 1 - PRESETS.index(output.preset)  # VP9's 8 is the fastest
    return {"crf": str(output.crf), "b": "0", "deadline": "good", "cpu-used": str(speed), "row-mt": "0"}


class _Pictures:
    """The video stream."""

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
        self.container.mux(self.stream.encode(None))

    def _open(self, width: int, height: int) -> None:
        codec = self.stream.codec_context
        codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
        codec.thread_count, codec.thread_type = ENCODER_THREADS, "FRAME"
        codec.color_primaries = codec.color_trc = codec.colorspace = BT709
        codec.color_range = LIMITED


class _Soundtrack:
    """The audio stream."""

    def __init__(self, container: Any, kind: Kind, waveform: NDArray[np.float32]) -> None:
        self.container, self.kind, self.position = container, kind, 0
        self.samples = _at_rate(waveform, kind.rate)
        self.stream = container.add_stream(kind.audio, rate=kind.rate, layout="stereo")
        self.stream.codec_context.format = kind.sample
        if kind.bit_rate:
            self.stream.bit_rate = kind.bit_rate

    def add_until(self, seconds: Fraction | None) -> None:
        import av

        length, rate, sample = self.samples.shape[1], self.kind.rate, self.kind.sample
        while self.position < length and (seconds is None or Fraction(self.position, rate) < seconds):
            part = self.samples[:, self.position : self.position + AUDIO_FRAME]
            frame = av.AudioFrame.from_ndarray(_packed(part, sample), format=sample, layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = rate, self.position, Fraction(1, rate)
            self.container.mux(self.stream.encode(frame))
            self.position += part.shape[1]

    def finish(self) -> None:
        self.add_until(None)
        self.container.mux(self.stream.encode(None))


def _at_rate(waveform: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    if rate == SAMPLE_RATE:
        return waveform
    import torch

    from ...media.resample import resample

    return resample(torch.from_numpy(np.ascontiguousarray(waveform)), SAMPLE_RATE, rate).numpy()


def _packed(part: NDArray[np.float32], sample: str) -> NDArray[Any]:
    if sample == "fltp":
        return np.ascontiguousarray(part)
    packed = part.T.reshape(1, -1)
    return np.ascontiguousarray(whole_24(packed) << 8 if sample == "s32" else packed)


def whole_24(samples: NDArray[np.float32]) -> NDArray[np.int32]:
    """24-bit samples of [-1, 1]: what FLAC keeps. 2**23 itself does not fit, so full scale is one step lower."""
    return np.clip(np.round(samples.astype(np.float64) * 2**23), -(2**23), 2**23 - 1).astype(np.int32)


def read_back(path: Path, suffix: str, content: Content) -> list[str]:
    """Decode `path` and list what is not as written: streams, start, size, frames, samples; bits where lossless."""
    import av

    kind, problems = KINDS[suffix], []
    with av.open(str(path)) as container:
        kinds = [stream.type for stream in container.streams]
        wanted = ["video"] if content.waveform is None else ["video", "audio"]
        if kinds != wanted:
            return [f"its streams are {kinds}"]
        problems += [
            f"{s.type} starts at tick {s.start_time} of {s.time_base} s" for s in container.streams if s.start_time
        ]
        video = container.streams.video[0]
        video.thread_type = "AUTO"
        count = sum(1 for _ in container.decode(video))
        if (video.width, video.height) != content.size:
            problems.append(f"it is {video.width}x{video.height}")
        if count != content.frames:
            problems.append(f"{count} frames of {content.frames}")
    if content.waveform is not None:
        problems += _compare_sound(path, kind, content.waveform)
    return problems


def _compare_sound(path: Path, kind: Kind, waveform: NDArray[np.float32]) -> list[str]:
    length = -(-waveform.shape[1] * kind.rate // SAMPLE_RATE)
    found, same = 0, True
    expected = whole_24(waveform) if kind.audio == "flac" else None
    for samples in _decoded(path):
        if expected is not None:
            part = expected[:, found : found + samples.shape[1]]
            same &= samples.dtype == np.int32 and np.array_equal(samples >> 8, part)
        found += samples.shape[1]
    # AAC comes in frames of 1,024: the edit list, not the decoder, says where the last one ends
    whole = -(-length // AUDIO_FRAME) * AUDIO_FRAME if kind.audio == "aac" else length
    problems = [] if found in (length, whole) else [f"{found} samples of {length}"]
    return problems if same else [*problems, "its lossless sound differs"]


def _decoded(path: Path) -> Iterator[NDArray[Any]]:
    import av

    with av.open(str(path)) as container:
        for frame in container.decode(audio=0):
            samples = frame.to_ndarray()
            yield samples if frame.format.is_planar else samples.reshape(-1, 2).T
