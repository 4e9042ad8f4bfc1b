"""The three requests of SPEC 13.7 for the tiny DiT: canvas 64x96, 124 frames, 4 steps, seed 0, sequential noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from golden_dit import TINY
from twinreel.denoise import denoise
from twinreel.layout import build_layout, shard
from twinreel.models.dit import DiT
from twinreel.models.modulation import LiveModulation
from twinreel.noise import ConditionLatents, Rows, initial_rows
from twinreel.ops import select
from twinreel.pipeline import predictor
from twinreel.plan import Condition, Plan
from twinreel.policy import EveryStep
from twinreel.schedule import make_sigmas, step_timesteps
from twinreel.spec import Spec

SPEC = Spec(dit=TINY)
BASE = Plan("t2va", "fl2va", "a", 64, 96, 124, 37, 207, 4, 0, "sequential", (12.0, 3.0))
VISION_TAGS = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1])


@dataclass(frozen=True)
class Run:
    """One golden request: the plan, text rows [1, L, 48] with tags, encoded conditions, and the expected sums."""

    plan: Plan
    text: Tensor
    tags: Tensor
    latents: ConditionLatents
    sums: tuple[float, float]


def t2va() -> Run:
    generator = torch.Generator().manual_seed(7)
    text = torch.randn(1, 5, 48, generator=generator)
    sums = (-19.082512881956063, -321.9183191107586)
    return Run(BASE, text, torch.ones(5, dtype=torch.int64), ConditionLatents(), sums)


def fl2va(anchors: tuple[str, ...] = ("first", "last")) -> Run:
    generator = torch.Generator().manual_seed(7)
    text = torch.randn(1, 9, 48, generator=generator)
    frames = tuple(torch.randn(1, 24, 1, 4, 6, generator=generator) for _ in anchors)
    conditions = tuple(Condition("image", "keyframe", i, a, 64, 96, 1, 1, 1) for i, a in enumerate(anchors))
    plan = replace(BASE, task="fl2va", conditions=conditions)
    return Run(plan, text, VISION_TAGS, ConditionLatents(frames), (-116.71287734014913, -280.82192143425345))


def ref2va() -> Run:
    generator = torch.Generator().manual_seed(7)
    text = torch.randn(1, 9, 48, generator=generator)
    image = torch.randn(1, 24, 1, 8, 4, generator=generator)
    video = torch.randn(1, 24, 7, 4, 4, generator=generator)
    sounds = (torch.randn(22, 32, generator=generator), torch.randn(60, 32, generator=generator))
    conditions = (
        Condition("image", "reference", 0, None, 128, 64, 1, 1, 1),
        Condition("audio", "reference", 1, audio_latents=11),
        Condition("video", "reference", 2, None, 64, 64, 22, 22, 7, audio_latents=30),
    )
    plan = replace(BASE, task="ref2va", partition="ref2va", conditions=conditions)
    latents = ConditionLatents((image, video), sounds)
    return Run(plan, text, VISION_TAGS, latents, (77.8639854262583, -295.2007307247259))


RUNS: dict[str, Callable[[], Run]] = {"t2va": t2va, "fl2va": fl2va, "ref2va": ref2va}


def run(case: Run, dit: DiT, modulation: LiveModulation) -> tuple[Rows, Rows]:
    """Initial and final target-and-condition rows of a golden request through our loop."""
    layout = build_layout(case.plan, case.tags, SPEC)
    sigmas = make_sigmas(case.plan.steps, case.plan.shifts)
    start = initial_rows(case.plan, case.latents, SPEC)
    steps = [step_timesteps(layout, sigmas, step) for step in range(sigmas.calls)]
    with torch.inference_mode():
        velocity_at = predictor(dit, modulation, case.text[0], shard(layout, 1, 0), steps)
        end = denoise(start, layout, sigmas, velocity_at, EveryStep(), lambda *_: None, move=select().euler)
    v, a = layout.condition_video, layout.condition_audio
    assert torch.equal(start.video[:v], end.video[:v]) and torch.equal(start.audio[:a], end.audio[:a])
    return start, Rows(end.video[v:], end.audio[a:])
