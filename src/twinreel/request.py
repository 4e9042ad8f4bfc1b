"""What a person asks for: one frozen `Request`, its limits, and the JSON form of it (SPEC 11).

Nothing here reads a file or loads torch. `check_request` refuses what cannot be run before any medium is opened;
`plan.make_plan` refuses what only the media themselves can show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .spec import Spec

TASKS = ("t2va", "fl2va", "ref2va")
REFERENCE_KINDS = ("image", "video", "audio", "video_audio")
NOISE_SCHEMES = ("official", "sequential")
ASPECTS: Mapping[str, tuple[int, int]] = {
    "21:9": (21, 9),
    "16:9": (16, 9),
    "4:3": (4, 3),
    "1:1": (1, 1),
    "3:4": (3, 4),
    "9:16": (9, 16),
}
DEFAULT_ASPECT = (16, 9)
DEFAULT_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """The model card's limits that do not depend on a checkpoint (counts, characters, ratios)."""

    prompt_characters: int = 7000
    images: int = 9
    videos: int = 3
    audios: int = 3
    references: int = 12
    min_ratio: float = 0.25
    max_ratio: float = 4.0
    min_steps: int = 2
    max_steps: int = 1000
    max_seed: int = 2**63 - 1


LIMITS = Limits()


@dataclass(frozen=True)
class Keyframe:
    """A picture the video must begin (`index` 0) or end (`index` -1) with.

    `image` is a path, a `file:` or `data:` address, a PIL image, a uint8 array `[H, W, 3]` or a `Picture`.
    """

    image: Any
    index: int = 0


