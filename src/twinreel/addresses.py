"""From a path, a `file:` or a `data:` address to an open byte stream whose kind is judged by content, not by name."""

from __future__ import annotations

import base64
import binascii
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from .errors import RequestError

PICTURE, MEDIA, OTHER = "picture", "media", "other"
HEAD = 4096


@dataclass(frozen=True)
class Opened:
    """An open source: `stream` at byte 0, `label` for messages, `family` picture, media or other, what it is in words.

    `demuxer` is the one FFmpeg format that may read it: a fixed list, so that no playlist or script opens other files.
    """

    stream: BinaryIO
    label: str
    family: str
    what: str
    demuxer: str | None = None


def open_address(address: str | os.PathLike[str], field: str) -> Opened:
    """Open `address`; RequestError names `field`, says what was found and what to do."""
    text = os.fspath(address)
    if not isinstance(text, str) or not text:
        raise RequestError(field, "is an empty address; give a path, or a file: or data: address")
    if text.startswith("data:"):
        return _judge(io.BytesIO(_data_bytes(text, field)), "the data: address", field)
    path = _path_of(text, field)
    try:
        if not path.exists():
            raise RequestError(field, f"no file at {path}; check the path (paths are relative to {Path.cwd()})")
        if not path.is_file():
            raise RequestError(field, f"{path} is not a regular file; give a picture, clip or sound")
        return _judge(path.open("rb"), str(path), field)
    except (OSError, ValueError) as error:
        raise RequestError(field, f"cannot open {text[:200]!r} ({error}); check its name and permissions") from None


def _path_of(text: str, field: str) -> Path:
    scheme = text.split(":", 1)[0].lower() if ":" in text else ""
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise RequestError(field, f"file: address on host {parts.netloc!r}; use file:///absolute/path")
        return Path(unquote(parts.path))
    if "://" in text:
        raise RequestError(field, f"{scheme}: addresses are not read; download it and give the path")
    return Path(text).expanduser()


def _data_bytes(text: str, field: str) -> bytes:
    header, comma, body = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RequestError(field, "data: address without ';base64,'; write data:<type>;base64,<base64 text>")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(field, f"data: address is not base64 ({error}); encode the file's bytes again") from None


def _judge(stream: BinaryIO, label: str, field: str) -> Opened:
    head = stream.read(HEAD)
    stream.seek(0)
    family, what, demuxer = judge(head)
    if not head:
        stream.close()
        raise RequestError(field, f"{label} is empty (0 bytes); give a file that holds data")
    return Opened(stream, label, family, what, demuxer)


def judge(head: bytes) -> tuple[str, str, str | None]:
    """(family, words, FFmpeg demuxer) of a file that begins with `head`."""
    for magic, what in _PICTURES:
        if head.startswith(magic):
            return PICTURE, what, None
    if head[:4] in (b"RIFF", b"RF64"):
        riff = {b"WAVE": (MEDIA, "a WAV sound", "wav"), b"AVI ": (MEDIA, "an AVI file", "avi"),
                b"WEBP": (PICTURE, "a WebP picture", None)}  # fmt: skip
        return riff.get(head[8:12], (OTHER, "a RIFF file of another kind", None))
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1"):
        return PICTURE, "an AVIF or HEIF picture", None
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return MEDIA, "an MP4 or MOV file", "mp4"
    for magic, what, demuxer in _MEDIA:
        if head.startswith(magic):
            return MEDIA, what, demuxer
    if len(head) > 188 and head[0] == head[188] == 0x47:
        return MEDIA, "an MPEG transport stream", "mpegts"
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        adts = head[1] & 0x06 == 0
        return (MEDIA, "an AAC sound", "aac") if adts else (MEDIA, "an MP3 sound", "mp3")
    return OTHER, _words_for_other(head), None


_PICTURES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"BM", "a BMP picture"),
    (b"II*\0", "a TIFF picture"),
    (b"MM\0*", "a TIFF picture"),
)
_MEDIA = (
    (b"ID3", "an MP3 sound", "mp3"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM file", "matroska"),
    (b"OggS", "an Ogg file", "ogg"),
    (b"fLaC", "a FLAC sound", "flac"),
)


def _words_for_other(head: bytes) -> str:
    # the head may end inside a character
    text = head.decode("utf-8", "ignore")
    if "\0" not in text and len(text.encode()) > len(head) - 4 and all(c.isprintable() or c.isspace() for c in text):
        return f"text ({text[:32].strip()!r}...)"
    return f"bytes of no known kind ({head[:8].hex(' ')})"
