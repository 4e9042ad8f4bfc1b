"""`Request` from and to the JSON of SPEC 11 (the body of `POST /v1/videos`, and `--request file.json`)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from .errors import RequestError
from .limits import FITS, REFERENCE_KINDS, check_choice, check_text, shown
from .policy_options import format_policy, parse_policy
from .request import Keyframe, Reference, Request, is_data

TOP = (
    *("task", "prompt", "conditions", "target", "seed", "num_inference_steps"),
    *("flow_shift", "audio_flow_shift", "noise", "policy"),
)
TARGET = ("short_edge", "aspect_ratio", "duration_seconds", "width", "height")
KEYFRAME = ("type", "uri", "role", "frame_index", "fit")
REFERENCE = ("type", "uri", "role", "start_time_seconds", "end_time_seconds")
DIGITS = 100  # of a whole number; Python converts no more than some thousands
# Commas and opening brackets, in its texts too: a value of JSON takes memory by the hundred bytes, and no request that
# can be run has more than a prompt's characters of them. Media in base64 have none.
MARKS, MOST_MARKS = ",[{", 20_000
ROLES = ("keyframe", "reference")
_GUIDANCE = "the released model is guidance distilled; there is nothing to scale"
_LENGTH = "the length is target.duration_seconds"
_ONE = "a request makes one video; send several requests with several seeds"
_ENLARGE = "the model makes what target asks for; there is no second pass"
# Fields that other servers take and that mean nothing here, with the reason.
REFUSED = {
    "guidance_scale": _GUIDANCE,
    "guidance_scale_2": _GUIDANCE,
    "cfg_scale": _GUIDANCE,
    "true_cfg_scale": _GUIDANCE,
    "negative_prompt": "the released model has no negative branch; say what you want in the prompt",
    "num_frames": _LENGTH,
    "frames": _LENGTH,
    "seconds": _LENGTH,
    "fps": "the model always makes 24 frames a second",
    "size": "the canvas is target.width and target.height, or target.aspect_ratio",
    "n": _ONE,
    "num_outputs_per_prompt": _ONE,
    "num_videos_per_prompt": _ONE,
    "quality": "there is one model; num_inference_steps and the canvas decide",
    "model": "the server runs the weights it was started with",
    "input_reference": "media are listed in conditions",
    "image": "media are listed in conditions",
    "strength": "references enter whole; there is nothing to weigh",
    "scheduler": "the checkpoint has one schedule; its shifts are flow_shift and audio_flow_shift",
    "reference_resize_mode": "references follow the released rule",
    "upscale": _ENLARGE,
    "enable_upscaling": _ENLARGE,
    "enable_frame_interpolation": _ENLARGE,
    **dict.fromkeys(TARGET, "it belongs inside target"),
}
# Where `Request`'s own fields stand in the JSON.
PLACES = {
    "duration": "target.duration_seconds",
    "aspect": "target.aspect_ratio",
    "size": "target.width",
    "size.width": "target.width",
    "size.height": "target.height",
    "short_edge": "target.short_edge",
    "steps": "num_inference_steps",
    "shifts": "flow_shift",
    "shifts.video": "flow_shift",
    "shifts.audio": "audio_flow_shift",
    "keyframes": "conditions",
    "references": "conditions",
}
ITEM_PLACES = {"image": "uri", "source": "uri", "index": "frame_index", "kind": "type"}
ITEM_PLACES |= {"start": "start_time_seconds", "end": "end_time_seconds", "fit": "fit"}


def json_place(name: str, conditions: Any = None) -> str:
    """The JSON path of one of `Request`'s fields: `references[1].source` is `conditions[2].uri` after a keyframe.

    `conditions` are the JSON's; without them all are taken to be of one role, as they are in every task.
    """
    found = re.fullmatch(r"(keyframes|references)\[(\d+)\](?:\.(\w+))?", name)
    if found is None:
        return PLACES.get(name, name)
    number = int(found[2])
    if conditions is not None:
        role = found[1].removesuffix("s")
        items = conditions if isinstance(conditions, list) else []
        places = [i for i, item in enumerate(items) if isinstance(item, Mapping) and item.get("role") == role]
        if number >= len(places):
            return "conditions"
        number = places[number]
    rest = f".{ITEM_PLACES.get(found[3], found[3])}" if found[3] else ""
    return f"conditions[{number}]{rest}"


def named_in_json(error: RequestError, conditions: Any = None) -> RequestError:
    """`error` with its field where `json_place` finds it."""
    return _renamed(error, json_place(error.field, conditions))


def named_in_request(error: RequestError, request: Request) -> RequestError:
    """The other way round: a server's `error`, which speaks of JSON, with the field of `request` that it means."""
    names = [name for name in PLACES if name not in ("size", "shifts", "keyframes", "references")]
    for role, medium, items in (
        ("keyframes", "image", request.keyframes),
        ("references", "source", request.references),
    ):
        names += [role] * bool(items)
        for i in range(len(items)):
            rests = (medium, *ITEM_PLACES.keys() - {"image", "source"})
            names += [f"{role}[{i}]", *(f"{role}[{i}].{rest}" for rest in rests)]
    return _renamed(error, next((name for name in names if json_place(name) == error.field), error.field))


def _renamed(error: RequestError, field: str) -> RequestError:
    made = RequestError(field, error.message)
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


