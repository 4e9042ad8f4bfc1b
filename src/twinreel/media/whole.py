"""Whether a media file is all there, by the sizes it declares itself: a decoder would only stop early, in silence."""

from __future__ import annotations

from typing import BinaryIO

from ..errors import RequestError
from .addresses import HEAD, Opened, after_tag

EARLY = 0.25  # seconds that a file may end before its declared length
MOST_BOXES = 100_000
INFO_ENDS = 40  # bytes of an MP3's first frame that its own header, side information and `Xing` or `Info` take at most
_BOXES = {b"ftyp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"uuid", b"mfra", b"sidx", b"styp", b"meta",
          b"pdin", b"emsg", b"prft", b"udta", b"pnot"}  # fmt: skip


def check_size(opened: Opened, field: str) -> bool:
    """Refuse a file that is shorter than its own header says; leaves the stream where it was.

    Returns whether the header says anything. Raises RequestError.
    """
    stream = opened.stream
    here = stream.tell()
    size = stream.seek(0, 2)
    needed = _declared_size(opened, size)
    stream.seek(here)
    # some writers count a padding byte that they leave out at the very end
    if size + 1 < needed:
        raise RequestError(
            field, f"{opened.label} is {opened.what} of {needed:,} bytes, truncated to {size:,}; copy it again"
        )
    return needed > 0


def check_length(opened: Opened, field: str, declared: float, found: float) -> None:
    """Refuse a file, read to its end, that lasts `found` seconds and not `declared`, where its header knows that."""
    exact = opened.demuxer in ("matroska", "flac")
    if opened.demuxer == "mp3":
        frame = _read_at(opened.stream, after_tag(_read_at(opened.stream, 0, 10)), INFO_ENDS)
        # without one of these headers the length is only an estimate from the file's size
        exact = b"Xing" in frame or b"Info" in frame
    if exact and found < declared - EARLY:
        what = f"{opened.label} is {opened.what} of {declared:.2f} s, truncated or damaged at {found:.2f} s"
        raise RequestError(field, f"{what}; copy it again")


def doubt(opened: Opened) -> str | None:
    """Words for a file that may be truncated although its kind declares no size; None when nothing speaks for it."""
    stream = opened.stream
    here = stream.tell()
    size = stream.seek(0, 2)
    head, tail = _read_at(stream, 0, 197), _read_at(stream, max(0, size - 65_536), 65_536)
    stream.seek(here)
    if opened.demuxer == "mpegts":
        step = 192 if len(head) > 196 and head[4] == head[196] == 0x47 else 188
        broken = size % step != 0
    elif opened.demuxer == "ogg":
        broken = not _ends_with_last_page(tail)
    else:
        return None
    return f"{opened.label} does not end as {opened.what} should, it may be truncated" if broken else None


def _ends_with_last_page(tail: bytes) -> bool:
    """Whether an Ogg file ends with a whole page that is marked as the last of its stream."""
    at = tail.rfind(b"OggS")
    if at < 0 or len(tail) < at + 27 or not tail[at + 5] & 4:
        return False
    lengths = tail[at + 27 : at + 27 + tail[at + 26]]
    return len(tail) >= at + 27 + tail[at + 26] + sum(lengths)


def _declared_size(opened: Opened, size: int) -> int:
    stream = opened.stream
    if opened.demuxer in ("wav", "avi"):
        return _riff_size(stream)
    if opened.demuxer == "aiff":
        return int.from_bytes(_read_at(stream, 4, 4), "big") + 8
    if opened.demuxer == "mp4":
        return _boxes_size(stream, size)
    if opened.demuxer == "matroska":
        return _segment_size(stream)
    return 0


def _read_at(stream: BinaryIO, position: int, count: int) -> bytes:
    stream.seek(position)
    return stream.read(count)


def _riff_size(stream: BinaryIO) -> int:
    head = _read_at(stream, 0, 28)
    if head[:4] == b"RF64":
        return int.from_bytes(head[20:28], "little") + 8 if head[12:16] == b"ds64" else 0
    # a writer that cannot seek back leaves the size at one of these
    return 0 if head[4:8] in (b"\xff\xff\xff\xff", b"\0\0\0\0") else int.from_bytes(head[4:8], "little") + 8


def _boxes_size(stream: BinaryIO, size: int) -> int:
    """Where the last of an MP4's outermost boxes ends; what follows the known ones is no box."""
    position = 0
    for _ in range(MOST_BOXES):
        head = _read_at(stream, position, 16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if len(head) < 8 or kind not in _BOXES or length == 0:
            return min(position, size)
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:
            return min(position, size)
        position += length
        if position >= size:
            return position
    return 0


def _segment_size(stream: BinaryIO) -> int:
    """Where a Matroska file's segment ends, or 0 when a live writer left it open."""
    head = _read_at(stream, 0, HEAD)
    position = 0
    for element in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):
        if head[position : position + 4] != element:
            return 0
        size, width = _ebml_size(head, position + 4)
        if size is None:
            return 0
        position += 4 + width + size
    return position


def _ebml_size(head: bytes, at: int) -> tuple[int | None, int]:
    """(value, bytes it takes) of a length at `at`; None when unknown."""
    if at >= len(head) or not head[at]:
        return None, 0
    width = 9 - head[at].bit_length()
    value = int.from_bytes(head[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), width
