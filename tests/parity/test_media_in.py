"""Clips and sounds in memory against diffusers' own normalisation of references."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
from diffusers.modular_pipelines.minimax_h3.before_encoder import (  # noqa: E402
    MiniMaxH3Ref2VASetupStep as Oracle,
)

from twinreel.media.fit import prepare  # noqa: E402
from twinreel.media.pixels import normalise, quantise  # noqa: E402
from twinreel.media.read import read_source  # noqa: E402
from twinreel.plan import make_plan  # noqa: E402
from twinreel.request import Reference, Request  # noqa: E402
from twinreel.sources import Clip, Sound  # noqa: E402
from twinreel.spec import PIXEL_MEAN, PIXEL_STD, Spec, World  # noqa: E402

SPEC = Spec(world=World(short_edge=64, area_cap=64 * 112))
RATES = (7.5, 12.0, 23.976, 24.0, 25.0, 29.97, 30.0, 50.0, 59.94, 60.0)


@pytest.mark.parametrize(("fps", "shape"), list(product(RATES, [(64, 64), (60, 100), (100, 48)])))
def test_clips_equal_the_oracle(fps: float, shape: tuple[int, int]):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (int(3.2 * fps), *shape, 3), dtype=np.uint8)
    expected = Oracle._normalize_video_condition(frames, fps, 107, 32, 64, 64 * 112, 24)
    request = Request("a", references=(Reference("video", Clip(frames, fps)),), duration=4.0)
    sources = [read_source(request.references[0], SPEC, 362)]
    (prepared,) = prepare(make_plan(request, SPEC, sources), sources)
    assert np.array_equal(prepared.frames, expected)


@pytest.mark.parametrize(("channels", "seconds"), list(product((1, 2), (2.0, 5.0))))
def test_sounds_equal_the_oracle_before_resampling(channels: int, seconds: float):
    samples = np.random.default_rng(0).uniform(-1, 1, (channels, int(seconds * 32_000))).astype(np.float32)
    expected = Oracle._normalize_audio_condition(torch.from_numpy(samples), 32_000, 32_000, 107 / 24)
    clip = Clip(np.zeros((48, 64, 64, 3), np.uint8), 24.0)
    references = (Reference("video", clip), Reference("audio", Sound(samples, 32_000)))
    request = Request("a", references=references, duration=4.0)
    sources = [read_source(reference, SPEC, 362) for reference in request.references]
    prepared = prepare(make_plan(request, SPEC, sources), sources)
    assert np.array_equal(prepared[1].waveform, expected.numpy())


def test_pixels_equal_the_oracle():
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    pixels = torch.from_numpy(frames.copy()).permute(3, 0, 1, 2)[None]
    expected = (pixels.to(torch.float32).div(255.0) - mean) / std
    found = normalise(frames)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    noise = torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    shown = (noise.float() * std + mean).clamp(0, 1)
    images = (shown[0].permute(1, 2, 3, 0).numpy() * 255).round().astype("uint8")
    assert np.array_equal(quantise(noise, "nearest").numpy(), images)
