"""Clips and sounds out of media files, through PyAV: one pass, by presentation time, no more than is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .addresses import Opened
from .errors import RequestError
from .slots import FrameSlots, Window
from .sources import Clip, Sound
from .spec import FPS, Spec

SLACK = Fraction(1, 200)  # seconds that a frame of sound may lie off its neighbour: timestamps of some files are coarse
PATIENCE = 10  # seconds past the limit after which a soundtrack that is still missing is taken to have ended
HD_HEIGHT = 720  # untagged video from this height on is BT.709 by convention, below it BT.601


def read_clip(opened: Opened, field: str, spec: Spec, window: Window) -> Clip:
    """Frames and soundtrack of a media file; see `media_in.read_source`."""
    with _container(opened, field) as container:
        videos = [s for s in container.streams.video if not _is_attached_picture(s)]
        if not videos:
            raise RequestError(
                field, f"{opened.label} is {opened.what} without pictures ({_found(container)}); use kind audio"
            )
        frames = _Frames(videos[0], field, spec, window)
        audio = container.streams.audio[0] if container.streams.audio else None
        samples = None if audio is None else _Samples(audio, field, window, alone=False)
        readers: dict[int, Any] = {videos[0].index: frames}
        if audio is not None:
            readers[audio.index] = samples
        _refuse_truncated(opened, field, container)
        for packet in container.demux([s for s in (videos[0], audio) if s is not None]):
            _take(packet, readers[packet.stream.index], opened, field)
            if samples is not None:
                samples.zero = frames.zero
            if all(reader.done for reader in readers.values()) or (frames.done and _is_late(packet, frames, window)):
                break
        if frames.slots is None or frames.zero is None:
            raise RequestError(field, f"{opened.label} is {opened.what} without a frame that decodes; save it again")
        frames.close()
        pixels, slots = frames.slots.frames(), frames.slots
        notes = frames.notes + slots.notes
        if samples is None:
            return Clip(pixels, float(FPS), None, slots.cut, notes)
        sound = samples.sound(frames.zero)
        if sound is None:
            return Clip(pixels, float(FPS), None, slots.cut, (*notes, f"{field}: its soundtrack holds no samples here"))
        return Clip(pixels, float(FPS), sound, slots.cut, notes)


def read_sound(opened: Opened, field: str, window: Window) -> Sound:
    """The first sound of a media file; see `media_in.read_source`."""
    with _container(opened, field) as container:
        if not container.streams.audio:
            raise RequestError(
                field, f"{opened.label} is {opened.what} without sound ({_found(container)}); give one with sound"
            )
        samples = _Samples(container.streams.audio[0], field, window, alone=True)
        _refuse_truncated(opened, field, container)
        for packet in container.demux(container.streams.audio[0]):
            _take(packet, samples, opened, field)
            if samples.done:
                break
        sound = None if samples.first is None else samples.sound(samples.first)
        if sound is None:
            raise window.refuse_late_start(field, float(samples.end - (samples.first or 0)))
        return sound


class _Frames:
    """Decoded pictures on their way to the slots."""

    def __init__(self, stream: Any, field: str, spec: Spec, window: Window) -> None:
        from av.video.reformatter import VideoReformatter

        self.stream, self.field, self.spec, self.window = stream, field, spec, window
        self.slots: FrameSlots | None = None
        self.zero: Fraction | None = None
        self.notes: tuple[str, ...] = ()
        self._end = Fraction(0)
        self._matrix = (1, 0, 0, 1)
        self._reformat = VideoReformatter().reformat

    @property
    def done(self) -> bool:
        return self.slots is not None and self.slots.full

    def take(self, frame: Any) -> None:
        time = self._end if frame.pts is None else frame.pts * frame.time_base
        if self.slots is None:
            self.zero, self.slots = time, self._open_slots(frame)
        rate = self.stream.average_rate or self.stream.guessed_rate or FPS
        self._end = time + (frame.duration * frame.time_base if frame.duration else 1 / Fraction(rate))
        self.slots.put((time - (self.zero or 0)) * FPS, lambda: upright(self._rgb(frame), self._matrix))

    def close(self) -> None:
        assert self.slots is not None and self.zero is not None
        self.slots.close((self._end - self.zero) * FPS)

    def _open_slots(self, frame: Any) -> FrameSlots:
        side_data = frame.side_data.get("DISPLAYMATRIX")
        if side_data is not None:
            m = np.frombuffer(side_data, "<i4")
            self._matrix = (int(m[0]), int(m[1]), int(m[3]), int(m[4]))
        aspect = Fraction(self.stream.sample_aspect_ratio or 1)
        width, height = frame.width, frame.height
        if _swaps_axes(self._matrix):
            width, height, aspect = height, width, 1 / aspect
        return FrameSlots(width, height, self.field, self.spec, self.window, pixel_aspect=aspect)

    def _rgb(self, frame: Any) -> NDArray[np.uint8]:
        from av.video.reformatter import ColorRange, Colorspace, Interpolation

        known = {int(space): space for space in Colorspace}
        fallback = Colorspace.ITU709 if frame.height >= HD_HEIGHT else Colorspace.ITU601
        # full chroma and accurate rounding: the short-cut kernels are off by up to two levels on flat colours
        quality = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
        full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj")
        image = self._reformat(
            frame,
            format="rgb24",
            src_colorspace=known.get(int(frame.colorspace), fallback),
            src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
            dst_color_range=ColorRange.JPEG,
            interpolation=quality,
            threads=1,
        )
        return np.asarray(image.to_ndarray(), np.uint8)


class _Samples:
    """Decoded sound, kept with its times until its zero is known: its own start, or the picture's unless `alone`."""

    def __init__(self, stream: Any, field: str, window: Window, alone: bool) -> None:
        self.stream, self.field, self.window, self.alone = stream, field, window, alone
        self.zero: Fraction | None = None
        self.first: Fraction | None = None
        self.end = Fraction(0)
        self.done = False
        self._rate = 0
        self._pieces: list[tuple[Fraction, NDArray[np.float32]]] = []

    def take(self, frame: Any) -> None:
        time = self.end if frame.pts is None else frame.pts * frame.time_base
        samples = self._without_padding(time, samples_of(frame), frame.sample_rate)
        if samples.shape[0] > 2:
            raise RequestError(self.field, f"has {samples.shape[0]} channels of sound; mix it down to mono or stereo")
        self._rate = self._rate or frame.sample_rate
        if frame.sample_rate != self._rate or (self._pieces and samples.shape[0] != self._pieces[0][1].shape[0]):
            raise RequestError(self.field, "changes its sample rate or channels midway; convert it to one format")
        self.first = time if self.first is None else self.first
        if self.alone:
            self.zero = self.first
        self.end = time + Fraction(samples.shape[1], self._rate)
        begin = None if self.zero is None else self.zero + self.window.first
        if begin is None or self.end > begin:
            self._pieces.append((time, samples))
        if begin is not None:
            # a little more than needed decides whether anything was cut
            most = Fraction(self.window.most_samples(self._rate), self._rate)
            self.done = self.end > begin + most + Fraction(1, 10)

    def _without_padding(self, time: Fraction, samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        """Drop what an encoder added to fill its last block, as an MP4's declared length tells."""
        if self.stream.duration is None or "mp4" not in self.stream.container.format.name:
            return samples
        end = ((self.stream.start_time or 0) + self.stream.duration) * self.stream.time_base
        left = round((end - time) * rate)
        return samples[:, :left] if 0 < left < samples.shape[1] else samples

    def sound(self, zero: Fraction) -> Sound | None:
        """The asked part, its sample 0 at `zero` plus the window's start; gaps are silence. None without samples."""
        if not self._pieces:
            return None
        rate, slack = self._rate, int(SLACK * self._rate)
        first, most = self.window.first_sample(rate), self.window.most_samples(rate)
        parts, filled, cursor, expected = [], 0, 0, None
        for time, samples in self._pieces:
            at = round((time - zero) * rate) - first
            if expected is not None and abs(at - expected) <= slack:
                at = expected
            expected = at + samples.shape[1]
            if expected <= cursor:
                continue
            if at > cursor:
                parts.append(np.zeros((samples.shape[0], min(at, most) - min(cursor, most)), np.float32))
                filled += parts[-1].shape[1]
            parts.append(samples[:, max(0, cursor - at) :])
            cursor = expected
        if not parts:
            return None
        whole = np.concatenate(parts, axis=1)[:, :most]
        if whole.shape[1] == 0 or filled >= whole.shape[1]:
            return None
        over = cursor > most and self.window.bounded_by_limit(rate)
        notes: tuple[str, ...] = ()
        if filled:
            notes = (f"{self.field}: {filled / rate:.3f} s of silence filled in its sound",)
        notes += self.window.sound_notes(self.field, whole.shape[1], rate, over)
        return Sound(np.ascontiguousarray(whole), rate, over, notes)


def samples_of(frame: Any) -> NDArray[np.float32]:
    """float32 `[c, n]` in [-1, 1] of a decoded frame of any sample format; integers are divided by their full scale."""
    data = frame.to_ndarray()
    if frame.format.is_packed:
        data = data.reshape(-1, len(frame.layout.channels)).T
    if data.dtype == np.uint8:
        return (data.astype(np.float32) - 128.0) / 128.0
    if np.issubdtype(data.dtype, np.integer):
        return (data / -float(np.iinfo(data.dtype).min)).astype(np.float32)
    return data.astype(np.float32)


def upright(pixels: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """`pixels` under the display matrix (a, b, c, d), which shows (x, y) at (ax + cy, bx + dy): turns and flips."""
    a, b, c, d = matrix
    if _swaps_axes(matrix):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _swaps_axes(matrix: tuple[int, int, int, int]) -> bool:
    return abs(matrix[1]) > abs(matrix[0])


@contextmanager
def _container(opened: Opened, field: str) -> Iterator[Any]:
    import av

    try:
        with av.open(opened.stream, format=opened.demuxer, metadata_errors="replace") as container:
            yield container
    except av.FFmpegError as error:
        raise RequestError(
            field, f"{opened.label} is {opened.what} that cannot be read ({error.strerror}); copy it again"
        ) from None


def _take(packet: Any, reader: Any, opened: Opened, field: str) -> None:
    if reader.done:
        return
    if packet.is_corrupt:
        raise RequestError(field, f"{opened.label} is {opened.what} with a broken packet; if truncated, copy it again")
    for frame in packet.decode():
        reader.take(frame)
        if reader.done:
            return


def _is_late(packet: Any, frames: _Frames, window: Window) -> bool:
    if packet.dts is None or frames.zero is None:
        return False
    return packet.dts * packet.time_base - frames.zero > window.first + Fraction(window.max_frames, FPS) + PATIENCE


def _is_attached_picture(stream: Any) -> bool:
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def _found(container: Any) -> str:
    streams = [f"{s.type} {s.codec_context.name}" if s.codec_context else s.type for s in container.streams]
    return "found " + (", ".join(streams) or "no streams")


def _refuse_truncated(opened: Opened, field: str, container: Any) -> None:
    """A file shorter than its own index or header says: the decoder would only stop early, without a word."""
    stream = opened.stream
    here = stream.tell()
    head = (stream.seek(0), stream.read(8))[1]
    size = stream.seek(0, 2)
    stream.seek(here)
    needed = 0
    if head[:4] == b"RIFF" and head[4:] not in (b"\xff\xff\xff\xff", b"\0\0\0\0"):
        needed = int.from_bytes(head[4:], "little") + 8
    if opened.demuxer == "mp4":
        needed = max((e.pos + e.size for s in container.streams for e in s.index_entries), default=0)
    if size < needed:
        raise RequestError(
            field, f"{opened.label} is {opened.what} of {needed:,} bytes, truncated to {size:,}; copy it again"
        )