@dataclass(frozen=True)
class Reference:
    """A picture, clip or sound the prompt speaks of, in the order given.

    `kind` is one of `REFERENCE_KINDS`; `video` takes a soundtrack along when there is one, `video_audio` insists on it.
    `source` is a path, a `file:` or `data:` address, or an in-memory `Picture`, `Clip` or `Sound`; `start` and `end`
    are seconds into a clip or sound.
    """

    kind: str
    source: Any
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Request:
    """One generation.

    Args:
        prompt: the text, used verbatim.
        task: `auto`, or one of `TASKS`; `auto` follows from what is given.
        keyframes: at most two, first before last.
        references: at most twelve, in the order their labels count.
        duration: seconds; None is the length of the only sound of a ref2va request, otherwise 5 s.
        aspect: `auto`, a named ratio or `W:H`. `auto` is the first keyframe's shape, otherwise 16:9.
        size: (width, height) in pixels instead of `aspect`.
        short_edge: pixels of the shorter side before the area cap; None is the checkpoint's own.
        steps: points of the sigma grid; `steps - 1` model calls.
        seed: of every random draw.
        shifts: (video, audio) sigma shifts; None is the checkpoint's own, (12, 3) for H3.
        noise: `official` or `sequential` (SPEC 6).
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

    def __post_init__(self) -> None:
        for name in ("keyframes", "references", "size", "shifts"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    @property
    def resolved_task(self) -> str:
        """The task `auto` stands for."""
        if self.task != "auto":
            return self.task
        return "ref2va" if self.references else "fl2va" if self.keyframes else "t2va"


def parse_aspect(text: str) -> tuple[float, float]:
    """(width, height) of a ratio written as a name of `ASPECTS` or as `W:H`. Raises RequestError."""
    if text in ASPECTS:
        return ASPECTS[text]
    parts = text.split(":") if isinstance(text, str) else []
    try:
        width, height = (float(part) for part in parts)
    except ValueError:
        raise RequestError("aspect", f"got {text!r}; use auto, one of {', '.join(ASPECTS)}, or W:H") from None
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise RequestError("aspect", f"got {text!r}; both sides must be positive")
    check_ratio("aspect", width, height)
    return width, height


def check_ratio(field: str, width: float, height: float) -> None:
    """Refuse a shape outside 1:4 to 4:1."""
    if not LIMITS.min_ratio <= width / height <= LIMITS.max_ratio:
        nearest = "4:1" if width > height else "1:4"
        raise RequestError(
            field, f"{width:g}x{height:g} is {width / height:.3f}:1; ratios go from 1:4 to 4:1, the nearest is {nearest}"
        )


def check_request(request: Request, spec: Spec) -> None:
    """Refuse what the request alone shows to be impossible. Raises RequestError naming the field; reads no medium."""
    _check_prompt(request.prompt)
    _check_task(request, spec)
    _check_keyframes(request)
    _check_references(request)
    _check_canvas(request, spec)
    _check_sampling(request, spec)


def _number(field: str, value: Any, *, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise RequestError(field, f"got {value!r}; a {'whole ' if whole else 'finite '}number is needed")


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, str):
        raise RequestError("prompt", f"got {type(prompt).__name__}; a string is needed")
    if not prompt.strip():
        raise RequestError("prompt", "is empty; describe the picture and the sound")
    if len(prompt) > LIMITS.prompt_characters:
        raise RequestError(
            "prompt", f"has {len(prompt)} characters; at most {LIMITS.prompt_characters}, so shorten it"
        )
    for position, character in enumerate(prompt):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            what = "a null byte" if character == "\0" else "a lone surrogate"
            raise RequestError("prompt", f"holds {what} at character {position}; remove it")


def _check_task(request: Request, spec: Spec) -> None:
    task = request.resolved_task
    if task not in TASKS:
        raise RequestError("task", f"got {request.task!r}; use auto, {', '.join(TASKS)}")
    if task not in spec.tasks:
        raise RequestError(
            "task", f"{task} needs weights that declare it; the loaded ones do {', '.join(spec.tasks)}"
        )
    if task != "fl2va" and request.keyframes:
        raise RequestError("keyframes", f"{task} takes none; use task fl2va, or give pictures as references")
    if task != "ref2va" and request.references:
        raise RequestError("references", f"{task} takes none; use task ref2va")
    if task == "fl2va" and not request.keyframes:
        raise RequestError("keyframes", "fl2va needs a first or a last frame; give one, or use task t2va")
    if task == "ref2va" and not request.references:
        raise RequestError("references", "ref2va needs at least one; give one, or use task t2va")


def _check_keyframes(request: Request) -> None:
    for i, keyframe in enumerate(request.keyframes):
        if not isinstance(keyframe, Keyframe):
            raise RequestError(f"keyframes[{i}]", f"got {type(keyframe).__name__}; a Keyframe is needed")
    indices = tuple(keyframe.index for keyframe in request.keyframes)
    if request.keyframes and indices not in ((0,), (-1,), (0, -1)):
        raise RequestError(
            "keyframes", f"got indices {list(indices)}; allowed are [0], [-1] and [0, -1], first before last"
        )


def _check_references(request: Request) -> None:
    kinds = []
    for i, reference in enumerate(request.references):
        field = f"references[{i}]"
        if not isinstance(reference, Reference):
            raise RequestError(field, f"got {type(reference).__name__}; a Reference is needed")
        if reference.kind not in REFERENCE_KINDS:
            raise RequestError(f"{field}.kind", f"got {reference.kind!r}; use {', '.join(REFERENCE_KINDS)}")
        for name, value in (("start", reference.start), ("end", reference.end)):
            if value is None:
                continue
            if reference.kind == "image":
                raise RequestError(f"{field}.{name}", "a picture has no time; leave it out")
            _number(f"{field}.{name}", value)
            if value < 0:
                raise RequestError(f"{field}.{name}", f"got {value}; seconds from 0 on")
        if reference.start is not None and reference.end is not None and reference.end <= reference.start:
            raise RequestError(f"{field}.end", f"{reference.end} is not after start {reference.start}")
        kinds.append("video" if reference.kind == "video_audio" else reference.kind)
    if len(kinds) > LIMITS.references:
        raise RequestError("references", f"got {len(kinds)}; at most {LIMITS.references} in all")
    for kind, most in (("image", LIMITS.images), ("video", LIMITS.videos), ("audio", LIMITS.audios)):
        if kinds.count(kind) > most:
            raise RequestError("references", f"got {kinds.count(kind)} of kind {kind}; at most {most}")
    if kinds and set(kinds) == {"audio"}:
        raise RequestError("references", "only sounds were given; add at least one image or video")


def _check_canvas(request: Request, spec: Spec) -> None:
    if request.aspect != "auto":
        parse_aspect(request.aspect)
    if request.short_edge is not None:
        _number("short_edge", request.short_edge, whole=True)
        if request.short_edge < spec.multiple:
            raise RequestError("short_edge", f"got {request.short_edge}; at least {spec.multiple} pixels")
    if request.size is None:
        return
    if request.aspect != "auto" or request.short_edge is not None:
        raise RequestError("size", "cannot be combined with aspect or short_edge; give one of them")
    if not isinstance(request.size, tuple) or len(request.size) != 2:
        raise RequestError("size", f"got {request.size!r}; give (width, height)")
    for value in request.size:
        _number("size", value, whole=True)
        if value <= 0 or value % spec.multiple:
            nearest = max(spec.multiple, round(value / spec.multiple) * spec.multiple)
            raise RequestError("size", f"{value} is not a multiple of {spec.multiple}; the nearest is {nearest}")
    check_ratio("size", *request.size)


def _check_sampling(request: Request, spec: Spec) -> None:
    world = spec.world
    if request.duration is not None:
        _number("duration", request.duration)
        if not world.min_seconds <= request.duration <= world.max_seconds:
            nearest = min(max(request.duration, world.min_seconds), world.max_seconds)
            raise RequestError(
                "duration",
                f"got {request.duration:g} s; from {world.min_seconds:g} to {world.max_seconds:g} s, "
                f"the nearest is {nearest:g}",
            )
    _number("steps", request.steps, whole=True)
    if not LIMITS.min_steps <= request.steps <= LIMITS.max_steps:
        raise RequestError("steps", f"got {request.steps}; from {LIMITS.min_steps} to {LIMITS.max_steps}")
    _number("seed", request.seed, whole=True)
    if not 0 <= request.seed <= LIMITS.max_seed:
        raise RequestError("seed", f"got {request.seed}; from 0 to {LIMITS.max_seed}")
    if request.shifts is not None:
        if not isinstance(request.shifts, Sequence) or len(request.shifts) != 2:
            raise RequestError("shifts", f"got {request.shifts!r}; give two numbers, video and audio")
        for value in request.shifts:
            _number("shifts", value)
            if value <= 0:
                raise RequestError("shifts", f"got {value}; shifts are positive")
    if request.noise not in NOISE_SCHEMES:
        raise RequestError("noise", f"got {request.noise!r}; use {' or '.join(NOISE_SCHEMES)}")
