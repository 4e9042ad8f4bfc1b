"""`twinreel validate`: the frozen requests under two setups in one go, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..limits import shown
from ..output.report import versions
from ..request_json import request_from_json
from ..scratch import scratch
from ..small_files import MOST_JSON, read_small_json, why
from ..spec import Spec
from ..watch import Watch, ignore
from .compare import compare_media, decibels
from .frozen import FROZEN, Named, frozen_requests
from .setups import Result, Runs, Setup, check_setups
from .verdict import check_bounds, summarise, verdict, without_mean

CELLS = ("exact features", "policy alone", "all together")


def validate(
    base: Setup,
    test: Setup,
    requests: Sequence[Named],
    *,
    bounds: str = "strict",
    matrix: bool = False,
    watch: Watch = ignore,
) -> dict[str, Any]:
    """Run `requests` under `base` and `test` and compare raw frames and waveforms. Plain JSON values.

    `matrix` runs three tests instead of one: the test's engine with the base's policy, the base's engine with the
    test's policy, and both. Where the first is exact, the other two must give one hash; `apart` if they do not.
    Requests of tasks that the weights do not have are left out and named. Raises what the engine raises.
    """
    check_bounds(bounds)
    tests = {"test": test}
    if matrix:
        # policy alone before the others: it shares the base's engine
        alone, engine_only = replace(base, policy=test.policy, steps=test.steps), replace(base, engine=test.engine)
        tests = dict(zip((CELLS[1], CELLS[0], CELLS[2]), (alone, engine_only, test), strict=True))
    kept = check_setups((base, *tests.values()), requests)
    with scratch("validate") as folder:
        runs = Runs(folder, watch)
        spec = runs.engine(base.engine).spec
        base_results = runs.run(base, kept)
        cells, results = {}, {}
        for name, setup in tests.items():
            results[name] = runs.run(setup, kept)
            rows = measure(base_results, results[name], spec)
            cells[name] = conclude(rows, bounds) | {"setup": setup.describe()}
    report: dict[str, Any] = {
        "frozen": FROZEN,
        "requests": [named.name for named in kept],
        "left_out": [named.name for named in requests if named not in kept],
        "bounds": bounds,
        "base": {"setup": base.describe(), "costs": costs([result.costs() for result in base_results])},
        "cells": cells,
        "versions": versions(),
    }
    if matrix:
        report["matrix"] = _one_hash(cells, results)
    report["verdict"] = _worst([cell["verdict"] for cell in cells.values()])
    if matrix and report["matrix"]["one_hash"] is False:
        report["verdict"] = "apart"
    return report


def measure(base: Sequence[Result], test: Sequence[Result], spec: Spec) -> list[dict[str, Any]]:
    """Figures and costs of each request under one setup, against the base."""
    rows = []
    for one, other in zip(base, test, strict=True):
        same = one.sha256["frames"] == other.sha256["frames"] and one.sha256["waveform"] == other.sha256["waveform"]
        comparison = compare_media(one.media(), other.media(), spec.video)
        assert comparison["identical"] == same, "the hashes and the values disagree"
        row = {"request": one.name, "sha256": dict(other.sha256), "costs": other.costs(), **comparison}
        rows.append(row | {"warning": other.policy["warning"]} if "warning" in other.policy else row)
    return rows


def conclude(rows: Sequence[dict[str, Any]], bounds: str) -> dict[str, Any]:
    """Summary, costs and verdict of what `measure` found for one setup."""
    summary = summarise(rows)
    return {
        "verdict": verdict(summary, bounds),
        "summary": summary,
        "costs": costs([row["costs"] for row in rows]),
        "warnings": sorted({row["warning"] for row in rows if "warning" in row}),
        "rows": rows,
    }


def costs(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the requests: seconds in all and of denoising, calls; and the largest peak of memory."""
    means = {name: sum(one[name] for one in each) / len(each) for name in ("seconds", "denoise_seconds", "calls")}
    return means | {"peak_bytes": max(one["peak_bytes"] for one in each)}


def _one_hash(cells: Mapping[str, Any], results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    exact = cells[CELLS[0]]["verdict"] == "exact"
    pairs = zip(results[CELLS[1]], results[CELLS[2]], strict=True)
    differing = [a.name for a, b in pairs if any(a.sha256[k] != b.sha256[k] for k in ("frames", "waveform"))]
    return {"features_exact": exact, "one_hash": not differing if exact else None, "differing": differing}


def _worst(verdicts: Sequence[str]) -> str:
    return max(verdicts, key=("exact", "close", "apart").index)


def read_requests(name: str) -> tuple[Named, ...]:
    """`frozen`, or a JSON file with a list of requests (each as `POST /v1/videos` takes it). Raises RequestError."""
    if name == "frozen":
        return frozen_requests()
    try:
        bodies = read_small_json(name, MOST_JSON)
    except (OSError, ValueError) as error:
        raise RequestError("requests", f"{shown(name)} cannot be read ({why(error)}); name a file of JSON") from None
    if not isinstance(bodies, list) or not bodies:
        raise RequestError(
            "requests", f"{shown(name)} is not a list of requests; use frozen, or a JSON file with such a list"
        )
    return tuple(_request(body, f"{Path(name).stem}-{i}", f"requests[{i}]") for i, body in enumerate(bodies))


def _request(body: Any, name: str, place: str) -> Named:
    try:
        return Named(name, request_from_json(body), place)
    except RequestError as error:
        raise error.under(place) from None


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    base = report["base"]
    lines = [
        f"base        {_setup(base['setup'])}: {_costs(base['costs'])}",
        f"requests    {len(report['requests'])}: {', '.join(report['requests'])}",
    ]
    if report["left_out"]:
        lines.append(f"left out    {', '.join(report['left_out'])}: the weights do not have these tasks")
    for name, cell in report["cells"].items():
        summary = cell["summary"]
        lines.append(f"{name}: {_setup(cell['setup'])}: {_costs(cell['costs'])}")
        rest = "" if cell["verdict"] == "exact" else f"; of the rest, mean (worst): {_figures(summary)}"
        rest += f"; {summary['not_finite']} with values that are not finite" if summary["not_finite"] else ""
        lines.append(f"  {cell['verdict']}: {summary['exact']}/{summary['of']} exact{rest}")
        lines += [f"  warning: {warning}" for warning in cell["warnings"]]
    if "matrix" in report:
        facts = report["matrix"]
        words = {True: "give one hash", False: f"differ in {', '.join(facts['differing'])}", None: "need not agree"}
        lines.append(
            f"policy alone and all together {words[facts['one_hash']]} (features exact: {facts['features_exact']})"
        )
    return "\n".join([*lines, f"verdict ({report['bounds']}): {report['verdict']}"])


def _setup(setup: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in setup.items())


def _costs(values: Mapping[str, float]) -> str:
    return (
        f"{values['calls']:.1f} calls, {values['seconds']:.2f} s, denoise {values['denoise_seconds']:.2f} s, "
        f"peak {values['peak_bytes'] / 2**30:.2f} GiB"
    )


def _figures(summary: Mapping[str, Any]) -> str:
    words = []
    for name, unit in (("video_psnr", "dB"), ("video_ssim", ""), ("audio_snr", "dB"), ("audio_cosine", "")):
        mean, worst = summary[name]["mean"], summary[name]["worst"]
        if word := without_mean(summary, name):
            words.append(f"{name} {word}")
        elif unit:
            words.append(f"{name} {decibels(mean)} ({decibels(worst)})")
        else:
            words.append(f"{name} {mean:.4f} ({worst:.4f})")
    return ", ".join(words)
