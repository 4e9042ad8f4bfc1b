"""From figures of many requests to one word: `exact`, `close` or `apart`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """The four figures of one comparison; infinite where nothing differs, None where it was not measured, and minus
    infinity where samples are not finite."""
    values: dict[str, float | None] = {}
    for name, (part, key) in FIGURES.items():
        facts = comparison[part]
        value = facts[key]
        if facts["identical"] and (name != "video_ssim" or value is not None):
            value = math.inf if name in ("video_psnr", "audio_snr") else 1.0 if value is None else value
        elif facts.get("samples_not_finite"):
            value = -math.inf
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


def check_bounds(bounds: str) -> None:
    """Refuse a set of bounds that is unknown. Raises ConfigError."""
    if bounds not in BOUNDS:
        raise ConfigError(f"bounds: got {shown(bounds)}; use {', '.join(BOUNDS)}")


def verdict(summary: Mapping[str, Any], bounds: str) -> str:
    """`exact`: every request has the same bits. `close`: the named bounds hold. `apart` otherwise. ConfigError for an
    unknown set, or one that needs a figure that was not measured."""
    check_bounds(bounds)
    if summary["exact"] == summary["of"]:
        return "exact"
    if summary["not_finite"]:
        return "apart"
    chosen = BOUNDS[bounds]
    for name, least in chosen.least.items():
        if not summary[name]["measured"]:
            install = "pip install -c constraints.txt scikit-image"
            raise ConfigError(f"bounds {bounds} need {name}, which needs scikit-image: {install}")
        value = summary[name]["worst" if chosen.every else "mean"]
        if value is not None and value < least:
            return "apart"
    return "close"
