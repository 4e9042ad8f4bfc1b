"""The world's sounds, in closed form: stereo waveforms of scenes, vectorised over a batch, on any device.

A sound is placed by constant power, `cos` to the left and `sin` to the right of a quarter turn. Phases are float64 and
wrapped before they become float32, so a long hum is as clean at its end as at its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .world import GRID, HOP, RATE, Scene, Thing, columns, positions, thing_events

# (ratio to the fundamental, before rounding to the grid; amplitude; decay time in seconds) of a struck sound.
BELL = ((1.0, 0.34, 0.26), (2.4, 0.16, 0.12), (4.1, 0.08, 0.03))
CLICK = ((1.0, 0.6, 0.008),)
STRIKES = {"bell": BELL, "click": CLICK}
# Amplitudes of the harmonics of a held sound.
HUM = (0.26, 0.06, 0.02)
BUZZ = (0.2, 0.15, 0.12, 0.1, 0.08, 0.07, 0.06, 0.05)
HELD = {"hum": HUM, "buzz": BUZZ}
RAMP = 0.012  # seconds a held sound takes to come and to go


def render_audio(scenes: Sequence[Scene], device: torch.device | str) -> Tensor:
    """Stereo sound of scenes of one length: float32 [B, 2, 800 A] at 32 kHz within [-1, 1], on `device`.

    Raises ValueError for scenes of different lengths.
    """
    if len({s.frames for s in scenes}) != 1:
        raise ValueError("render_audio makes one length at a time")
    time = torch.arange(scenes[0].samples, dtype=torch.float64, device=device) / RATE
    out = torch.zeros((len(scenes), 2, len(time)), dtype=torch.float32, device=device)
    for index in range(max(len(s.things) for s in scenes)):
        for kind in (*STRIKES, *HELD):
            chosen = [i for i, s in enumerate(scenes) if index < len(s.things) and s.things[index].sound == kind]
            if not chosen:
                continue
            some = [scenes[i] for i in chosen]
            add = _strikes(some, index, kind, time) if kind in STRIKES else _held(some, index, kind, time)
            out[torch.tensor(chosen, device=device)] += add
    return out


def _pan(mono: Tensor, x: Tensor, width: Tensor) -> Tensor:
    """[B, n] placed at `x` px (broadcastable): [B, 2, n]. The same map as `world.pan_of`."""
    side = ((x / width - 0.125) / 0.75).clamp(0, 1).float() * (math.pi / 2)
    return torch.stack([mono * side.cos(), mono * side.sin()], dim=1)


def _widths(scenes: Sequence[Scene], device: torch.device) -> Tensor:
    return torch.tensor([[s.width] for s in scenes], dtype=torch.float64).to(device)


def _struck(kind: str, hertz: Tensor, since: Tensor) -> Tensor:
    """The struck sound `since` seconds after a blow on the grid (float64, silence before it): float32."""
    after = since >= 0
    since = since.clamp(min=0)
    soft = since.float()
    value = torch.zeros_like(soft)
    for ratio, amplitude, decay in STRIKES[kind]:
        cycles = (hertz * ratio / GRID).round() * GRID * since
        value += amplitude * torch.exp(soft * (-1 / decay)) * _sine(cycles)
    return value * after


def _sine(cycles: Tensor) -> Tensor:
    return ((cycles - cycles.floor()).float() * (2 * math.pi)).sin()


def _strikes(scenes: Sequence[Scene], index: int, kind: str, time: Tensor) -> Tensor:
    """Sum over a thing's events; scenes with fewer events get blows after the end."""
    hits = [[e for e in thing_events(s, index) if e.kind not in ("start", "stop")] for s in scenes]
    most = max(len(h) for h in hits)
    late = 2 * scenes[0].seconds
    when_BE = torch.tensor([[e.time for e in h] + [late] * (most - len(h)) for h in hits], dtype=torch.float64)
    where_BE = torch.tensor([[e.x for e in h] + [0.0] * (most - len(h)) for h in hits], dtype=torch.float64)
    when_BE, where_BE = when_BE.to(time.device), where_BE.to(time.device)
    hertz = columns(scenes, index, time.device)["hertz"]
    width = _widths(scenes, time.device)
    total = torch.zeros((len(scenes), 2, len(time)), dtype=torch.float32, device=time.device)
    for k in range(most):
        total += _pan(_struck(kind, hertz, time - when_BE[:, k : k + 1]), where_BE[:, k : k + 1], width)
    return total


def _held(scenes: Sequence[Scene], index: int, kind: str, time: Tensor) -> Tensor:
    """A sound that lasts while its thing moves: from `start` to `stop` of a slide, all the time of an orbit."""
    at = columns(scenes, index, time.device)
    x, _, _ = positions(at, time)
    slides = torch.tensor([[s.things[index].motion == "slide"] for s in scenes], device=time.device)
    begin = torch.where(slides, at["start"], 0.0)
    end = torch.where(slides, at["stop"], scenes[0].seconds + 1)
    return _pan(_tone(kind, at["hertz"], time - begin, end - begin), x, _widths(scenes, time.device))


def _tone(kind: str, hertz: Tensor, since: Tensor, length: Tensor) -> Tensor:
    """A held tone between 0 and `length` seconds with short linear ramps inside them: float32."""
    ramp = torch.minimum(since, length - since).div(RAMP).clamp(0, 1).float()
    value = torch.zeros_like(ramp)
    for k, amplitude in enumerate(HELD[kind], start=1):
        value += amplitude * _sine(hertz * k * since)
    return value * ramp


def render_reference_sound(thing: Thing, device: torch.device | str = "cpu", seconds: float = 1.0) -> Tensor:
    """The thing's sound alone, in the middle: float32 [2, 800 round(40 seconds)] at 32 kHz; a blow falls at 0.1 s.

    A held sound lasts from 0.1 s to 0.1 s before the end. A silent thing gives silence.
    """
    time = torch.arange(HOP * round(40 * seconds), dtype=torch.float64, device=device)[None] / RATE - 0.1
    hertz = torch.tensor([[thing.hertz]], dtype=torch.float64, device=device)
    if thing.sound == "none":
        mono = torch.zeros_like(time, dtype=torch.float32)
    elif thing.sound in STRIKES:
        mono = _struck(thing.sound, hertz, time)
    else:
        mono = _tone(thing.sound, hertz, time, torch.full_like(hertz, seconds - 0.2))
    return (mono * math.sqrt(0.5)).repeat(2, 1)
