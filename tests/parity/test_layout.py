"""Packed layouts and row timesteps equal diffusers' bit for bit, over several hundred combinations."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from twinreel.layout import PackedLayout, build_layout
from twinreel.plan import Condition, Plan
from twinreel.schedule import make_sigmas, step_timesteps
from twinreel.spec import Spec

pytest.importorskip("diffusers")

from diffusers.modular_pipelines.minimax_h3 import before_denoise as oracle  # noqa: E402

SPEC = Spec()
COMMON = {"patch_size": (1, 2, 2), "audio_channels": 2, "audio_tag": 2, "video_tag": 0}


def plan(T: int, h: int, w: int, A: int, conditions: tuple[Condition, ...] = ()) -> Plan:
    return Plan("t2va", "fl2va", "a", h * 16, w * 16, 0, T, A, 50, 0, "official", (12.0, 3.0), conditions)


def same(layout: PackedLayout, theirs: tuple) -> None:
    positions, tags, video, audio, text, condition_video, condition_audio = theirs
    assert torch.equal(layout.positions_S3, positions)
    assert torch.equal(layout.tags_S, tags)
    assert torch.equal(layout.video_indices, video)
    assert torch.equal(layout.audio_indices, audio)
    assert torch.equal(layout.text_indices, text)
    assert (layout.condition_video, layout.condition_audio) == (condition_video, condition_audio)


def text_tags(rows: int) -> torch.Tensor:
    tags = torch.ones(rows, dtype=torch.int64)
    tags[rows // 3 : rows // 2] = 0
    return tags


ANCHORS = ((), ("first",), ("last",), ("first", "last"))
CANVASES = ((48, 84), (84, 48), (42, 96), (4, 6), (32, 126), (62, 48))


@pytest.mark.parametrize("anchors", ANCHORS)
def test_keyframe_layouts(anchors: tuple[str, ...]) -> None:
    for (h, w), (T, A), rows in itertools.product(CANVASES, ((7, 37), (32, 178), (107, 603)), (1, 10, 333, 1400)):
        conditions = tuple(
            Condition("image", "keyframe", i, anchor, h * 16, w * 16, 1, 1, 1) for i, anchor in enumerate(anchors)
        )
        tags = text_tags(rows)
        theirs = oracle.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            tags, T, h, w, A, keyframe_anchors=anchors, **COMMON
        )
        same(build_layout(plan(T, h, w, A, conditions), tags, SPEC), theirs)


def random_reference(
    rng: random.Random, i: int
) -> tuple[Condition, SimpleNamespace, torch.Tensor | None, torch.Tensor | None]:
    kind = rng.choice(("image", "video", "video", "audio"))
    h, w = rng.choice(((64, 96), (48, 84), (32, 32), (4, 6), (126, 32)))
    T = rng.choice((7, 17, 37, 57)) if kind == "video" else 1
    A = rng.choice((1, 33, 80, 207)) if kind == "audio" or (kind == "video" and rng.random() < 0.5) else 0
    condition = Condition(
        kind, "reference", i, None, h * 16 * (kind != "audio"), w * 16 * (kind != "audio"), latents=T, audio_latents=A
    )
    latents = torch.empty(1, 24, T, h, w) if kind != "audio" else None
    rows = torch.empty(2 * A, 32) if A else None
    return condition, SimpleNamespace(kind=kind, has_audio=A > 0), latents, rows


def test_reference_layouts() -> None:
    rng = random.Random(0)
    for _ in range(150):
        made = [random_reference(rng, i) for i in range(rng.randint(1, 6))]
        h, w = rng.choice(CANVASES)
        T, A, rows = rng.choice((7, 37, 57)), rng.choice((37, 207)), rng.randint(1, 900)
        tags = text_tags(rows)
        theirs = oracle.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags,
            [reference for _, reference, _, _ in made],
            [latents for _, _, latents, _ in made if latents is not None],
            [rows_ for _, _, _, rows_ in made if rows_ is not None],
            T, h, w, A, **COMMON,
        )  # fmt: skip
        layout = build_layout(plan(T, h, w, A, tuple(condition for condition, *_ in made)), tags, SPEC)
        same(layout, theirs)


def test_row_timesteps() -> None:
    rng = random.Random(1)
    sigmas = make_sigmas(50, (12.0, 3.0))
    for _ in range(30):
        made = [random_reference(rng, i)[0] for i in range(rng.randint(0, 4))]
        layout = build_layout(plan(7, 4, 6, 37, tuple(made)), text_tags(rng.randint(1, 50)), SPEC)
        for step in (0, 1, 24, 48):
            video, audio = float(sigmas.video.times[step]), float(sigmas.audio.times[step])
            theirs = oracle.MiniMaxH3SetTimestepsStep.build_row_timesteps(
                layout.video_indices, layout.audio_indices, layout.condition_video, layout.condition_audio,
                len(layout.text_indices), video, audio, max(video, 0.999), 1.0,
            )  # fmt: skip
            for mine, other in zip(step_timesteps(layout, sigmas, step), theirs, strict=True):
                assert torch.equal(mine, other)
