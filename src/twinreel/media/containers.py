"""Clips and sounds out of media files, through PyAV: one pass, by presentation time, no more than is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from ..errors import RequestError
from ..sources import Clip, Sound
from ..spec import FPS, Spec
from .addresses import Opened
from .footage import MOST_PIXELS, Footage, check_frame_size
from .slots import Window
from .soundtrack import SLACK, Soundtrack
from .whole import check_length, check_size, doubt

PATIENCE = 10  # seconds past the limit after which a stream that is still missing is taken to have ended
SEEK_FROM = 3  # seconds: an earlier `start` is reached sooner by decoding up to it
BACKS = (1, 12)  # seconds before `start` at which reading begins, the second when the first lands too late
# These find a place by an index or by exact numbers in the data; the others are read from the beginning.
SEEKABLE = {"mp4", "matroska", "mpegts", "wav", "aiff", "flac", "ogg", "avi"}


def read_clip(opened: Opened, field: str, spec: Spec, window: Window) -> Clip:
    """Frames and soundtrack of a media file; see `media.read.read_source`."""
    for back in _backs(opened, window):
        with open_container(opened, field) as container:
            video = _video_of(container, opened, field)
            audio = container.streams.audio[0] if container.streams.audio else None
            footage = Footage(video, field, spec, window, by_packets=opened.demuxer == "avi")
            sound = None if audio is None else Soundtrack(audio, field, window, alone=False)
            readers: dict[int, Any] = {video.index: footage}
            if audio is not None:
                readers[audio.index] = sound
            # with frames out of order a seek in an AVI cannot tell which place the first one has
            back = None if opened.demuxer == "avi" and video.codec_context.has_b_frames else back
            reading = _Reading(container, opened, field, window, readers)
            if reading.run(back):
                return _clip(reading, footage, sound)
    raise AssertionError("the last attempt reads from the beginning")


def _clip(reading: _Reading, footage: Footage, sound: Soundtrack | None) -> Clip:
    opened, field = reading.opened, reading.field
    if footage.slots is None or footage.zero is None:
        raise RequestError(field, f"{opened.label} is {opened.what} without a frame that decodes; save it again")
    footage.close()
    pixels, slots = footage.slots.frames(), footage.slots
    notes = reading.notes + footage.notes + slots.notes
    track = None if sound is None else sound.sound(footage.zero)
    if sound is not None and track is None:
        notes += (f"{field}: its soundtrack holds no samples here",)
    return Clip(pixels, float(FPS), track, slots.cut, notes)


def read_sound(opened: Opened, field: str, window: Window) -> Sound:
    """The first sound of a media file; see `media.read.read_source`."""
    for back in _backs(opened, window):
        with open_container(opened, field) as container:
            if not container.streams.audio:
                found = f"{opened.label} is {opened.what} without sound ({_found(container)})"
                raise RequestError(field, f"{found}; give one with sound")
            stream = container.streams.audio[0]
            samples = Soundtrack(stream, field, window, alone=True)
            reading = _Reading(container, opened, field, window, {stream.index: samples})
            if not reading.run(back):
                continue
            sound = None if samples.first is None else samples.sound(samples.first)
            if sound is None:
                raise window.refuse_late_start(field, float(samples.end - (samples.first or 0)))
            return Sound(sound.samples, sound.rate, sound.cut, reading.notes + sound.notes)
    raise AssertionError("the last attempt reads from the beginning")


class _Reading:
    """One walk over a file's packets, from the beginning or from shortly before `start`."""

    def __init__(self, container: Any, opened: Opened, field: str, window: Window, readers: Mapping[int, Any]) -> None:
        from av.stream import Discard

        self.container, self.opened, self.field, self.window = container, opened, field, window
        self.readers = readers
        self.notes: tuple[str, ...] = ()
        self._lead = next(iter(readers.values()))
        self._undecoded = 0
        self._reached = Fraction(0)  # where the last packet ends, wanted or not
        # a WAV from a pipe declares no end, and its last block is short
        self._open_end = not check_size(opened, field) and opened.demuxer == "wav"
        for stream in container.streams:
            if stream.index not in readers:
                stream.discard = Discard.all
            elif stream.codec_context is None:
                raise _unknown_codec(opened, field)

    def run(self, back: int | None) -> bool:
        """Read what is asked for. False when a seek to `back` seconds before `start` landed too late."""
        if back is not None:
            self._until(lambda: self._lead.zero is not None)
            if self._lead.zero is None or not self._seek(self._lead.zero + self.window.first - back):
                return False
        ended = self._until(lambda: all(reader.done for reader in self.readers.values()))
        if back is not None:
            return not any(self._landed_late(reader) for reader in self.readers.values())
        if ended:
            self._check_end()
        if self._undecoded:
            self.notes += (f"{self.field}: its first {self._undecoded} packets do not decode and are left out",)
        return True

    def _until(self, enough: Any) -> bool:
        """Take packets until `enough()`; True when the file ended first."""
        streams = [stream for stream in self.container.streams if stream.index in self.readers]
        for packet in self.container.demux(streams):
            if packet.pts is not None:
                ends = Fraction((packet.pts + (packet.duration or 0)) * packet.time_base)
                self._reached = max(self._reached, ends)
            # an empty packet in the middle (AVI's "show the last frame again") would end the decoder
            if (packet.size or packet.dts is None) and self.readers[packet.stream.index].wants(packet):
                self._take(packet, self.readers[packet.stream.index])
            if enough() or self._is_past(packet):
                return False
        return True

    def _take(self, packet: Any, reader: Any) -> None:
        import av

        if packet.is_corrupt and not self._open_end:
            self._refuse("with a broken packet")
        try:
            frames = packet.decode()
        except av.FFmpegError as error:
            # a recording may begin in the middle of a group of pictures
            if reader.landed is not None or not packet.size:
                self._refuse(f"that does not decode ({error.strerror})", reader)
            self._undecoded += 1
            return
        for frame in frames:
            if frame.is_corrupt:
                self._refuse("with a broken frame", reader)
            reader.take(frame)
            if reader is not self._lead:
                continue
            for other in self.readers.values():
                other.zero = reader.zero

    def _refuse(self, what: str, reader: Any = None) -> None:
        at = ""
        if reader is not None and reader.zero is not None:
            at = f" at {float(reader.end - reader.zero):.2f} s"
        raise RequestError(
            self.field,
            f"{self.opened.label} is {self.opened.what} {what}{at}; if truncated, copy it again, or give an end before",
        )

    def _is_past(self, packet: Any) -> bool:
        if packet.dts is None or self._lead.zero is None:
            return False
        limit = self.window.first + Fraction(self.window.asked_frames, FPS) + PATIENCE
        return bool(packet.dts * packet.time_base - self._lead.zero > limit)

    def _seek(self, target: Fraction) -> bool:
        import av

        stream = self.container.streams[next(iter(self.readers))]
        try:
            self.container.seek(int(target / stream.time_base), stream=stream)
        except av.FFmpegError:
            return False
        for reader in self.readers.values():
            reader.restart()
        return True

    def _landed_late(self, reader: Any) -> bool:
        return reader.landed is None or bool(reader.landed > self._lead.zero + self.window.first + SLACK)

    def _check_end(self) -> None:
        duration = self.container.duration
        all_read = sum(not _is_cover(stream) for stream in self.container.streams) == len(self.readers)
        if duration is not None and all_read and self._lead.landed is not None:
            # a reader that has what was asked for takes no more, and the file goes on
            found = max(self._reached, *(reader.end for reader in self.readers.values()))
            check_length(self.opened, self.field, duration / 1e6, float(found))
        words = doubt(self.opened)
        if words is not None:
            self.notes += (f"{self.field}: {words}",)


