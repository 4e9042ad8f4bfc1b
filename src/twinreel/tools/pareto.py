"""The Pareto plot: calls against video PSNR and audio SNR, for every policy, preset and fewer plain steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..output.report import versions
from ..watch import Watch, ignore
from .frozen import FROZEN, Named
from .plots import Frame, Point, draw_points
from .setups import Runs, Setup, check_setups
from .validate import measure

POLICIES = (
    "reuse",
    "reuse:start_ratio=0.1,end_ratio=0.94",
    "reuse:start_ratio=0.1,end_ratio=0.94,refresh_interval=3,max_consecutive_reuse=2",
    "forecast:gentle",
    "forecast:balanced",
    "forecast:fast",
    "forecast:pattern=3",
    "forecast:fast,correct=0",
    "forecast:gentle,correct=2",
    "forecast:balanced,correct=2",
    "forecast:fast,correct=2",
    "forecast:gentle,order=2,correct=2",
    "forecast:balanced,order=2,correct=2",
    "forecast:fast,order=2,correct=2",
    "forecast:pattern=3,order=2,correct=2",
    "adaptive:video=0.02,audio=0.02",
    "adaptive",
    "adaptive:video=0.1,audio=0.1",
    "adaptive:order=1,correct=1",
)
# of a request of 50 steps: 34, 29, 24, 21 and 16 calls
PLAIN = (0.7, 0.6, 0.5, 0.44, 0.34)


def setups(base: Setup, steps: int) -> dict[str, Setup]:
    """What the plot shows, by name; `base` runs every step."""
    made = {policy: replace(base, policy=policy) for policy in POLICIES}
    plain = dict.fromkeys(round(steps * ratio) for ratio in PLAIN)
    return made | {f"{count} steps": replace(base, steps=count) for count in plain if count >= 2}


def pareto(base: Setup, requests: Sequence[Named], watch: Watch = ignore) -> dict[str, Any]:
    """Mean and worst figures of every setup against `base`; the requests share their number of steps."""
    kept = check_setups((base,), requests)
    check_setups(setups(base, kept[0].request.steps).values(), kept)
    points = {}
    with tempfile.TemporaryDirectory(prefix="twinreel-pareto-") as folder:
        runs = Runs(Path(folder), watch)
        spec = runs.engine(base.engine).spec
        base_results = runs.run(base, kept)
        for name, setup in setups(base, kept[0].request.steps).items():
            cell = measure(base_results, runs.run(setup, kept), spec, "strict")
            del cell["rows"]
            points[name] = cell
    return {"frozen": FROZEN, "requests": [named.name for named in kept], "points": points, "versions": versions()}


def draw(report: Mapping[str, Any], which: str = "mean") -> str:
    """Two plots, one above the other, as one SVG text; `which` is `mean` or `worst`."""
    plots = []
    for figure, title in (("video_psnr", "Video PSNR"), ("audio_snr", "Audio SNR")):
        points = []
        for name, cell in report["points"].items():
            value = cell["summary"][figure][which]
            if value is not None:
                points.append(Point(cell["costs"]["calls"], value, _label(name), _series(name)))
        frame = Frame(f"{title} against every step, {which} over requests", "calls of the model", "dB", 960, 480)
        plots.append(draw_points(frame, points))
    inner = [f'<g transform="translate(0 {480 * i})">{plot}</g>' for i, plot in enumerate(plots)]
    opening = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 960" width="960" height="960">'
    return f"{opening}{''.join(inner)}</svg>\n"


def _label(name: str) -> str:
    """What tells a point from its series."""
    kind, _, fields = name.partition(":")
    words = [
        word for word in fields.split(",") if not word.startswith(("order=", "correct=", "start_ratio=0.1", "max"))
    ]
    return ", ".join(word.replace("end_ratio=0.94", "wide") for word in words) or kind


def _series(name: str) -> str:
    kind = name.partition(":")[0]
    if kind == "forecast":
        kinds = {"correct=0": "uncorrected", "order=2": "parabolas", "correct=2": "corrected by parabolas"}
        return next((text for word, text in kinds.items() if word in name), "forecast")
    return "plain steps" if name.endswith("steps") else kind


def table(report: Mapping[str, Any]) -> str:
    """The points as a Markdown table, most calls first."""
    head = (
        "| policy | calls | video PSNR dB, mean (worst) | SSIM | audio SNR dB, mean (worst) | cosine |\n"
        + "|---" * 6
        + "|"
    )
    rows = []
    for name, cell in sorted(report["points"].items(), key=lambda item: -item[1]["costs"]["calls"]):
        s = cell["summary"]
        words = [name, f"{cell['costs']['calls']:.1f}"]
        for figure, form in (
            ("video_psnr", ".2f"),
            ("video_ssim", ".4f"),
            ("audio_snr", ".2f"),
            ("audio_cosine", ".4f"),
        ):
            mean, worst = s[figure]["mean"], s[figure]["worst"]
            none = "not finite" if s["not_finite"] and figure.startswith("audio") else "exact"
            words.append(none if mean is None else f"{mean:{form}} ({worst:{form}})")
        rows.append(f"| {' | '.join(words)} |")
    return "\n".join([head, *rows])
