"""Figures of two stereo waveforms, float32 `[2, n]` at one rate: cosine, SNR, RMSE, spectral distance, envelope lag."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import SAMPLE_RATE

WINDOW, HOP = 1024, 256
FLOOR = 1e-5  # of the magnitude spectrum, -100 dB: silence against silence is no distance
POINTS = 200  # of an envelope, a second: 5 ms each
MOST_LAG = POINTS // 2  # half a second
LEAST_ALIKE = 0.3  # correlation of two envelopes
FIGURES = ("cosine", "snr", "rmse", "log_spectral_distance_db", "envelope_lag_ms")
Waveform = NDArray[np.float32]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays are one to a hash: a zero has a sign, and a value that is no number is itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (np.ascontiguousarray(values).reshape(-1).view(np.uint8) for values in (a, b))
    return bool(np.array_equal(first, second))


def sound_report(a: Waveform, b: Waveform, rate: int = SAMPLE_RATE) -> dict[str, Any]:
    """Plain JSON values over the samples both have; `snr` takes `a` as the signal, None is infinite.

    Where they have none in common all figures are None. With samples that are not finite no figure has a meaning: all
    are None, and `samples_not_finite` counts them.
    """
    facts: dict[str, Any] = {"samples": [a.shape[1], b.shape[1]], "rate": rate, "identical": same_bits(a, b)}
    broken = [int(np.count_nonzero(~np.isfinite(samples))) for samples in (a, b)]
    if any(broken):
        return facts | dict.fromkeys(FIGURES) | {"samples_not_finite": broken}
    length = min(facts["samples"])
    if not length:
        return facts | dict.fromkeys(FIGURES)
    x, y = a[:, :length].astype(np.float64), b[:, :length].astype(np.float64)
    noise, power = float(((x - y) ** 2).sum()), float((x * x).sum())
    norms = math.sqrt(power * float((y * y).sum()))
    return facts | {
        "cosine": float((x * y).sum()) / norms if norms else float(noise == 0),
        # a silent signal has no ratio worth the name: the smallest float32 stands in for its power
        "snr": None if noise == 0 else 10 * math.log10(max(power, float(np.finfo(np.float32).tiny)) / noise),
        "rmse": math.sqrt(noise / x.size),
        "log_spectral_distance_db": spectral_distance(x, y),
        "envelope_lag_ms": None if (lag := envelope_lag(x, y, rate)) is None else lag * 1000 * step(rate) / rate,
    }


def spectral_distance(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """RMS over frequencies of the difference of log magnitudes, dB, averaged over windows and channels."""
    if x.shape[1] < WINDOW:
        return 0.0
    difference = 20 * (np.log10(_spectrum(x)) - np.log10(_spectrum(y)))
    return float(np.sqrt((difference**2).mean(-1)).mean())


def _spectrum(x: NDArray[np.float64]) -> NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(x, WINDOW, axis=1)[:, ::HOP]
    taper = np.hanning(WINDOW)
    magnitude = np.abs(np.fft.rfft(windows * taper, axis=-1)) / (taper.sum() / 2)
    return np.maximum(magnitude, FLOOR)


def step(rate: int) -> int:
    """Samples of an envelope's point."""
    return max(1, rate // POINTS)


def envelope(x: NDArray[np.float64], rate: int) -> NDArray[np.float64]:
    """Root mean square of both channels over 5 ms."""
    size = step(rate)
    points = x.shape[1] // size
    return np.sqrt((x[:, : points * size].reshape(len(x), points, size) ** 2).mean((0, 2)))


def envelope_lag(x: NDArray[np.float64], y: NDArray[np.float64], rate: int) -> int | None:
    """Envelope points by which `y` comes later than `x`: the largest correlation within half a second, 0 if tied; None
    where that is under `LEAST_ALIKE`, because sounds that have nothing in common have no lag."""
    first, second = envelope(x, rate), envelope(y, rate)
    first, second = first - first.mean() if len(first) else first, second - second.mean() if len(second) else second
    most = min(MOST_LAG, len(first) - 1)
    best, value = 0, -math.inf
    for shift in sorted(range(-most, most + 1), key=abs):
        length = len(first) - abs(shift)
        score = float((first[max(0, -shift) :][:length] * second[max(0, shift) :][:length]).sum())
        if score > value * (1 + 1e-12) if value > 0 else score > value:
            best, value = shift, score
    norms = math.sqrt(float((first**2).sum() * (second**2).sum()))
    return best if np.array_equal(first, second) or value > LEAST_ALIKE * norms else None
