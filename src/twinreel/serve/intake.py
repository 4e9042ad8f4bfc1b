"""From what a client sends to the SPEC 11 body of a job: names of other APIs translated, media brought to files.

Errors name the field as the client wrote it: `Names` remembers where each of our fields came from.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..limits import REFERENCES_IN_ALL, Range, check_number, check_text, shown
from ..media.addresses import MEDIA, PICTURE
from ..request_json import REFUSED, TOP, json_place, parse_object
from .fetch import Fetcher
from .uploads import Form, Limits, Spool, TooLarge, Upload

PRIORITIES = (-100, 100)
TEXTS = ("task", "prompt", "noise", "policy", "model", "size", "aspect_ratio", "seconds")
NUMBERS: tuple[str, ...] = (
    "seed",
    "num_inference_steps",
    "flow_shift",
    "audio_flow_shift",
    "n",
    "priority",
    "duration_seconds",
)
NUMBERS += ("short_edge", "width", "height")
INSIDE_TARGET = ("aspect_ratio", "duration_seconds", "short_edge", "width", "height")
FIRST, LAST, REFERENCE = ("first_frame", "input_reference"), "last_frame", "reference"
OWN = ("n", "priority", "model", "seconds", "size", *FIRST, LAST)  # of a JSON body, besides a request's


@dataclass
class Order:
    """A translated request: the SPEC 11 `body`, variants, priority; `names` gives the client's own field names."""

    body: dict[str, Any]
    n: int = 1
    priority: int = 0
    uploads: dict[str, Upload] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def named(self, error: RequestError) -> RequestError:
        """`error` with its field as the client wrote it."""
        # a name that stands in the body is the client's own, such as that of a field there is not
        place = error.field if error.field in self.body else json_place(error.field, self.body.get("conditions", []))
        for ours, theirs in self.names.items():
            if place == ours or place.startswith((f"{ours}.", f"{ours}[")):
                place = theirs
                break
        return RequestError(place, error.message)


def from_json(body: dict[str, Any], model: str) -> Order:
    """An order from a JSON object with SPEC 11's fields, ours and OpenAI's. Raises RequestError."""
    body = dict(body)
    known = (*TOP, *OWN)
    for name in body:
        if name not in known and name not in REFUSED:  # those have reasons of their own
            raise RequestError(shown(name)[1:-1], f"is not a field; known are {', '.join(known)}")
    order = Order(body)
    order.n = body.pop("n", 1)
    check_number("n", order.n, whole=True)
    order.priority = body.pop("priority", 0)
    Range(*PRIORITIES, whole=True).check("priority", order.priority)
    named = body.pop("model", None)
    if named not in (None, model):
        raise RequestError("model", f"got {shown(named)}; this server runs {model!r}, or leave it out")
    if "seconds" in body:
        _into_target(order, "seconds", {"duration_seconds": _seconds(body.pop("seconds"))})
    if "size" in body:
        width, height = _size(body.pop("size"))
        _into_target(order, "size", {"width": width, "height": height})
    for name in (*FIRST, LAST):
        if name in body:
            index = -1 if name == LAST else 0
            _add(order, name, {"type": "image", "uri": body.pop(name), "role": "keyframe", "frame_index": index})
    body.setdefault("conditions", [])
    return order


def from_form(form: Form, model: str) -> Order:
    """An order from a multipart body: a part `request` with JSON, or flat fields and files. Raises RequestError."""
    fields: dict[str, str] = {}
    for name, value in form.fields:
        if name in fields:
            raise RequestError(name, "was sent twice; keep one")
        fields[name] = value
    if "request" in fields:
        extra = next((name for name in fields if name != "request"), None)
        if extra is not None:
            raise RequestError(extra, "goes into the part 'request', which says everything")
        order = from_json(parse_object(fields["request"]), model)
        for upload in form.files:
            if upload.part in order.uploads:
                raise RequestError(upload.part, "was sent twice; name the parts apart")
            order.uploads[upload.part] = upload
        return order
    return _from_flat(fields, form.files, model)


def _from_flat(fields: Mapping[str, str], files: Sequence[Upload], model: str) -> Order:
    body: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in TEXTS and name not in NUMBERS:
            known = ", ".join((*TEXTS, *NUMBERS, *FIRST, LAST, REFERENCE))
            raise RequestError(shown(name)[1:-1], f"is not a field; known are {known}")
        body[name] = _number(name, value) if name in NUMBERS else value
    inside = {name: body.pop(name) for name in INSIDE_TARGET if name in body}
    if inside:
        body["target"] = inside
    order = from_json(body, model)
    order.names |= {f"target.{name}": name for name in inside}
    firsts = [upload for upload in files if upload.part in FIRST]
    lasts = [upload for upload in files if upload.part == LAST]
    for upload in (*firsts, *lasts):
        index = -1 if upload.part == LAST else 0
        _attach(order, upload, {"type": "image", "role": "keyframe", "frame_index": index})
    for upload in files:
        if upload.part == REFERENCE:
            kind = {PICTURE: "image"}.get(upload.family) or ("audio" if "sound" in upload.what else "video")
            _attach(order, upload, {"type": kind, "role": "reference"})
        elif upload.part not in (*FIRST, LAST):
            raise RequestError(upload.part, f"is not a file part; use {', '.join((*FIRST, LAST, REFERENCE))}")
    return order


def _attach(order: Order, upload: Upload, condition: dict[str, Any]) -> None:
    key = f"{upload.part}-{len(order.uploads)}"
    order.uploads[key] = upload
    name = upload.part
    if name == REFERENCE:
        name = f"{REFERENCE}[{sum(item.part == REFERENCE for item in order.uploads.values()) - 1}]"
    _add(order, name, condition | {"uri": f"upload:{key}"})


