"""What a person asks for: one frozen `Request` and the checks that need no medium (SPEC 11).

Nothing here reads a file or loads torch. `check_request` refuses what cannot be run before any medium is opened;
`plan.make_plan` refuses what only the media themselves can show.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from . import limits
from .errors import RequestError
from .limits import check_choice, check_number, check_ratio, check_text, shown
from .plain import make_plain
from .policy_options import PolicyOptions, parse_policy
from .spec import Spec

# Why an address of this kind is not read; http(s) is, where the operator allows it.
SCHEMES_REFUSED = {
    "s3": "object stores need credentials that twinreel does not take",
    "gs": "object stores need credentials that twinreel does not take",
    "tar": "members of archives are not read",
    "ftp": "only http, https, file and data addresses are known",
}
REMOTE = ("http", "https")


@dataclass(frozen=True)
class Keyframe:
    """A picture the video must begin (`index` 0) or end (`index` -1) with.

    `image` is a path, a `file:` or `data:` address, a PIL image, a uint8 array `[H, W, 3]` or a `Picture`. `fit` is how
    it takes the canvas's shape: `stretch`, `cover` (scaled to cover it and cropped in the middle), or `auto`, the
    released rule: the first listed is stretched, the second covers (SPEC 4.4).
    """

    image: Any
    index: int = 0
    fit: str = "auto"

    def __post_init__(self) -> None:
        make_plain(self, "index")


@dataclass(frozen=True)
class Reference:
    """A picture, clip or sound the prompt speaks of, in the order given.

    `kind` is one of `limits.REFERENCE_KINDS`; `video` takes a soundtrack along when there is one, `video_audio` insists
    on it. `source` is a path, a `file:` or `data:` address, or an in-memory `Picture`, `Clip` or `Sound`; `start` and `end`
    are seconds into a clip or sound.
    """

    kind: str
    source: Any
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        make_plain(self, "start", "end")


@dataclass(frozen=True)
class Request:
    """One generation.

    Args:
        prompt: the text, used verbatim.
        task: `auto`, or one of `limits.TASKS`; `auto` follows from what is given.
        keyframes: at most two, first before last.
        references: at most twelve, in the order their labels count.
        duration: seconds; None is the length of the only sound of a ref2va request, otherwise 5 s.
        aspect: `auto` or `W:H`. `auto` is the first keyframe's shape, otherwise 16:9.
        size: (width, height) in pixels instead of `aspect`.
        short_edge: pixels of the shorter side before the area cap; None is the checkpoint's own.
        steps: points of the sigma grid; `steps - 1` model calls.
        seed: of every random draw.
        shifts: (video, audio) sigma shifts; None is the checkpoint's own, (12, 3) for H3.
        noise: `official` or `sequential` (SPEC 6).
        policy: which steps call the model: options of `policy_options` or their text, such as `forecast:balanced`.
    """

    prompt: str
    task: str = "auto"
    keyframes: tuple[Keyframe, ...] = ()
    references: tuple[Reference, ...] = ()
    duration: float | None = None
    aspect: str = "auto"
    size: tuple[int, int] | None = None
    short_edge: int | None = None
    steps: int = 50
    seed: int = 42
    shifts: tuple[float, float] | None = None
    noise: str = "official"
    policy: str | PolicyOptions = "every-step"

    def __post_init__(self) -> None:
        for name in ("keyframes", "references"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        make_plain(self, "duration", "size", "short_edge", "steps", "seed", "shifts")

    @property
    def resolved_task(self) -> str:
        """The task `auto` stands for."""
        if self.task != "auto":
            return self.task
        return "ref2va" if self.references else "fl2va" if self.keyframes else "t2va"


def is_data(source: Any) -> bool:
    """Whether a medium is given as a `data:` address, which holds it whole."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def parse_aspect(text: Any) -> tuple[float, float]:
    """(width, height) of a ratio written as `W:H`. Raises RequestError."""
    check_text("aspect", text)
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?):(\d{1,9}(?:\.\d{1,9})?)", text, re.ASCII)
    if not found:
        raise RequestError("aspect", f"got {shown(text)}; use {limits.ASPECT_WORDS}")
    width, height = float(found[1]), float(found[2])
    if width == 0 or height == 0:
        raise RequestError("aspect", f"got {shown(text)}; both sides must be above 0, as in {limits.DEFAULT_ASPECT}")
    check_ratio("aspect", width, height)
    return width, height


