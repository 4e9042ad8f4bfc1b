"""`Request` from and to the JSON of SPEC 11 (the body of `POST /v1/videos`, and `--request file.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import RequestError
from .request import REFERENCE_KINDS, Keyframe, Reference, Request

_TOP = ("task", "prompt", "conditions", "target", "seed", "num_inference_steps", "flow_shift", "audio_flow_shift", "noise")
_TARGET = ("short_edge", "aspect_ratio", "duration_seconds", "width", "height")
_KEYFRAME = ("type", "uri", "role", "frame_index")
_REFERENCE = ("type", "uri", "role", "start_time_seconds", "end_time_seconds")
_REFUSED = {
    "guidance_scale": "the released model is guidance distilled; there is nothing to scale",
    "negative_prompt": "the released model has no negative branch; say what you want in the prompt",
    "num_frames": "the length is target.duration_seconds",
    "fps": "the model always makes 24 frames a second",
}


def parse_json(text: str | bytes) -> Request:
    """A `Request` from JSON text. Duplicate keys, NaN and infinities are refused. Raises RequestError."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        for key in keys:
            if keys.count(key) > 1:
                raise RequestError(key, "stands twice in one JSON object; keep one")
        return dict(items)

    def constant(name: str) -> Any:
        raise RequestError("request", f"holds {name}, which is not a JSON number")

    try:
        body = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("request", f"is not JSON: {error}") from None
    return request_from_json(body)


def request_from_json(body: Any) -> Request:
    """A `Request` from a decoded JSON object; unknown fields are refused by name. Raises RequestError."""
    body = _object("request", body)
    for name, reason in _REFUSED.items():
        if name in body:
            raise RequestError(name, f"is not taken: {reason}")
    _known("", body, _TOP)
    target = _object("target", body.get("target", {}))
    _known("target.", target, _TARGET)
    conditions = body.get("conditions", [])
    if not isinstance(conditions, list):
        raise RequestError("conditions", f"got {type(conditions).__name__}; a list is needed")
    made = [_condition(i, condition) for i, condition in enumerate(conditions)]
    given: dict[str, Any] = {"prompt": body.get("prompt", ""), "task": body.get("task", "auto")}
    for name, source, key in (
        ("duration", target, "duration_seconds"),
        ("aspect", target, "aspect_ratio"),
        ("short_edge", target, "short_edge"),
        ("seed", body, "seed"),
        ("steps", body, "num_inference_steps"),
        ("noise", body, "noise"),
    ):
        if source.get(key) is not None:
            given[name] = source[key]
    return Request(
        **given,
        keyframes=tuple(item for item in made if isinstance(item, Keyframe)),
        references=tuple(item for item in made if isinstance(item, Reference)),
        size=_pair(target, "width", "height", "target."),
        shifts=_pair(body, "flow_shift", "audio_flow_shift", ""),
    )


def request_to_json(request: Request) -> dict[str, Any]:
    """The JSON object of `request`; in-memory media are named by their type, since they have no address."""
    body: dict[str, Any] = {"task": request.resolved_task, "prompt": request.prompt}
    body["conditions"] = [
        {"type": "image", "uri": _address(k.image), "role": "keyframe", "frame_index": k.index}
        for k in request.keyframes
    ]
    for reference in request.references:
        item: dict[str, Any] = {"type": reference.kind, "uri": _address(reference.source), "role": "reference"}
        if reference.start is not None:
            item["start_time_seconds"] = reference.start
        if reference.end is not None:
            item["end_time_seconds"] = reference.end
        body["conditions"].append(item)
    target: dict[str, Any] = {"short_edge": request.short_edge, "duration_seconds": request.duration}
    target["aspect_ratio"] = request.aspect if request.size is None else None
    if request.size is not None:
        target["width"], target["height"] = request.size
    body["target"] = {key: value for key, value in target.items() if value is not None}
    body |= {"seed": request.seed, "num_inference_steps": request.steps, "noise": request.noise}
    if request.shifts is not None:
        body["flow_shift"], body["audio_flow_shift"] = request.shifts
    return body


def _address(source: Any) -> str:
    if isinstance(source, str) and source.startswith("data:"):
        return f"data: ({len(source)} characters)"
    return str(source) if isinstance(source, str) or hasattr(source, "__fspath__") else f"({type(source).__name__})"


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(field, f"got {type(value).__name__}; a JSON object is needed")
    return value


def _known(prefix: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise RequestError(f"{prefix}{name}", f"is not a field; known are {', '.join(allowed)}")


def _condition(i: int, condition: Any) -> Keyframe | Reference:
    field = f"conditions[{i}]"
    role = _object(field, condition).get("role")
    if role not in ("keyframe", "reference"):
        raise RequestError(f"{field}.role", f"got {role!r}; use keyframe or reference")
    keyframe = role == "keyframe"
    _known(f"{field}.", condition, _KEYFRAME if keyframe else _REFERENCE)
    uri = condition.get("uri")
    if not isinstance(uri, str) or not uri:
        raise RequestError(f"{field}.uri", f"got {uri!r}; a path, a file: or a data: address is needed")
    kind = condition.get("type")
    if keyframe:
        if kind != "image":
            raise RequestError(f"{field}.type", f"got {kind!r}; a keyframe is an image")
        index = condition.get("frame_index")
        if isinstance(index, bool) or index not in (0, -1):
            raise RequestError(f"{field}.frame_index", f"got {index!r}; use 0 (first) or -1 (last)")
        return Keyframe(uri, index)
    if kind not in REFERENCE_KINDS:
        raise RequestError(f"{field}.type", f"got {kind!r}; use {', '.join(REFERENCE_KINDS)}")
    return Reference(kind, uri, condition.get("start_time_seconds"), condition.get("end_time_seconds"))


def _pair(given: Mapping[str, Any], first: str, second: str, prefix: str) -> tuple[Any, Any] | None:
    a, b = given.get(first), given.get(second)
    if a is None and b is None:
        return None
    if a is None or b is None:
        missing = first if a is None else second
        raise RequestError(f"{prefix}{missing}", f"is missing; {first} and {second} come together")
    return a, b
