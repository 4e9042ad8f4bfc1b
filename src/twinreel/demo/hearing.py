"""What sound says: its kind, pitch, onsets and stereo side, read off a waveform alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from .world import HERTZ, PITCHES, PLACE_BOUNDS, PLACES, RATE

QUIET = 0.01  # a level that stays below this is silence
BIN = 16  # samples: the onset's time grid is half a millisecond
REACH = 0.005  # seconds of energy compared before and after an onset
RISE = 1.6  # natural log of that comparison which makes an onset
APART = 0.15  # seconds between onsets
FRAME = 640  # samples: 20 ms


@dataclass(frozen=True)
class Heard:
    """A sound as measured: kind ("none" for silence), pitch word, fundamental in hertz, onsets in seconds.

    `pan_times` (seconds) and `pans` (0 left .. 1 right) follow its side: at each onset of a struck sound, every 20 ms
    of a held one. `side` is the median's word.
    """

    kind: str
    pitch: str
    hertz: float
    onsets: tuple[float, ...]
    pan_times: np.ndarray
    pans: np.ndarray
    side: str


def listen(audio: Tensor | np.ndarray) -> Heard:
    """Measure one sound source in a stereo waveform float [2, n] at 32 kHz."""
    wave = torch.as_tensor(audio).detach().cpu().float()
    power = wave.square()
    frames = power[:, : power.shape[1] // FRAME * FRAME].reshape(2, -1, FRAME).mean(2)
    level = frames.sum(0).sqrt().numpy()
    if level.max() < QUIET:
        return Heard("none", "", 0.0, (), np.zeros(0), np.zeros(0), "")
    kind = _struck_kind(level)
    onsets = find_onsets(power.sum(0)) if kind else ()
    hertz, share = _pitch(wave, kind, onsets)
    if not kind:
        # A hum is nearly all fundamental; a buzz has more in its harmonics.
        kind = "hum" if share > 0.75 else "buzz"
    pan_times, pans = _pans(power, frames, level, onsets if kind in ("bell", "click") else None)
    middle = 0.125 + 0.75 * float(np.median(pans)) if len(pans) else 0.5
    side = PLACES[sum(middle > bound for bound in PLACE_BOUNDS)]
    return Heard(kind, pitch_word(kind, hertz), hertz, onsets, pan_times, pans, side)


def pitch_word(kind: str, hertz: float) -> str:
    """The nearest of the kind's three pitches, by ratio."""
    return min(zip(HERTZ[kind], PITCHES, strict=True), key=lambda pair: abs(math.log(max(hertz, 1) / pair[0])))[1]


def _struck_kind(level: np.ndarray) -> str:
    """ "click" when the sound is gone at once, "bell" when it dies away, "" when it holds (levels of 20 ms)."""
    active = level > 0.15 * level.max()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(int), [0]])))
    runs = edges[1::2] - edges[::2]
    # Weighted by length: a held sound's short drop-outs or a bell's last flickers do not count as runs.
    if np.average(runs, weights=runs) <= 5:
        return "click"
    falls = np.diff(np.log(np.maximum(level, 1e-9)))[active[:-1] & active[1:]]
    return "bell" if np.median(falls) * RATE / FRAME < -1.0 else ""


def find_onsets(power: Tensor) -> tuple[float, ...]:
    """Seconds at which the power [n] rises: energy just after against energy just before, both fading with distance."""
    bins = power[: len(power) // BIN * BIN].reshape(1, 1, -1, BIN).sum(3)
    taps = round(8 * REACH * RATE / BIN)
    fade = torch.exp(-torch.arange(taps) * (BIN / RATE / REACH))[None, None]
    silence = torch.zeros((1, 1, taps))
    after = conv1d(torch.cat([bins, silence], 2), fade)[0, 0, :-1]
    before = conv1d(torch.cat([silence, bins], 2), fade.flip(2))[0, 0, :-1]
    floor = 0.01 * after.max()
    rise = ((after + floor) / (before + floor)).log().numpy()
    loud = (after > 3 * floor).numpy()
    onsets = []
    apart = round(APART * RATE / BIN)
    for k in np.flatnonzero((rise > RISE) & loud):
        if rise[k] >= rise[max(k - apart, 0) : k + apart + 1].max():
            onsets.append((k + _vertex(rise, int(k))) * BIN / RATE)
    return tuple(onsets)


def _vertex(values: np.ndarray, k: int) -> float:
    """Offset of the parabola's top through three neighbours of the local maximum `k`."""
    if not 0 < k < len(values) - 1:
        return 0.0
    left, top, right = (float(values[k + i]) for i in (-1, 0, 1))
    bend = left - 2 * top + right
    return 0.0 if bend >= 0 else max(-0.5, min(0.5, (left - right) / (2 * bend)))


def _pitch(wave: Tensor, kind: str, onsets: tuple[float, ...]) -> tuple[float, float]:
    """Fundamental in hertz and the share of the power within a quarter of it."""
    size = 2048 if kind == "click" else 8192
    if kind:
        # A bell is read after its strike, a click from just before its start; the click fades by itself.
        shift = -32 if kind == "click" else 600
        starts = [max(0, round(t * RATE) + shift) for t in onsets]
    else:
        starts = list(range(0, wave.shape[1] - size + 1, 2048))
    starts = [s for s in starts if s + size <= wave.shape[1]] or [int(wave.square().sum(0).argmax()) // 2]
    pieces = torch.stack([wave[:, s : s + size] for s in starts])
    window = torch.ones(size) if kind == "click" else torch.hann_window(pieces.shape[2])
    spectrum = torch.fft.rfft(pieces * window, n=16384).abs().square().sum((0, 1)).numpy()
    step = RATE / 16384
    low, high = round(80 / step), round(4500 / step)
    k = low + int(spectrum[low:high].argmax())
    if not kind:
        k = _fundamental(spectrum, k, low)
    hertz = (k + _vertex(np.log(spectrum + 1e-20), k)) * step
    near = spectrum[round(0.75 * k) : round(1.25 * k) + 1].sum()
    return hertz, float(near / spectrum[low // 2 :].sum())


def _fundamental(spectrum: np.ndarray, k: int, low: int) -> int:
    """Where a half or a third of the strongest line's frequency is a strong line too, that is the fundamental."""
    for part in (3, 2):
        guess = round(k / part)
        if guess < low:
            continue
        reach = max(2, round(0.04 * guess))
        near = spectrum[guess - reach : guess + reach + 1]
        if near.max() > 0.25 * spectrum[k]:
            return guess - reach + int(near.argmax())
    return k


def _pans(
    power: Tensor, frames: Tensor, level: np.ndarray, onsets: tuple[float, ...] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Times and stereo positions 0..1, by the energies after each onset or in each loud 20 ms."""
    if onsets is None:
        chosen = np.flatnonzero(level > 0.4 * level.max())
        times = (chosen + 0.5) * FRAME / RATE
        energies = frames[:, torch.from_numpy(chosen)].numpy()
    else:
        times = np.array(onsets)
        spans = [slice(round(t * RATE), round(t * RATE) + 1280) for t in onsets]
        energies = np.array([power[:, s].sum(1).numpy() for s in spans]).reshape(-1, 2).T
    left, right = np.sqrt(energies)
    return times, np.arctan2(right, left) / (math.pi / 2)
