"""The step policies a request may name, their fields and presets, and the text form of both (`reuse:threshold=0.1`).

Nothing here imports torch; `policies.make_policy` turns options into the object that the loop asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from .errors import RequestError
from .limits import shown


@dataclass(frozen=True)
class Plain:
    """Every step calls the model: the definition, and the default."""


@dataclass(frozen=True)
class Reuse:
    """The published conservative cache: some steps of a window move by the last computed velocities once more.

    Of n calls, first and last are always computed. In the window [max(1, floor(n x start_ratio)),
    min(n - 1, ceil(n x end_ratio))) a step whose offset is no multiple of `refresh_interval` reuses, at most
    `max_consecutive_reuse` times in a row, and with a `threshold` only while the rows of both modalities have changed
    by less than it (relative L1) since the last computed call. `mode`: `reuse`, `probe` (compute everything, report
    what would have been reused) or `off`.
    """

    mode: str = "reuse"
    start_ratio: float = 0.2
    end_ratio: float = 0.8
    refresh_interval: int = 2
    max_consecutive_reuse: int = 1
    threshold: float | None = None


@dataclass(frozen=True)
class Forecast:
    """Skipped steps move by a forecast; the next computed call corrects them.

    The first `head` (a ratio of the calls, at least `order` + 1 of them) and the last `tail` calls are computed. Between
    them runs of skipped steps of the lengths `pattern`, again and again, are each followed by one computed step. A
    forecast is the polynomial of degree `order` in a modality's own sigma through the last computed velocities; what it
    is corrected by is that of degree `correct` (0: no correction) through the next one and those before it.
    """

    pattern: tuple[int, ...] = (1, 2)
    head: float = 0.1
    tail: int = 3
    order: int = 1
    correct: int = 1


@dataclass(frozen=True)
class Adaptive:
    """`Forecast` with skips decided by the measured error: while running, or beforehand from a calibration `profile`.

    A step is skipped while the expected relative L1 error of its forecast is under `video` and under `audio`, at most
    `most` times in a row, outside `head` and `tail`. `profile`: the JSON report of a run with the policy `calibrate`.
    """

    video: float = 0.05
    audio: float = 0.05
    most: int = 3
    head: float = 0.1
    tail: int = 3
    order: int = 2
    correct: int = 2
    profile: str | None = None


@dataclass(frozen=True)
class Calibrate:
    """Every step is computed; the report gets the profile that `Adaptive.profile` reads."""


PolicyOptions = Plain | Reuse | Forecast | Adaptive | Calibrate

KINDS: Mapping[str, type] = {
    "every-step": Plain,
    "reuse": Reuse,
    "forecast": Forecast,
    "adaptive": Adaptive,
    "calibrate": Calibrate,
}
ALIASES = {"velocity": "reuse", "conservative": "reuse"}
# Calls of a request of 50 steps, which are 49 calls without a policy: 28, 24 and 21.
PRESETS: Mapping[str, Forecast] = {
    "gentle": Forecast(pattern=(1,)),
    "balanced": Forecast(pattern=(1, 2)),
    "fast": Forecast(pattern=(2,)),
}
DEFAULT_PRESET = "balanced"


def parse_policy(policy: str | PolicyOptions) -> PolicyOptions:
    """Checked options of `NAME`, `NAME:field=value,...` or `forecast:PRESET[,field=value...]`. Raises RequestError."""
    if isinstance(policy, str):
        policy = _parse(policy)
    if type(policy) not in KINDS.values():
        raise _error(f"got {shown(policy)}; use {', '.join(KINDS)}, or one of their options")
    _check(policy)
    return policy


def format_policy(policy: PolicyOptions) -> str:
    """The text that `parse_policy` turns into the same options; defaults are left out."""
    name = next(name for name, kind in KINDS.items() if kind is type(policy))
    for preset, options in PRESETS.items():
        if options == policy:
            return f"{name}:{preset}"
    given = []
    for item in fields(policy):
        value = getattr(policy, item.name)
        if value != item.default:
            given.append(f"{item.name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return f"{name}:{','.join(given)}" if given else name


def _error(reason: str) -> RequestError:
    return RequestError("policy", reason)


def _parse(text: str) -> PolicyOptions:
    name, colon, rest = text.partition(":")
    kind = KINDS.get(ALIASES.get(name, name))
    if kind is None:
        raise _error(
            f"got {shown(text)}; use {', '.join([*KINDS, *ALIASES])}, with :field=value,... behind it if need be"
        )
    words = rest.split(",") if colon else []
    values: dict[str, Any] = {}
    if kind is Forecast:
        preset = words.pop(0) if words and "=" not in words[0] else DEFAULT_PRESET
        if preset not in PRESETS:
            raise _error(f"forecast has no preset {shown(preset)}; use {', '.join(PRESETS)}")
        values = dict(vars(PRESETS[preset]))
    hints, given = get_type_hints(kind), set[str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key in given:
            raise _error(f"{key} was given twice in {shown(text)}; keep one")
        given.add(key)
        if key not in hints or not equals:
            known = ", ".join(hints) or "none"
            raise _error(f"{shown(word)} is not field=value of {name}; its fields are {known}")
        values[key] = _value(key, value, hints[key])
    return kind(**values)


def _value(key: str, text: str, kind: Any) -> Any:
    if text == "None" and kind not in (int, float, str):
        return None
    try:
        if kind == tuple[int, ...]:
            return tuple(int(part) for part in text.split("+"))
        if kind in (int, float):
            return kind(text)
        return float(text) if kind == float | None else text
    except ValueError:
        raise _error(
            f"{key} is {shown(text)}, which cannot be read; a value such as {_EXAMPLES.get(key, '0.5')} is needed"
        ) from None


_EXAMPLES = {"pattern": "1+2", "correct": "1", "tail": "3", "order": "1", "most": "2", "refresh_interval": "2",
             "max_consecutive_reuse": "1"}  # fmt: skip


def _check(policy: Any) -> None:
    ratios = {name: getattr(policy, name) for name in ("start_ratio", "end_ratio", "head") if hasattr(policy, name)}
    for name, value in ratios.items():
        if not _real(value) or not 0 <= value <= 1:
            raise _error(f"{name} is {shown(value)}; from 0 to 1")
    lows = {"refresh_interval": 1, "max_consecutive_reuse": 0, "tail": 1, "most": 1, "order": 0, "correct": 0}
    for name, low in lows.items():
        value = getattr(policy, name, low)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _error(f"{name} is {shown(value)}; a whole number from {low} on")
    if getattr(policy, "order", 0) > 3 or getattr(policy, "correct", 0) > 3:
        raise _error(
            f"order is {shown(policy.order)}, correct {shown(policy.correct)}; degrees of a polynomial from 0 to 3"
        )
    for name in ("threshold", "video", "audio"):
        value = getattr(policy, name, 1.0)
        if value is not None and (not _real(value) or value <= 0):
            raise _error(f"{name} is {shown(value)}; a positive number")
    if isinstance(policy, Reuse):
        if policy.mode not in ("off", "reuse", "probe"):
            raise _error(f"mode is {shown(policy.mode)}; use off, reuse or probe")
        if policy.start_ratio > policy.end_ratio:
            raise _error(f"start_ratio {policy.start_ratio} is after end_ratio {policy.end_ratio}")
    if isinstance(policy, Adaptive) and policy.profile is not None:
        if not isinstance(policy.profile, str) or not policy.profile:
            raise _error(f"profile is {shown(policy.profile)}; the path of a file, as text")
    if isinstance(policy, Forecast):
        lengths = policy.pattern
        if not isinstance(lengths, tuple) or not lengths or not all(type(n) is int and 1 <= n <= 8 for n in lengths):
            raise _error(f"pattern is {shown(lengths)}; lengths of runs of skipped steps from 1 to 8, such as 1+2")


def _real(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False
