"""Bodies read while they stream in: every limit is checked chunk by chunk, only small fields are held in memory."""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from ..errors import RequestError
from ..limits import REFERENCES_IN_ALL, shown
from ..media.addresses import HEAD, OTHER, PICTURE, judge

JSON_BYTES = 1 << 20  # of a request without its media
FIELD_BYTES = 64 << 10
FIELDS = 64
SIZE_HEAD = 256 << 10  # a picture that has not said its size by then is refused when it is read
NAME_CHARACTERS = 100
BOUNDARY_BYTES = 70  # RFC 2046
UTF8 = ("utf-8", "utf8", "us-ascii")
PLAIN = ("binary", "8bit", "7bit")  # transfer encodings that change nothing


class TooLarge(Exception):
    """A body beyond a limit; the message says which."""


class TooSlow(Exception):
    """The client went silent in the middle of its body."""


class Unreadable(Exception):
    """A body that is not what its content type says."""


@dataclass(frozen=True)
class Limits:
    """What a body may hold: bytes in all, pixels of a picture, files, seconds of silence; `room` raises OSError when
    the disk is nearly full."""

    bytes: int
    pixels: float
    idle: float
    room: Callable[[], None]
    files: int = REFERENCES_IN_ALL


@dataclass
class Upload:
    """One file that came in: where it lies, what it is (`family` of `addresses.judge`), and its hash."""

    part: str
    path: Path
    family: str = OTHER
    what: str = ""
    size: int = 0
    sha256: str = ""


@dataclass
class Form:
    """A read multipart body: fields in order, files in order."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    files: list[Upload] = field(default_factory=list)


async def patient(stream: AsyncIterator[bytes], idle: float) -> AsyncIterator[bytes]:
    """The chunks of a body; TooSlow after `idle` seconds without one."""
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), idle)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TooSlow(f"nothing came for {idle:g} s") from None
        yield chunk


async def read_whole(stream: AsyncIterator[bytes], idle: float, most: int) -> bytes:
    """A body of at most `most` bytes. Raises TooLarge, TooSlow."""
    body = bytearray()
    async for chunk in patient(stream, idle):
        body += chunk
        if len(body) > most:
            raise TooLarge(f"the body is larger than {most:,} bytes; send media as multipart/form-data")
    return bytes(body)


async def read_form(stream: AsyncIterator[bytes], content_type: str, folder: Path, limits: Limits) -> Form:
    """Read a multipart body, its files into `folder`. Raises TooLarge, TooSlow, Unreadable, RequestError, OSError."""
    boundary = header_options(content_type).get("boundary", b"")
    if not 1 <= len(boundary) <= BOUNDARY_BYTES:
        raise Unreadable(
            f"multipart/form-data with a boundary of {len(boundary)} bytes; 1 to {BOUNDARY_BYTES} are taken"
        )
    reader, came = _FormReader(folder, limits), 0
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for chunk in patient(stream, limits.idle):
            came += len(chunk)
            if came > limits.bytes + JSON_BYTES:  # whatever it is: between parts and behind the last one, too
                raise TooLarge(f"the body is larger than {limits.bytes >> 20:,} MiB")
            await asyncio.to_thread(parser.write, chunk)
        parser.finalize()
    except FormParserError as error:
        raise Unreadable(f"the multipart body is damaged: {error}") from None
    finally:
        reader.close()
    if not reader.ended:
        raise Unreadable("the multipart body ends in the middle")
    return reader.form


def header_options(value: str | bytes) -> dict[str, bytes]:
    """The parameters of a header such as a content type, their names in small letters."""
    # bytes, each of which the parser takes for a character: text beyond Latin-1 is more than it can write back
    data = value.encode("latin-1", "replace") if isinstance(value, str) else value
    return {name.decode("latin-1").lower(): text for name, text in parse_options_header(data)[1].items()}


def charset_of(content_type: str | bytes) -> str:
    """The character set that a content type names; UTF-8 where it names none."""
    return header_options(content_type).get("charset", b"utf-8").decode("latin-1").strip().lower()


class Spool:
    """Writes one medium to a file and refuses it as soon as its bytes show that it cannot be used."""

    def __init__(self, part: str, path: Path, limits: Limits, field: str) -> None:
        self.upload = Upload(part, path)
        self._limits, self._field = limits, field
        self._file: BinaryIO = path.open("wb")
        self._head: bytearray | None = bytearray()
        self._sized = False
        self._kind: str | None = None  # Pillow's name of the format
        self._sha = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Take the next bytes. Raises RequestError for what is no medium, or a picture too large."""
        self._file.write(data)
        self._sha.update(data)
        self.upload.size += len(data)
        if self._head is not None:
            self._head += data[: SIZE_HEAD - len(self._head)]
            if len(self._head) >= HEAD and not self.upload.what:
                self._judge()
            if self.upload.family == PICTURE and not self._sized:
                self._measure()
            if len(self._head) >= SIZE_HEAD:
                self._head = None

    def end(self) -> Upload:
        """Finish the file. Raises RequestError."""
        self.close()
        if not self.upload.size:
            raise RequestError(self._field, "is empty (0 bytes); send a file that holds data")
        if not self.upload.what:
            self._judge()
        if self.upload.family == PICTURE and not self._sized and self._head is not None:
            self._measure()
        self.upload.sha256 = self._sha.hexdigest()
        return self.upload

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _judge(self) -> None:
        family, what, self._kind = judge(bytes(self._head or b""))
        self.upload.family, self.upload.what = family, what
        if family == OTHER:
            raise RequestError(self._field, f"holds {what}; send a picture, clip or sound")

    def _measure(self) -> None:
        pixels = picture_pixels(bytes(self._head or b""), self._kind or "")
        if pixels is None:
            return
        self._sized = True
        if pixels > self._limits.pixels:
            raise RequestError(
                self._field,
                f"is a picture of {pixels / 1e6:.1f} million pixels; at most "
                f"{self._limits.pixels / 1e6:g} million are read, so scale it down",
            )


