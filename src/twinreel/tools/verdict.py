"""From figures of many requests to one word: `exact`, `close` or `apart`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError
from ..limits import shown

# figure -> where a comparison of two results has it; larger is better for each
FIGURES = {
    "video_psnr": ("video", "psnr"),
    "video_ssim": ("video", "ssim"),
    "audio_snr": ("audio", "snr"),
    "audio_cosine": ("audio", "cosine"),
}


@dataclass(frozen=True)
class Bounds:
    """A named set: the least value of each figure, and whether every request must reach it or their mean."""

    least: Mapping[str, float]
    every: bool


BOUNDS = {
    "strict": Bounds({"video_psnr": 40.0, "audio_snr": 30.0}, every=True),
    # the figures published for the conservative cache on the released model; means
    "published": Bounds(
        {"video_psnr": 35.86, "video_ssim": 0.9646, "audio_cosine": 0.989, "audio_snr": 18.8}, every=False
    ),
}


def figures(comparison: Mapping[str, Any]) -> dict[str, float | None]:
    """The four figures of one comparison; infinite where nothing differs, None where it was not measured or one sound
    is longer, and minus infinity where samples are not finite."""
    values: dict[str, float | None] = {}
    for name, (part, key) in FIGURES.items():
        facts = comparison[part]
        value = facts[key]
        if facts["identical"]:
            value = math.inf
        elif facts.get("samples_not_finite"):
            value = -math.inf
        elif len(set(facts.get("samples", ()))) > 1:
            value = None  # what one of the two lacks is in no figure
        elif value is None and name in ("video_psnr", "audio_snr"):
            value = math.inf  # only the sign of a zero differs
        values[name] = value
    return values


def summarise(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Exact count, how many hold values that are not finite, mean and worst of each figure over the
    requests that are not exact in it (None: all are)."""
    exact = sum(bool(comparison["identical"]) for comparison in comparisons)
    table = [figures(comparison) for comparison in comparisons]
    broken = sum(-math.inf in row.values() for row in table)
    result: dict[str, Any] = {"exact": exact, "of": len(comparisons), "not_finite": broken}
    for name in FIGURES:
        values = [row[name] for row in table]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        measured = all(value is not None for value in values)
        result[name] = {
            "mean": sum(finite) / len(finite) if finite else None,
            "worst": min(finite, default=None),
            "measured": measured,
        }
    return result


def without_mean(summary: Mapping[str, Any], name: str) -> str | None:
    """What stands for a figure of `summarise` that has no mean: `not measured`, `not finite` or `exact`."""
    if not summary[name]["measured"]:
        return "not measured"
    if summary[name]["mean"] is not None:
        return None
    return "not finite" if summary["not_finite"] and name.startswith("audio") else "exact"


def check_bounds(bounds: str) -> None:
    """Refuse a set of bounds that is unknown, or that needs what is not installed. Raises ConfigError."""
    if bounds not in BOUNDS:
        raise ConfigError(f"bounds: got {shown(bounds)}; use {', '.join(BOUNDS)}")
    if "video_ssim" in BOUNDS[bounds].least and find_spec("skimage") is None:
        install = "pip install -c constraints.txt scikit-image"
        raise ConfigError(f"bounds: {bounds} needs video_ssim, which needs scikit-image; {install}, or use strict")


def verdict(summary: Mapping[str, Any], bounds: str) -> str:
    """`exact`: every request has the same bits. `close`: the named bounds hold. `apart` otherwise, also where one of
    their figures was not measured. `bounds` is one that `check_bounds` has let pass."""
    if summary["exact"] == summary["of"]:
        return "exact"
    if summary["not_finite"]:
        return "apart"
    chosen = BOUNDS[bounds]
    for name, least in chosen.least.items():
        value = summary[name]["worst" if chosen.every else "mean"]
        if not summary[name]["measured"] or value is not None and value < least:
            return "apart"
    return "close"
