"""Figures of two sounds against values worked out by hand, at any rate, and where one lacks what the other has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from twinreel.tools.compare import compare_media, summary
from twinreel.tools.sounds import sound_report, spectral_distance
from twinreel.tools.verdict import BOUNDS, summarise, verdict

RNG = np.random.default_rng(5)
FRAMES = np.zeros((2, 16, 16, 3), np.uint8)


def clicks(samples: int) -> np.ndarray:
    made = np.zeros((2, samples), np.float32)
    made[:, :800] = 0.5 * np.sin(np.arange(min(800, samples)) / 5)
    return made


def test_sound_figures_by_hand() -> None:
    a = np.array([[0.5, -0.5], [0.5, 0.5]], np.float32)
    b = np.array([[0.5, -0.5], [0.5, 0.4]], np.float32)
    report = sound_report(a, b)
    assert report["snr"] == pytest.approx(10 * math.log10(1 / 0.01), rel=1e-5)
    assert report["rmse"] == pytest.approx(0.05, rel=1e-5)
    assert report["cosine"] == pytest.approx(0.95 / math.sqrt(0.91), rel=1e-5)
    silent = sound_report(np.zeros((2, 4000), np.float32), clicks(4000))
    assert silent["cosine"] == 0 and silent["snr"] < -100 and math.isfinite(silent["log_spectral_distance_db"])
    assert sound_report(0 * a, 0 * a)["identical"]


def test_spectral_distance_of_a_gain_is_the_gain() -> None:
    noise = RNG.standard_normal((2, 8000))
    assert spectral_distance(noise, noise / 2) == pytest.approx(20 * math.log10(2), rel=1e-6)
    assert spectral_distance(noise, noise) == 0


@pytest.mark.parametrize("rate", [100, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("late", [0.05, -0.4])
def test_a_lag_is_in_milliseconds_at_any_rate(rate: int, late: float) -> None:
    bursts = RNG.standard_normal((2, 2 * rate)) * (np.arange(2 * rate) // (rate // 20) % 9 == 0)
    sounds = (np.roll(bursts, round(by * rate), axis=1).astype(np.float32) for by in (0, late))
    assert sound_report(*sounds, rate)["envelope_lag_ms"] == pytest.approx(1000 * late, abs=3)


@pytest.mark.parametrize(
    ("lengths", "figures", "line"),
    [
        ((8000, 8000), True, None),
        ((8000, 100), True, "samples      8000 and 100: what both have is compared"),
        ((8000, 0), False, "audio        8000 and 0 samples: nothing to compare"),
        ((0, 0), False, "audio        0 and 0 samples: nothing to compare"),
    ],
)
def test_sound_that_one_lacks_is_told_and_never_equal(
    lengths: tuple[int, int], figures: bool, line: str | None
) -> None:
    sounds = [clicks(length) for length in lengths]
    report = compare_media((FRAMES, sounds[0]), (FRAMES, sounds[1]))
    known = {name: report["audio"][name] is not None for name in ("cosine", "rmse", "envelope_lag_ms")}
    assert set(known.values()) == {figures} and report["audio"]["identical"] is (lengths[0] == lengths[1])
    told = summary(report | {"a": "a", "b": "b"})
    assert ("what both have" in told or "nothing to" in told) is (line is not None) and (line or "exact") in told
    for bounds in BOUNDS:
        assert verdict(summarise([report]), bounds) == ("exact" if lengths[0] == lengths[1] else "apart")
