"""Every draw: golden values of SPEC 13.6, and the rules of the two schemes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from twinreel.layout import patchify, unpatchify
from twinreel.noise import ConditionLatents, initial_rows, sample_posterior
from twinreel.plan import Plan
from twinreel.spec import Spec

SPEC = Spec()
PLAN = Plan("t2va", "fl2va", "a", 768, 1344, 124, 37, 207, 50, 0, "official", (12.0, 3.0))
PATCH = (1, 2, 2)


def test_golden_target_noise() -> None:
    official = initial_rows(PLAN, ConditionLatents(), SPEC)
    video = unpatchify(official.video, (37, 48, 84), PATCH)
    assert video.flatten()[:4].tolist() == [
        -1.1258398294448853, -1.152360200881958, -0.2505785822868347, -0.4338788092136383,
    ]  # fmt: skip
    assert video.flatten()[-1].item() == -0.7118073105812073
    assert video.double().sum().item() == pytest.approx(-1979.5178249734456, abs=1e-6)
    assert official.audio.shape == (414, 32) and official.audio[0, 0].item() == -1.1258398294448853
    sequential = initial_rows(replace(PLAN, noise="sequential"), ConditionLatents(), SPEC)
    assert torch.equal(sequential.video, official.video)
    assert sequential.audio[0, :2].tolist() == [0.9227838516235352, -0.5307580232620239]
    assert sequential.audio.double().sum().item() == pytest.approx(24.49775427117129, abs=1e-6)


def test_golden_condition_noise() -> None:
    plan = replace(PLAN, seed=42)
    clean = torch.zeros(1, 24, 1, 48, 84)
    scale = 1 - torch.tensor(0.999)
    assert scale.item() == 0.0009999871253967285
    keyframe = initial_rows(plan, ConditionLatents((clean,)), SPEC).video[:1008] / scale
    expected = [1.9269152879714966, 1.4872840642929077, 0.5361881256103516, 0.5246226191520691, -0.07626719772815704]
    assert keyframe[0, :5].tolist() == pytest.approx(expected, rel=1e-6)
    assert keyframe.double().sum().item() == pytest.approx(121.04044381267886, rel=1e-6)
    own = initial_rows(replace(plan, noise="sequential"), ConditionLatents((clean,)), SPEC).video[:1008] / scale
    assert own[0, 4].item() == pytest.approx(-1.5486440658569336, rel=1e-6)
    assert own.double().sum().item() == pytest.approx(119.8278897342625, rel=1e-6)


def test_golden_posterior() -> None:
    shape = (1, 24, 1, 2, 2)
    drawn = sample_posterior(torch.zeros(shape), torch.ones(shape)).flatten()
    golden = torch.tensor([1.9269152879714966, 1.4872840642929077, 0.9007171988487244, -2.1055209636688232])
    assert torch.equal(drawn[:4], golden.half().float())


SMALL = replace(PLAN, height=64, width=96, latents=7, audio_latents=37)
VISUAL = (torch.randn(1, 24, 1, 4, 6), torch.randn(1, 24, 7, 8, 4))
SOUND = torch.randn(20, 32)


def test_conditions_lead_and_sounds_stay_clean() -> None:
    rows = initial_rows(SMALL, ConditionLatents(VISUAL, (SOUND,)), SPEC)
    assert rows.video.shape == (6 + 56 + 42, 96) and rows.audio.shape == (20 + 74, 32)
    assert torch.equal(rows.audio[:20], SOUND)
    assert (rows.video[:6] - patchify(VISUAL[0], PATCH)).abs().max() < 0.01
    assert not torch.equal(rows.video[:6], patchify(VISUAL[0], PATCH))


def test_unused_noise_of_the_official_scheme() -> None:
    """A condition's draw is as long as target and conditions; what is not used is drawn all the same."""
    rows = initial_rows(SMALL, ConditionLatents(VISUAL), SPEC)
    time = torch.tensor(0.999)
    for latents, got in ((VISUAL[0], rows.video[:6]), (VISUAL[1], rows.video[6:62])):
        _, c, frames, h, w = latents.shape
        whole = torch.randn((1, c, 7 + 2, h, w), generator=torch.Generator().manual_seed(SMALL.seed))
        assert torch.equal(got, patchify(time * latents + (1 - time) * whole[:, :, :frames], PATCH))


def test_sequential_scheme_draws_conditions_first() -> None:
    rows = initial_rows(replace(SMALL, noise="sequential"), ConditionLatents(VISUAL, (SOUND,)), SPEC)
    generator = torch.Generator().manual_seed(SMALL.seed)
    for latents in VISUAL:
        torch.randn(latents.shape, generator=generator)
    video = torch.randn((1, 24, 7, 4, 6), generator=generator)
    assert torch.equal(rows.video[62:], patchify(video, PATCH))
    assert torch.equal(rows.audio[20:], torch.randn((74, 32), generator=generator))


def test_seeds_change_the_draws_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = initial_rows(SMALL, ConditionLatents(), SPEC)
    b = initial_rows(replace(SMALL, seed=1), ConditionLatents(), SPEC)
    assert not torch.equal(a.video, b.video) and not torch.equal(a.audio, b.audio)
    assert torch.equal(torch.get_rng_state(), before)
