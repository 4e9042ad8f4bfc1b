"""The limits of a request, in one table (SPEC 4, 11): the errors, `--help`, the JSON schema and the server read it.

What belongs to a checkpoint (durations, canvases, lengths of clips) comes from its `World`; H3's values stand there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .errors import RequestError
from .spec import FPS, Spec, VideoVAESpec, World

TASKS = ("t2va", "fl2va", "ref2va")
REFERENCE_KINDS = ("image", "video", "audio", "video_audio")
NOISE_SCHEMES = ("official", "sequential")
FITS = ("auto", "stretch", "cover")
KEYFRAME_INDICES = ((0,), (-1,), (0, -1))
ASPECTS: Mapping[str, tuple[int, int]] = {
    "21:9": (21, 9),
    "16:9": (16, 9),
    "4:3": (4, 3),
    "1:1": (1, 1),
    "3:4": (3, 4),
    "9:16": (9, 16),
}
DEFAULT_ASPECT = "16:9"
DEFAULT_SECONDS = 5.0
NARROWEST, WIDEST = (1, 4), (4, 1)
REFERENCES_OF_A_KIND: Mapping[str, int] = {"image": 9, "video": 3, "audio": 3}
REFERENCES_IN_ALL = 12
SHOWN = 60  # characters of a refused value that an error repeats


@dataclass(frozen=True)
class Range:
    """A closed range of numbers; `whole` allows integers only. Reads `4 to 15 s` as text.

    `owned`: the loaded model sets it, and another one may have another.
    """

    low: float
    high: float
    unit: str = ""
    whole: bool = False
    owned: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if not self.unit:
            return f"{self.low} to {self.high}"
        low, high = (f"{side:,}" if self.whole else f"{side:g}" for side in (self.low, self.high))
        return f"{low} to {high} {self.unit}"

    def nearest(self, value: float) -> str:
        """The legal number closest to `value`, as text."""
        near = min(max(value, self.low), self.high)
        return str(near) if self.whole else f"{near:g}"

    def check(self, field: str, value: Any) -> None:
        """RequestError unless `value` is a number of the right kind inside the range."""
        check_number(field, value, whole=self.whole)
        if value not in self:
            rule = f"this model's limit is {self}" if self.owned else str(self)
            raise RequestError(field, f"got {shown(value)}; {rule}, the nearest is {self.nearest(value)}")


PROMPT_CHARACTERS = Range(1, 7000, "characters", whole=True)
STEPS = Range(2, 1000, whole=True)
SEEDS = Range(0, 2**63 - 1, whole=True)
SHIFTS = Range(0.01, 1000)
TIMES = Range(0, 86_400, "s")  # of `start` and `end` inside a source
# Of a picture, by the ending of its file: x264 refuses longer ones, VP9's header has 16 bits for each less one
_H264, _VP9 = Range(2, 16_384, "pixels", whole=True), Range(2, 65_536, "pixels", whole=True)
ENCODED_SIDES: Mapping[str, Range] = {".mp4": _H264, ".mkv": _H264, ".webm": _VP9}
ENCODED_PIXELS = 2**28 - 2  # FFmpeg counts 128 more on each side
# Samples of 32 kHz that a sound has at least: 13.5 ms are what Opus's encoder delay leaves of a first packet, whole
SHORTEST_SOUND: Mapping[str, int] = {".webm": 432}


def durations(world: World) -> Range:
    """Seconds a video may last."""
    return Range(world.min_seconds, world.max_seconds, "s", owned=True)


def clip_seconds(world: World) -> Range:
    """Seconds a video or audio reference may last; the upper end is also that of all references of a kind together."""
    return Range(world.min_clip_seconds, world.max_clip_seconds, "s")


def sides(spec: Spec) -> Range:
    """Pixels of a canvas edge: from one multiple to the longest that the area cap could leave."""
    return Range(spec.multiple, spec.world.area_cap // spec.multiple, "pixels", whole=True, owned=True)


def tail_frames(video: VideoVAESpec) -> int:
    """Frames past the last whole clip of an aligned length (5): what the latents kept of a clip's end decode to."""
    return (video.clip_latents - video.token_drop) * video.time - (video.clip_latents * video.time - video.clip)


def aligned_frames(frames: int, video: VideoVAESpec) -> int:
    """The smallest count of the form 17n+5 that is at least `frames` (SPEC 4.2)."""
    tail = tail_frames(video)
    return max(0, math.ceil((frames - tail) / video.clip)) * video.clip + tail


def max_frames(spec: Spec) -> int:
    """Frames of the longest target of this checkpoint (362 for H3)."""
    return aligned_frames(int(round(spec.world.max_seconds * FPS)), spec.video)


def clip_frames(spec: Spec) -> Range:
    """24ths of a second that a reference may last (48 to 362 for H3): our own longest output is still a legal one."""
    limit = clip_seconds(spec.world)
    return Range(round(limit.low * FPS), aligned_frames(round(limit.high * FPS), spec.video), "frames", whole=True)


def typed(seconds: float) -> Fraction:
    """A time as the person typed it, and not its nearest float."""
    return Fraction(seconds).limit_denominator(1_000_000)


def in_frames(seconds: float | Fraction) -> int:
    """`seconds` in 24ths of a second, halves up, as frames are put on their slots."""
    return math.floor(seconds * FPS + 0.5)


def check_number(field: str, value: Any, *, whole: bool = False) -> None:
    """RequestError unless `value` is an int (`whole`), or an int or finite float; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise RequestError(field, f"got {shown(value)} ({type(value).__name__}); {kind} is needed")
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(field, f"got {value}; a finite number is needed")


def check_text(field: str, value: Any) -> None:
    """RequestError unless `value` is a string without null bytes and lone surrogates."""
    if not isinstance(value, str):
        raise RequestError(field, f"got {shown(value)} ({type(value).__name__}); a string is needed")
    for position, character in enumerate(value):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            what = "a null byte" if character == "\0" else "a lone surrogate"
            raise RequestError(field, f"holds {what} at character {position}; remove it")


def check_choice(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """RequestError unless `value` is one of `allowed`; True and 1.0 are not 1."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise RequestError(field, f"got {shown(value)}; use {', '.join(map(str, allowed))}")


def check_ratio(field: str, width: float, height: float, size: str = "") -> None:
    """Refuse a shape outside 1:4 to 4:1. `size`: words for what has it, where they are not `width` x `height`."""
    for (wide, high), sign in ((NARROWEST, 1), (WIDEST, -1)):
        if (width * high - height * wide) * sign < 0:
            raise RequestError(
                field,
                f"{size or f'{width:g}x{height:g}'} is {width / height:.3g}:1; ratios are {RATIOS}, "
                f"the nearest is {wide}:{high}",
            )


RATIOS = f"{NARROWEST[0]}:{NARROWEST[1]} to {WIDEST[0]}:{WIDEST[1]}"
ASPECT_WORDS = f"auto, {', '.join(ASPECTS)} or W:H from {RATIOS}"


def counted(number: int, what: str) -> str:
    """`1 call`, `49 calls`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def apart(one: int, other: int, unit: float, digits: int = 0) -> tuple[str, str]:
    """Two numbers of bytes in `unit`, with `digits` behind the point or, where they would look alike, as many as tell
    them apart."""
    texts = (f"{one / unit:.{digits}f}", f"{other / unit:.{digits}f}")
    return texts if one == other or texts[0] != texts[1] else apart(one, other, unit, digits + 1)


def shown(value: Any) -> str:
    """A refused value as printable text of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