def parse_json(text: str | bytes) -> Request:
    """A `Request` from JSON text; see `parse_object` and `request_from_json`. Raises RequestError."""
    return request_from_json(parse_object(text))


def parse_object(text: str | bytes, name: str = "request") -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN, infinities and anything else are refused. RequestError names `name`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in items:
            if key in made:
                raise RequestError(_printable(key), "stands twice in one JSON object; keep one")
            made[key] = value
        return made

    def constant(word: str) -> Any:
        raise RequestError(name, f"holds {word}, which is not a JSON number; leave the field out")

    def whole(text: str) -> int:
        if len(text) > DIGITS:
            raise RequestError(name, f"holds a number of {len(text):,} digits; no field takes more than {DIGITS}")
        return int(text)

    try:
        # UTF-8 and nothing else (RFC 8259): left to itself, json.loads guesses UTF-16 and UTF-32 from bytes
        text = text.decode() if isinstance(text, bytes) else text
        if sum(map(text.count, MARKS)) > MOST_MARKS:
            raise RequestError(name, f"holds more than {MOST_MARKS:,} commas and brackets; a request has some dozens")
        body = json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_constant=constant)
    except UnicodeDecodeError:
        raise RequestError(name, "is not UTF-8; save or send the JSON in that encoding") from None
    except RecursionError:
        raise RequestError(name, "holds objects or lists nested too deeply; a request has three levels") from None
    except ValueError as error:
        raise RequestError(name, f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(name, f"got {type(body).__name__}; a JSON object is needed")
    return body


def request_from_json(body: Any) -> Request:
    """A `Request` from a decoded JSON object; unknown fields are refused by name. Raises RequestError."""
    body = _object("request", body)
    _known("", body, TOP, REFUSED)
    target = _object("target", body.get("target", {}))
    _known("target.", target, TARGET, REFUSED)
    conditions = body.get("conditions", [])
    if not isinstance(conditions, list):
        raise RequestError("conditions", f"got {type(conditions).__name__}; a list is needed")
    made = [_condition(i, condition) for i, condition in enumerate(conditions)]
    if "prompt" not in body:
        raise RequestError("prompt", "is missing; describe the picture and the sound")
    given: dict[str, Any] = {"prompt": body["prompt"]}
    for name, source, key in (
        ("task", body, "task"),
        ("duration", target, "duration_seconds"),
        ("aspect", target, "aspect_ratio"),
        ("short_edge", target, "short_edge"),
        ("seed", body, "seed"),
        ("steps", body, "num_inference_steps"),
        ("noise", body, "noise"),
        ("policy", body, "policy"),
    ):
        if key in source:
            given[name] = source[key]
    if "policy" in given:
        check_text("policy", given["policy"])
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
    body["conditions"] = []
    for keyframe in request.keyframes:
        item = {"type": "image", "uri": _address(keyframe.image), "role": "keyframe", "frame_index": keyframe.index}
        body["conditions"].append(item if keyframe.fit == "auto" else item | {"fit": keyframe.fit})
    for reference in request.references:
        item = {"type": reference.kind, "uri": _address(reference.source), "role": "reference"}
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
    policy = format_policy(parse_policy(request.policy))
    if policy != "every-step":
        body["policy"] = policy
    return body


def _address(source: Any) -> str:
    if is_data(source):
        return f"data: ({len(source)} characters)"
    return str(source) if isinstance(source, str) or hasattr(source, "__fspath__") else f"({type(source).__name__})"


def _object(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(field, f"got {type(value).__name__}; a JSON object is needed")
    return value


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) < 60 else shown(name)


def _known(
    prefix: str, given: Mapping[str, Any], allowed: tuple[str, ...], refused: Mapping[str, str] | None = None
) -> None:
    for name, value in given.items():
        field = f"{prefix}{_printable(name)}"
        if name in allowed:
            if value is None:
                raise RequestError(field, "is null; leave it out, or give a value")
        elif refused and name in refused:
            raise RequestError(field, f"is not taken: {refused[name]}")
        else:
            near = difflib.get_close_matches(name[:60], allowed, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(allowed)}"
            raise RequestError(field, f"is not a field; {meant}")


def _condition(i: int, condition: Any) -> Keyframe | Reference:
    field = f"conditions[{i}]"
    role = _object(field, condition).get("role")
    check_choice(f"{field}.role", role, ROLES)
    keyframe = role == "keyframe"
    _known(f"{field}.", condition, KEYFRAME if keyframe else REFERENCE)
    uri = condition.get("uri")
    check_text(f"{field}.uri", uri)
    if not uri.strip():
        raise RequestError(f"{field}.uri", f"got {shown(uri)}; a path, a file: or a data: address is needed")
    check_choice(f"{field}.type", condition.get("type"), ("image",) if keyframe else REFERENCE_KINDS)
    if keyframe:
        fit = condition.get("fit", "auto")
        check_choice(f"{field}.frame_index", condition.get("frame_index"), (0, -1))
        check_choice(f"{field}.fit", fit, FITS)
        return Keyframe(uri, condition["frame_index"], fit)
    return Reference(condition["type"], uri, condition.get("start_time_seconds"), condition.get("end_time_seconds"))


def _pair(given: Mapping[str, Any], first: str, second: str, prefix: str) -> tuple[Any, Any] | None:
    if first not in given and second not in given:
        return None
    for name in (first, second):
        if name not in given:
            raise RequestError(f"{prefix}{name}", f"is missing; {first} and {second} come together")
    return given[first], given[second]
