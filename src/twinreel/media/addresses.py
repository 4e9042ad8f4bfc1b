"""From a path, a `file:` or a `data:` address to an open byte stream whose kind is judged by content, not by name."""

from __future__ import annotations

import base64
import binascii
import io
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from ..errors import RequestError
from ..limits import shown
from ..policy_options import parse_policy
from ..request import Request, is_data

PICTURE, MEDIA, OTHER = "picture", "media", "other"
HEAD = 4096


@dataclass(frozen=True)
class Opened:
    """An open source: `stream` at byte 0, `label` for messages, `family` picture, media or other, what it is in words.

    `demuxer` is the one FFmpeg demuxer, or Pillow format, that may read it: a fixed list, so that no playlist or script
    opens other files.
    """

    stream: BinaryIO
    label: str
    family: str
    what: str
    demuxer: str | None = None


def files_of(request: Request) -> list[Path]:
    """The files on this machine that `request` names, its media and its policy's profile; reads none of them."""
    sources = [item.image for item in request.keyframes] + [item.source for item in request.references]
    # a PIL image that has not read its pixels yet knows its file
    names = [
        source if isinstance(source, str | os.PathLike) else getattr(source, "filename", None) for source in sources
    ]
    names.append(getattr(parse_policy(request.policy), "profile", None))
    files = []
    for text in map(os.fspath, filter(None, names)):
        if isinstance(text, str) and "\0" not in text and not is_data(text):
            with suppress(RequestError):  # what cannot be opened is refused, in better words, where it is
                files.append(path_of(text, "source"))
    return files


def open_address(address: str | os.PathLike[str], field: str) -> Opened:
    """Open `address`; RequestError names `field`, says what was found and what to do."""
    text = os.fspath(address)
    if not isinstance(text, str) or not text:
        raise RequestError(field, f"got {text!r}; give a path, or a file: or data: address, as text")
    if is_data(text):
        return _judge(io.BytesIO(_data_bytes(text, field)), "the data: address", field)
    path = path_of(text, field)
    try:
        if not path.exists():
            raise RequestError(field, f"no file at {path}; check the path (paths are relative to {Path.cwd()})")
        # before opening: that would wait for a pipe's writer, and may move a device
        if not path.is_file():
            raise RequestError(field, f"{path} is {what_is(path)}, not a file; give a picture, clip or sound")
        return _judge(path.open("rb"), str(path), field)
    except (OSError, ValueError) as error:
        raise RequestError(field, f"cannot open {text[:200]!r} ({error}); check its name and permissions") from None


def what_is(path: Path) -> str:
    """A word for what is there and no file."""
    kinds = {"a folder": path.is_dir, "a pipe": path.is_fifo, "a socket": path.is_socket}
    kinds |= {"a device": lambda: path.is_char_device() or path.is_block_device()}
    return next((words for words, is_kind in kinds.items() if is_kind()), "something else")


def path_of(text: str, field: str) -> Path:
    """The path that a path or a `file:` address names. RequestError for another address, whether or not a file is there."""
    scheme = text.split(":", 1)[0].lower() if ":" in text else ""
    if scheme == "file":
        try:
            parts = urlsplit(text)
        except ValueError:
            raise RequestError(field, f"got {shown(text)}, which is no address; use file:///absolute/path") from None
        if parts.netloc not in ("", "localhost"):
            raise RequestError(field, f"file: address on host {parts.netloc!r}; use file:///absolute/path")
        return Path(unquote(parts.path))
    if "://" in text:
        raise RequestError(field, f"{scheme}: addresses are not read; download it and give the path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise RequestError(
            field, f"no user {user[1:60]!r} has a home folder here; write ./{user[:60]} for a name"
        ) from None


def _data_bytes(text: str, field: str) -> bytes:
    header, comma, body = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RequestError(field, "data: address without ';base64,'; write data:<type>;base64,<base64 text>")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(field, f"data: address is not base64 ({error}); encode the file's bytes again") from None


