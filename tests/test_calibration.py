"""calibration: a profile is taken whole, or refused as damaged; what it plans is in `test_policy`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinreel.calibration import PROFILE_SCHEMA, read_profile
from twinreel.errors import RequestError

IDENTITY = {"steps": 10, "task": "t2va"}  # 9 calls: a line foretells those from the third on
STEPS = list(range(2, 9))
RATIOS = {"steps": STEPS, "video": [0.1, 0, 1e300, -1, -1.0, 0.2, 3], "audio": [0.1] * 7}


def written(path: Path, ratios: Any) -> str:
    path.write_text(json.dumps({"schema": PROFILE_SCHEMA, **IDENTITY, "ratios": ratios}))
    return str(path)


def test_what_a_run_has_written_is_taken(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path / "a.json", RATIOS), IDENTITY)["ratios"] == RATIOS


def with_third(value: object) -> Callable[[list], list]:
    return lambda values: [*values[:2], value, *values[3:]]


@pytest.mark.parametrize("names", [("video",), ("audio",)], ids="".join)
@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), -float("inf"), -0.5, True, "0.1", None, [0.1]])
def test_what_is_no_ratio_is_refused(tmp_path: Path, names: tuple[str, ...], value: object) -> None:
    refused(tmp_path, with_third(value), names)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (with_third(5), ("steps",)),
        (with_third(4.0), ("steps",)),
        (with_third(10**400), ("steps",)),
        (lambda values: values[::-1], ("steps",)),
        (lambda values: [step + 1 for step in values], ("steps",)),
        (lambda values: values[:-1], ("steps",)),
        (lambda values: values[:-1], ("video",)),
        (lambda values: values[:-1], tuple(RATIOS)),
        (lambda values: [], tuple(RATIOS)),
        (lambda values: None, ("audio",)),
        (lambda values: {}, tuple(RATIOS)),
    ],
)
def test_lists_that_are_not_of_the_steps_are_refused(
    tmp_path: Path, change: Callable[[list], object], names: tuple[str, ...]
) -> None:
    refused(tmp_path, change, names)


def refused(folder: Path, change: Callable[[list], object], names: tuple[str, ...]) -> None:
    ratios = {name: change(values) if name in names else values for name, values in RATIOS.items()}
    with pytest.raises(RequestError, match="^policy: .* is damaged: .*; calibrate anew"):
        read_profile(written(folder / "a.json", ratios), IDENTITY)