def _add(order: Order, name: str, condition: dict[str, Any]) -> None:
    conditions = order.body.setdefault("conditions", [])
    if not isinstance(conditions, list):
        raise RequestError("conditions", f"got {type(conditions).__name__}; a list is needed")
    index = condition.get("frame_index")
    if index is not None and any(isinstance(item, Mapping) and item.get("frame_index") == index for item in conditions):
        raise RequestError(name, "is a frame that was given before; keep one")
    conditions = order.body["conditions"] = [*conditions, condition]
    order.names[f"conditions[{len(conditions) - 1}]"] = name


def _into_target(order: Order, name: str, values: dict[str, Any]) -> None:
    target = order.body.get("target", {})
    if not isinstance(target, Mapping):
        raise RequestError("target", f"got {type(target).__name__}; a JSON object is needed")
    for key in values:
        if key in target:
            raise RequestError(name, f"says the same as target.{key}; keep one")
        order.names[f"target.{key}"] = name
    order.body["target"] = {**target, **values}


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        return _number("seconds", value)
    check_number("seconds", value)
    return value


def _size(value: Any) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", value, re.ASCII) if isinstance(value, str) else None
    if found is None:
        raise RequestError("size", f"got {shown(value)}; write WIDTHxHEIGHT, such as 1344x768")
    return int(found[1]), int(found[2])


def _number(name: str, text: str) -> int | float:
    if not re.fullmatch(r"-?\d{1,20}(\.\d{1,20})?", text.strip(), re.ASCII):
        raise RequestError(name, f"got {shown(text)}; a number is needed")
    return float(text) if "." in text else int(text)


class Placer:
    """Brings an order's media into files `in-N` of `folder`; `spooled` holds those that the multipart reader made."""

    def __init__(self, folder: Path, limits: Limits, fetcher: Fetcher) -> None:
        self._folder, self._limits, self._fetcher = folder, limits, fetcher
        self._total = 0
        self.made: list[Upload] = []

    def place(self, order: Order) -> None:
        """Replace every address by `input:N`. Raises RequestError, TooLarge, OSError."""
        self._total = sum(upload.size for upload in order.uploads.values())
        conditions = order.body.get("conditions")
        if not isinstance(conditions, list):
            raise RequestError("conditions", f"got {type(conditions).__name__}; a list is needed")
        if len(conditions) > REFERENCES_IN_ALL:
            raise RequestError("conditions", f"got {len(conditions)}; at most {REFERENCES_IN_ALL} in all")
        used, placed = set(), []
        for i, condition in enumerate(conditions):
            if not isinstance(condition, Mapping):
                raise RequestError(f"conditions[{i}]", f"got {type(condition).__name__}; a JSON object is needed")
            place = f"conditions[{i}].uri"
            address = condition.get("uri")
            check_text(place, address)
            upload = self._bring(str(address), place, order)
            used.add(upload.part)
            upload = self._numbered(upload, i)
            self.made.append(upload)
            placed.append({**condition, "uri": f"input:{i}"})
        for part in order.uploads:
            if part not in used and order.uploads[part].part not in used:
                raise RequestError(part, "was uploaded, but no condition names it; leave it out")
        order.body["conditions"] = placed

    def _bring(self, address: str, place: str, order: Order) -> Upload:
        scheme = address.partition(":")[0].lower() if ":" in address else ""
        if scheme == "upload":
            upload = order.uploads.get(address.removeprefix("upload:"))
            if upload is None:
                raise RequestError(place, f"names {shown(address)}; no file part of that name was sent")
            return upload
        if scheme == "data":
            return self._data(address, place)
        if scheme in ("http", "https"):
            return self._remote(address, place)
        raise RequestError(
            place,
            "is not taken: the server's paths are not read; use upload:PART with a file part, or a data: address",
        )

    def _data(self, address: str, place: str) -> Upload:
        header, comma, text = address.partition(",")
        if not comma or not header.endswith(";base64"):
            raise RequestError(place, "is a data: address without ';base64,'; write data:TYPE;base64,TEXT")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(place, f"is not base64 ({error}); encode the file's bytes again") from None
        return self._spool(place, lambda take: take(data))

    def _remote(self, address: str, place: str) -> Upload:
        most = self._limits.bytes - self._total
        return self._spool(place, lambda take: self._fetcher.fetch(address, take, place, most))

    def _spool(self, place: str, send: Callable[[Callable[[bytes], None]], object]) -> Upload:
        spool = Spool(place, self._folder / f"made-{len(self.made)}", self._limits, place)

        def take(data: bytes) -> None:
            self._total += len(data)
            if self._total > self._limits.bytes:
                raise TooLarge(f"the media are larger than {self._limits.bytes >> 20:,} MiB together")
            self._limits.room()
            spool.write(data)

        try:
            send(take)
            return spool.end()
        finally:
            spool.close()

    def _numbered(self, upload: Upload, number: int) -> Upload:
        """The medium under its place among the conditions; one part may serve several conditions."""
        target = self._folder / f"condition-{number}"
        target.hardlink_to(upload.path)
        return Upload(upload.part, target, upload.family, upload.what, upload.size, upload.sha256)


def kind_of_file(family: str, what: str) -> str:
    """The media type to send a stored medium with: what the browser may show, never what a client claimed."""
    known = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WebP": "image/webp", "BMP": "image/bmp"}
    known |= {"MP4": "video/mp4", "WebM": "video/webm", "WAV": "audio/wav", "MP3": "audio/mpeg", "Ogg": "audio/ogg"}
    known |= {"FLAC": "audio/flac", "AAC": "audio/aac"}
    found = next((kind for word, kind in known.items() if word in what), None)
    return found if found and family in (PICTURE, MEDIA) else "application/octet-stream"