def check_request(request: Request, spec: Spec, *, allow_remote: bool = False) -> None:
    """Refuse what the request alone shows to be impossible. Raises RequestError naming the field; reads no medium."""
    check_form(request, allow_remote=allow_remote)
    if request.resolved_task not in spec.tasks:
        told = f"{request.resolved_task} needs weights that declare it; the loaded ones do {', '.join(spec.tasks)}"
        raise RequestError("task", told)
    _check_canvas(request, spec)
    _check_parts(request, spec)
    if request.duration is not None:
        limits.durations(spec.world).check("duration", request.duration)


def check_form(request: Request, *, allow_remote: bool = False) -> None:
    """Refuse what no weights could run. Raises RequestError as `check_request`."""
    if not isinstance(request, Request):
        raise RequestError(
            "request", f"got {type(request).__name__}; a Request is needed, or request_from_json of an object"
        )
    check_text("prompt", request.prompt)
    if not request.prompt.strip():
        raise RequestError("prompt", "is empty; describe the picture and the sound")
    if len(request.prompt) not in limits.PROMPT_CHARACTERS:
        raise RequestError(
            "prompt", f"has {len(request.prompt):,} characters; {limits.PROMPT_CHARACTERS}, so shorten it"
        )
    for name, kind in (("keyframes", Keyframe), ("references", Reference)):
        _check_items(name, getattr(request, name), kind)
    _check_task(request)
    _check_keyframes(request, allow_remote)
    _check_references(request, allow_remote)
    _check_shape(request)
    _check_sampling(request)


def check_address(field: str, source: Any, allow_remote: bool = False) -> None:
    """Refuse an address that cannot be opened here; a medium in memory passes. Whether a file is there shows later."""
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str):
        return
    check_text(field, source)
    if not source.strip():
        raise RequestError(field, "is empty; a path, a file: or a data: address is needed")
    found = re.match(r"([a-z][a-z0-9+.-]*)://|(tar):", source, re.IGNORECASE)
    scheme = (found[1] or found[2]).lower() if found else "file"
    if scheme in REMOTE and not allow_remote:
        raise RequestError(
            field, f"{scheme} addresses are fetched only with --allow-remote; download it and give the path"
        )
    if scheme not in ("file", *REMOTE):
        reason = SCHEMES_REFUSED.get(scheme, SCHEMES_REFUSED["ftp"])
        raise RequestError(field, f"{scheme}: addresses are refused: {reason}; download it and give the path")


def _check_items(name: str, items: Any, kind: type) -> None:
    if not isinstance(items, tuple):
        raise RequestError(name, f"got {type(items).__name__}; a list of {kind.__name__} is needed")
    for i, item in enumerate(items):
        if not isinstance(item, kind):
            raise RequestError(f"{name}[{i}]", f"got {type(item).__name__}; a {kind.__name__} is needed")


def _check_task(request: Request) -> None:
    check_choice("task", request.task, ("auto", *limits.TASKS))
    task = request.resolved_task
    if task != "fl2va" and request.keyframes:
        raise RequestError("keyframes", f"{task} takes none; use task fl2va, or give pictures as references")
    if task != "ref2va" and request.references:
        raise RequestError("references", f"{task} takes none; use task ref2va")
    if task == "fl2va" and not request.keyframes:
        raise RequestError("keyframes", "fl2va needs a first or a last frame; give one, or use task t2va")
    if task == "ref2va" and not request.references:
        raise RequestError("references", "ref2va needs at least one; give one, or use task t2va")


def _check_keyframes(request: Request, allow_remote: bool) -> None:
    for i, keyframe in enumerate(request.keyframes):
        check_number(f"keyframes[{i}].index", keyframe.index, whole=True)
        check_choice(f"keyframes[{i}].fit", keyframe.fit, limits.FITS)
        check_address(f"keyframes[{i}].image", keyframe.image, allow_remote)
    indices = tuple(keyframe.index for keyframe in request.keyframes)
    if request.keyframes and indices not in limits.KEYFRAME_INDICES:
        allowed = ", ".join(str(list(choice)) for choice in limits.KEYFRAME_INDICES)
        raise RequestError("keyframes", f"got indices {shown(list(indices))}; allowed are {allowed}, first before last")