def _judge(stream: BinaryIO, label: str, field: str) -> Opened:
    try:
        head = stream.read(HEAD)
        if not head:
            raise RequestError(field, f"{label} is empty (0 bytes); give a file that holds data")
        if behind := after_tag(head):
            stream.seek(behind)
            inner = judge(stream.read(HEAD))
            family, what, demuxer = inner if inner[2] in ("mp3", "aac", "flac") else judge(head)
        else:
            family, what, demuxer = judge(head)
        stream.seek(0)
    except (RequestError, OSError):
        stream.close()
        raise
    return Opened(stream, label, family, what, demuxer)


def after_tag(head: bytes) -> int:
    """Where the file itself begins behind an ID3 tag of titles and covers; 0 without one. `head`: 10 bytes at least."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    return 10 + sum((byte & 0x7F) << 7 * (3 - i) for i, byte in enumerate(head[6:10]))


def judge(head: bytes) -> tuple[str, str, str | None]:
    """(family, words, FFmpeg demuxer or Pillow format) of a file that begins with `head`."""
    for magic, what, form in _PICTURES:
        if head.startswith(magic):
            return PICTURE, what, form
    if head[:4] in (b"RIFF", b"RF64"):
        riff = {b"WAVE": (MEDIA, "a WAV sound", "wav"), b"AVI ": (MEDIA, "an AVI file", "avi"),
                b"WEBP": (PICTURE, "a WebP picture", "WEBP")}  # fmt: skip
        return riff.get(head[8:12], (OTHER, "a RIFF file of another kind", None))
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return MEDIA, "an AIFF sound", "aiff"
    if head[4:8] == b"ftyp" and head[8:12] in _STILLS:
        return PICTURE, *_STILLS[head[8:12]]
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"):
        return MEDIA, "an MP4 or MOV file", "mp4"
    for magic, what, form in _MEDIA:
        if head.startswith(magic):
            return MEDIA, what, form
    if _repeats(head, 0, 188) or _repeats(head, 4, 192):
        return MEDIA, "an MPEG transport stream", "mpegts"
    if len(head) > 3 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return _mpeg_sound(head)
    return OTHER, _words_for_other(head), None


def _repeats(head: bytes, first: int, step: int) -> bool:
    """Whether transport packets begin at `first` and then every `step` bytes, as far as the head shows."""
    marks = head[first : first + 5 * step : step]
    return len(head) > first + step and marks == b"\x47" * len(marks)


def _mpeg_sound(head: bytes) -> tuple[str, str, str | None]:
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    if head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 15 < 13:
        return MEDIA, "an AAC sound", "aac"
    # a byte order mark of UTF-16 text has the first eleven bits too
    if version != 1 and layer in (1, 2) and 0 < head[2] >> 4 < 15 and head[2] >> 2 & 3 < 3:
        return MEDIA, "an MP3 sound", "mp3"
    return OTHER, _words_for_other(head), None


# Order and names matter to no one but `judge`: the first match wins, each for exactly one reader.
_PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", "PNG"),
    (b"\xff\xd8\xff", "a JPEG picture", "JPEG"),
    (b"GIF8", "a GIF picture", "GIF"),
    (b"BM", "a BMP picture", "BMP"),
    (b"II*\0", "a TIFF picture", "TIFF"),
    (b"MM\0*", "a TIFF picture", "TIFF"),
)
_HEIF = ("an HEIF picture", "HEIF")
_STILLS = {b"avif": ("an AVIF picture", "AVIF"), b"avis": ("an AVIF picture", "AVIF"), b"heic": _HEIF, b"heix": _HEIF,
           b"heim": _HEIF, b"heis": _HEIF, b"hevc": _HEIF, b"mif1": _HEIF, b"msf1": _HEIF}  # fmt: skip
_MEDIA = (
    (b"ID3", "an MP3 sound", "mp3"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM file", "matroska"),
    (b"OggS", "an Ogg file", "ogg"),
    (b"fLaC", "a FLAC sound", "flac"),
    (b"FLV\1", "an FLV file", "flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a Windows Media file", "asf"),
    (b"\0\0\1\xba", "an MPEG program stream", "mpeg"),
)


def _words_for_other(head: bytes) -> str:
    # the head may end inside a character
    text = head.decode("utf-8", "ignore")
    if "\0" not in text and len(text.encode()) > len(head) - 4 and all(c.isprintable() or c.isspace() for c in text):
        return f"text ({text[:32].strip()!r}...)"
    return f"bytes of no known kind ({head[:8].hex(' ')})"