def _backs(opened: Opened, window: Window) -> tuple[int | None, ...]:
    """How many seconds before `start` to begin, attempt by attempt; None is the file's beginning."""
    if window.first < SEEK_FROM or opened.demuxer not in SEEKABLE:
        return (None,)
    return *(back for back in BACKS if back < window.first), None


@contextmanager
def open_container(opened: Opened, field: str) -> Iterator[Any]:
    """PyAV's container of `opened` by its one demuxer, which opens no second file. Raises RequestError (`field`), also for
    what PyAV raises inside the block."""
    import av

    # no demuxer may open a second file, and no header may ask for a frame that fills the memory
    options = {"protocol_whitelist": "none", "max_pixels": str(MOST_PIXELS)}
    opened.stream.seek(0)
    try:
        with av.open(opened.stream, format=opened.demuxer, options=options, metadata_errors="replace") as container:
            yield container
    except (av.FFmpegError, OSError, MemoryError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            field, f"{opened.label} is {opened.what} that cannot be read ({words}); copy it again"
        ) from None


def _video_of(container: Any, opened: Opened, field: str) -> Any:
    videos = [stream for stream in container.streams.video if not _is_cover(stream)]
    if not videos:
        found = f"{opened.label} is {opened.what} without pictures ({_found(container)})"
        raise RequestError(field, f"{found}; use kind audio")
    codec = videos[0].codec_context
    if codec is None:
        raise _unknown_codec(opened, field)
    check_frame_size(codec.width, codec.height, field)
    codec.options = {"max_pixels": str(MOST_PIXELS)}
    return videos[0]


def _is_cover(stream: Any) -> bool:
    """Whether a stream is the cover of an album: one picture, which has no time."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def _unknown_codec(opened: Opened, field: str) -> RequestError:
    return RequestError(
        field, f"{opened.label} is {opened.what} of a codec that is not known; convert it to H.264 and AAC"
    )


def _found(container: Any) -> str:
    streams = [f"{s.type} {s.codec_context.name}" if s.codec_context else s.type for s in container.streams]
    return "found " + (", ".join(streams) or "no streams")