def _check_references(request: Request, allow_remote: bool) -> None:
    kinds = []
    for i, reference in enumerate(request.references):
        field = f"references[{i}]"
        check_choice(f"{field}.kind", reference.kind, limits.REFERENCE_KINDS)
        check_address(f"{field}.source", reference.source, allow_remote)
        for name, value in (("start", reference.start), ("end", reference.end)):
            if value is None:
                continue
            if reference.kind == "image":
                raise RequestError(f"{field}.{name}", "a picture has no time; leave it out")
            limits.TIMES.check(f"{field}.{name}", value)
        if reference.end is not None and reference.end <= (reference.start or 0):
            raise RequestError(f"{field}.end", f"{reference.end:g} is not after start {reference.start or 0:g}")
        kinds.append("video" if reference.kind == "video_audio" else reference.kind)
    if len(kinds) > limits.REFERENCES_IN_ALL:
        raise RequestError("references", f"got {len(kinds)}; at most {limits.REFERENCES_IN_ALL} in all")
    for kind, most in limits.REFERENCES_OF_A_KIND.items():
        if kinds.count(kind) > most:
            raise RequestError("references", f"got {kinds.count(kind)} of kind {kind}; at most {most}")
    if kinds and set(kinds) == {"audio"}:
        raise RequestError("references", "only sounds were given; add at least one image or video")


def _check_shape(request: Request) -> None:
    if request.aspect != "auto":
        parse_aspect(request.aspect)
    if request.short_edge is not None:
        check_number("short_edge", request.short_edge, whole=True)
    if request.size is None:
        return
    if request.aspect != "auto" or request.short_edge is not None:
        raise RequestError("size", "cannot be combined with aspect or short_edge; give one of them")
    if not isinstance(request.size, tuple) or len(request.size) != 2:
        raise RequestError("size", f"got {shown(request.size)}; give (width, height)")
    for field, value in zip(("size.width", "size.height"), request.size, strict=True):
        check_number(field, value, whole=True)


def _check_canvas(request: Request, spec: Spec) -> None:
    if request.short_edge is not None:
        limits.sides(spec).check("short_edge", request.short_edge)
    if request.size is None:
        return
    for field, value in zip(("size.width", "size.height"), request.size, strict=True):
        limits.sides(spec).check(field, value)
        if value % spec.multiple:
            nearest = max(spec.multiple, round(value / spec.multiple) * spec.multiple)
            raise RequestError(field, f"{value} is not a multiple of {spec.multiple}; the nearest is {nearest}")
    check_ratio("size", *request.size)


def _check_parts(request: Request, spec: Spec) -> None:
    """Refuse a part of a clip or sound that is too short whatever its source holds."""
    least, seconds = limits.clip_frames(spec).low, limits.clip_seconds(spec.world)
    for i, reference in enumerate(request.references):
        start, end = limits.typed(reference.start or 0), reference.end
        if end is not None and limits.in_frames(limits.typed(end) - start) < least:
            lasts = f"{end:g} is {float(limits.typed(end) - start):g} s after start {float(start):g}"
            near = f"{float(start) + seconds.low:g}"
            raise RequestError(f"references[{i}].end", f"{lasts}; a clip lasts {seconds}, the nearest is {near}")


def _check_sampling(request: Request) -> None:
    if request.duration is not None:
        check_number("duration", request.duration)
    limits.STEPS.check("steps", request.steps)
    limits.SEEDS.check("seed", request.seed)
    if request.shifts is not None:
        if not isinstance(request.shifts, tuple) or len(request.shifts) != 2:
            raise RequestError("shifts", f"got {shown(request.shifts)}; give two numbers, video and audio")
        for field, value in zip(("shifts.video", "shifts.audio"), request.shifts, strict=True):
            limits.SHIFTS.check(field, value)
    check_choice("noise", request.noise, limits.NOISE_SCHEMES)
    parse_policy(request.policy)
