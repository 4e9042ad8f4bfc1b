"""The Pareto plot: calls against video PSNR and audio SNR, for policies, presets, fewer plain steps and fp8."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError
from ..output.report import versions
from ..scratch import scratch
from ..watch import Watch, ignore
from .frozen import FROZEN, Named
from .plots import Frame, Point, draw_points
from .setups import Runs, Setup, check_setups
from .validate import conclude, costs, measure
from .verdict import without_mean
from .workers import divide

POLICIES = (
    "reuse",
    "reuse:start_ratio=0.1,end_ratio=0.94,refresh_interval=3,max_consecutive_reuse=2",
    "forecast:gentle",
    "forecast:balanced",
    "forecast:fast",
    "forecast:gentle,correct=2",
    "forecast:balanced,correct=2",
    "forecast:fast,correct=2",
    "forecast:fast,order=2,correct=2",
    "adaptive:video=0.02,audio=0.02",
    "adaptive",
)
# of a request of 50 steps: 34, 24, 21 and 16 calls
PLAIN = (0.7, 0.5, 0.44, 0.34)
PRECISION = "fp8"


def setups(base: Setup, steps: int) -> dict[str, Setup]:
    """What the plot shows, by name; `base` runs every step."""
    made = {policy: replace(base, policy=policy) for policy in POLICIES}
    plain = dict.fromkeys(round(steps * ratio) for ratio in PLAIN)
    made |= {f"{count} steps": replace(base, steps=count) for count in plain if count >= 2}
    return made | {PRECISION: replace(base, engine=replace(base.engine, precision=PRECISION))}


def pareto(base: Setup, requests: Sequence[Named], watch: Watch = ignore, workers: int = 1) -> dict[str, Any]:
    """Mean and worst figures of every setup against `base`, which runs every step; all requests have the same steps.

    `workers` processes, each with an engine of its own, divide the requests, and the CPU's threads where `base` names
    none. `left_out` says why what this machine refuses is missing. Raises what `check_setups` and engines raise, and
    RankLost for a worker that was killed.
    """
    kept = check_setups((base,), requests)
    steps = _check(base, kept, workers)
    if workers > 1 and base.engine.threads is None:
        base = replace(base, engine=replace(base.engine, threads=max(1, (os.cpu_count() or 1) // workers)))
    asked, left_out = setups(base, steps), dict[str, str]()
    for setup in asked.values():
        try:
            check_setups((setup,), kept)
        except ConfigError as error:
            if setup is not asked[PRECISION]:
                raise
            left_out[PRECISION] = str(error)
    shown = {name: setup for name, setup in asked.items() if name not in left_out}
    # removed here, however a worker ends
    with scratch("pareto") as folder:
        work = partial(_measure, base, shown, folder)
        parts = [kept[i::workers] for i in range(workers)]
        found = [work(kept, watch)] if workers == 1 else divide(work, parts, watch)
    points = {}
    for name in shown:
        # in the order of the requests, whoever ran them: sums round alike
        points[name] = conclude([found[i % workers][1][name][i // workers] for i in range(len(kept))], "strict")
        del points[name]["rows"]
    spent = costs([cost for rows in found for cost in rows[0]])
    return {
        "frozen": FROZEN,
        "requests": [named.name for named in kept],
        "base": {"setup": base.describe(), "costs": spent},
        "workers": workers,
        "points": points,
        "left_out": left_out,
        "versions": versions(),
    }


def _check(base: Setup, kept: Sequence[Named], workers: int) -> int:
    """The one number of steps that all requests have. Raises ConfigError, RequestError."""
    if not 1 <= workers <= len(kept):
        raise ConfigError(f"workers: got {workers} for {len(kept)} requests; use 1 to {len(kept)}")
    if base.policy != "every-step":
        raise ConfigError(f"base: has policy={base.policy}, and the plot sets policies beside every step; leave it out")
    steps = sorted({base.applied(named.request).steps for named in kept})
    if len(steps) > 1:
        raise RequestError("requests", f"have {', '.join(map(str, steps))} steps; give them one number by --steps")
    return steps[0]


def _measure(
    base: Setup, shown: Mapping[str, Setup], folder: Path, requests: Sequence[Named], watch: Watch
) -> tuple[list[dict[str, float]], dict[str, list[dict[str, Any]]]]:
    """The base's costs, and what `validate.measure` says of each setup; results wait in `folder`."""
    runs = Runs(Path(tempfile.mkdtemp(dir=folder)), watch)
    spec = runs.engine(base.engine).spec
    right = runs.run(base, requests)
    rows = {name: measure(right, runs.run(setup, requests), spec) for name, setup in shown.items()}
    return [result.costs() for result in right], rows


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
    """The points as a Markdown table, most calls first, and below it what is left out and what to beware of."""
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
            words.append(without_mean(s, figure) or f"{mean:{form}} ({worst:{form}})")
        rows.append(f"| {' | '.join(words)} |")
    notes = [f"{name} is left out: {why}" for name, why in report["left_out"].items()]
    notes += [f"warning: {name}: {text}" for name, cell in report["points"].items() for text in cell["warnings"]]
    return "\n".join([head, *rows, *notes])