def picture_pixels(head: bytes, kind: str) -> int | None:
    """Pixels of the picture of Pillow's format `kind` that begins with `head`; None when that does not say yet.

    The one reader of the format is asked for the size in its head, and decodes nothing. `Image.open` would ask all of
    them, and has a limit of its own.
    """
    from PIL import Image

    from ..media.pictures import UNREADABLE

    Image.init()
    try:
        with Image.OPEN[kind][0](BytesIO(head), "") as picture:
            return math.prod(picture.size)
    except UNREADABLE:
        return None


class _FormReader:
    """The callbacks of the parser; they run in one thread at a time."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self.form, self.ended = Form(), False
        self._name, self._value, self._headers = bytearray(), bytearray(), dict[bytes, bytes]()
        self._part, self._text = "", bytearray()
        self._spool: Spool | None = None
        self._total = 0

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": lambda data, start, end: self._grow(self._name, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    def _grow(self, text: bytearray, data: bytes) -> None:
        text += data
        if len(text) > FIELD_BYTES:
            raise TooLarge("a header of a part is too long")

    def _part_begin(self) -> None:
        self._headers, self._spool, self._text = {}, None, bytearray()

    def _header_end(self) -> None:
        self._headers[bytes(self._name.lower())] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        options = header_options(self._headers.get(b"content-disposition", b""))
        try:
            self._part = options.get("name", b"").decode("utf-8")[:NAME_CHARACTERS]
        except UnicodeDecodeError:
            raise Unreadable("the name of a part is not UTF-8") from None
        if not self._part:
            raise Unreadable("a part has no name")
        coding = self._headers.get(b"content-transfer-encoding", b"binary").decode("latin-1").strip()
        if coding.lower() not in PLAIN:
            raise RequestError(
                self._part, f"has the Content-Transfer-Encoding {shown(coding)}; send the bytes themselves"
            )
        if "filename" in options:  # the name itself is not looked at: files are numbered
            if len(self.form.files) >= self._limits.files:
                raise TooLarge(f"more than {self._limits.files} files")
            path = self._folder / f"in-{len(self.form.files)}"
            self._spool = Spool(self._part, path, self._limits, self._part)
            return
        charset = charset_of(self._headers.get(b"content-type", b""))
        if charset not in UTF8:
            raise RequestError(self._part, f"has the character set {shown(charset)}; send UTF-8")
        if len(self.form.fields) >= FIELDS:
            raise TooLarge(f"more than {FIELDS} fields")

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._total += end - start
        if self._total > self._limits.bytes:
            raise TooLarge(f"the media are larger than {self._limits.bytes >> 20:,} MiB together")
        if self._spool is None:
            self._text += data[start:end]
            if len(self._text) > JSON_BYTES:
                raise TooLarge(f"the field {self._part!r} is larger than {JSON_BYTES:,} bytes")
        else:
            self._limits.room()
            self._spool.write(data[start:end])

    def _part_end(self) -> None:
        if self._spool is None:
            try:
                self.form.fields.append((self._part, self._text.decode("utf-8")))
            except UnicodeDecodeError:
                raise RequestError(self._part, "is not UTF-8 text") from None
        else:
            self.form.files.append(self._spool.end())
            self._spool = None

    def _end(self) -> None:
        self.ended = True


def make_room(folder: Path, spare: float) -> Callable[[], None]:
    """A check that raises OSError while the disk of `folder` has less than `spare` bytes left."""

    def room() -> None:
        free = shutil.disk_usage(folder).free
        if free < spare:
            raise OSError(28, f"the disk has {free / 2**30:.2f} GiB left, {spare / 2**30:.2f} GiB are kept spare")

    return room
