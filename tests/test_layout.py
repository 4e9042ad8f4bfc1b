"""The packed sequence: golden checksums of SPEC 13.4, golden spans, patchify's inverse, shards."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

import rank_dit
from twinreel.layout import (
    CLOCK_VIDEO,
    PADDING_TAG,
    SHARD_ROWS,
    PackedLayout,
    build_layout,
    pairwise_span,
    patchify,
    sequential_span,
    shard,
    shard_sizes,
    unpatchify,
)
from twinreel.plan import Condition, Plan
from twinreel.spec import Spec

SPEC = Spec()


def plan(conditions: tuple[Condition, ...] = (), T: int = 37, h: int = 48, w: int = 84, A: int = 207) -> Plan:
    return Plan("t2va", "fl2va", "a", h * 16, w * 16, 124, T, A, 50, 0, "official", (12.0, 3.0), conditions)


def keyframe(anchor: str) -> Condition:
    return Condition("image", "keyframe", 0, anchor, 768, 1344, 1, 1, 1)


def tags(rows: int, vision: range = range(0)) -> torch.Tensor:
    values = torch.ones(rows, dtype=torch.int64)
    values[list(vision)] = 0
    return values


REFERENCES = (
    Condition("image", "reference", 0, None, 1024, 1536, 1, 1, 1),
    Condition("audio", "reference", 1, audio_latents=80),
    Condition("video", "reference", 2, None, 768, 1344, 22, 22, 7, audio_latents=40),
    Condition("video", "reference", 3, None, 512, 512, 56, 56, 17),
)
GOLDEN = [
    (plan(), tags(10), 37720, (0, 0), (4149387.0, 577940.5826861971, 584355.9462970959),
     "e7f874638b538061", "29c05d26f0cbf098", "1ab0ebfe1bfa582a"),
    (plan((keyframe("first"), keyframe("last"))), tags(20, range(5, 12)), 39746, (2016, 0),
     (4773592.0, 609180.6141827484, 615595.977793647), "ca39d4ea9c8f4da2", "cdffb0cb296e07b6", "57d4d6336b66071e"),
    (plan((keyframe("last"),)), tags(20, range(5, 12)), 38738, (1008, 0),
     (4753432.0, 593560.5984344727, 599975.9620453715), "77930487da75fe78", "6edbec868f612356", "6433e344be949004"),
    (plan(REFERENCES), tags(20, range(5, 12)), 50914, (12944, 240),
     (14279896.666666668, 776509.6235499738, 786644.0385295096),
     "77b8698174ce799c", "68d4f9d0bf782d67", "3b093163262c5923"),
    (plan(T=7, h=4, w=6, A=37), tags(3), 119, (0, 0), (2313.0, 397.657148808284, 1098.29117289907),
     "f3794324d06217bc", "7bc6957dd350d4da", "9eab2e6aaf3e50a5"),
]  # fmt: skip


def sha(values: torch.Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(values.numpy()).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("made", "text", "rows", "conditions", "sums", "positions", "tag", "video"), GOLDEN)
def test_golden_layouts(made, text, rows, conditions, sums, positions, tag, video) -> None:  # noqa: ANN001
    layout = build_layout(made, text, SPEC)
    assert layout.rows == rows
    assert (layout.condition_video, layout.condition_audio) == conditions
    assert [np.sum(layout.positions_S3[:, i].numpy()) for i in range(3)] == pytest.approx(list(sums), abs=1e-9)
    assert (sha(layout.positions_S3), sha(layout.tags_S), sha(layout.video_indices)) == (positions, tag, video)


def test_golden_first_rows() -> None:
    layout = build_layout(plan(), tags(10), SPEC)
    p = layout.positions_S3
    left, right, first = p[10], p[10 + 207], p[10 + 414]
    assert left[:2].tolist() == [10, 0] and left[2] == pytest.approx(-5.1660, abs=1e-4)
    assert right[2] == pytest.approx(36.1581, abs=1e-4)
    assert first.tolist() == pytest.approx([10, 3.9051, -5.1660], abs=1e-4)
    assert p[10 + 414 + 1008, 0] == pytest.approx(11.6667, abs=1e-4)
    assert p[-1].tolist() == [209.99999999999991, 27.08695787493733, 36.15810522715877]
    last = build_layout(plan((keyframe("last"),)), tags(20), SPEC)
    assert last.positions_S3[20, 0].item() == 224.99999999999997


@pytest.mark.parametrize(
    ("latents", "pairwise", "sequential"),
    [
        (16, 86.66666666666667, 86.66666666666669),
        (17, 93.33333333333334, 93.33333333333336),
        (22, 121.6666666666667, 121.66666666666671),
        (32, 178.33333333333334, 178.3333333333333),
        (37, 206.66666666666663, 206.66666666666657),
        (57, 320.00000000000006, 320.00000000000006),
        (72, 405.0, 405.00000000000034),
        (107, 603.3333333333331, 603.3333333333335),
    ],
)
def test_golden_spans(latents: int, pairwise: float, sequential: float) -> None:
    assert pairwise_span(latents) == pairwise
    assert sequential_span(latents) == sequential


def test_segments_cover_every_row_once() -> None:
    layout: PackedLayout = build_layout(plan(REFERENCES), tags(20), SPEC)
    ends = [segment.start + segment.rows for segment in layout.segments]
    assert [segment.start for segment in layout.segments] == [0, *ends[:-1]] and ends[-1] == layout.rows
    every = torch.cat([layout.text_indices, layout.video_indices, layout.audio_indices]).sort().values
    assert torch.equal(every, torch.arange(layout.rows))
    assert [s.label for s in layout.segments if s.role == "condition"] == [
        "reference 0", "reference 1", "reference 2 sound", "reference 2", "reference 3",
    ]  # fmt: skip


def test_patchify_order_and_inverse() -> None:
    latents = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(1, 2, 3, 4, 6)
    rows = patchify(latents, (1, 2, 2))
    assert rows.shape == (18, 8)
    # row 1 of frame 0: columns 2..3 of rows 0..1; features (c, ph, pw)
    assert rows[1].tolist() == [2, 3, 8, 9, 74, 75, 80, 81]
    assert torch.equal(unpatchify(rows, (3, 4, 6), (1, 2, 2)), latents)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 8])
def test_shards_cover_every_row_once(ranks: int) -> None:
    whole = rank_dit.packed(37, 20, 74, 301)
    parts = [shard(whole, ranks, rank) for rank in range(ranks)]
    rows = {part.layout.rows for part in parts}
    assert len(rows) == 1 and (ranks == 1 or not rows.pop() % SHARD_ROWS)
    positions = torch.cat([part.layout.positions_S3 for part in parts])
    assert torch.equal(positions[: whole.rows], whole.positions_S3) and not positions[whole.rows :].any()
    tags, clock = (torch.cat([getattr(part.layout, name) for part in parts]) for name in ("tags_S", "clock_S"))
    assert torch.equal(tags[: whole.rows], whole.tags_S) and set(tags[whole.rows :].tolist()) <= {PADDING_TAG}
    assert torch.equal(clock[: whole.rows], whole.clock_S) and set(clock[whole.rows :].tolist()) <= {CLOCK_VIDEO}
    for kind in ("text", "video", "audio"):
        found = [getattr(part.layout, f"{kind}_indices") + part.first for part in parts]
        assert torch.equal(torch.cat(found), getattr(whole, f"{kind}_indices"))
        slices = [getattr(part, kind) for part in parts]
        assert [part.start for part in slices] == [0, *[part.stop for part in slices[:-1]]]
    assert sum(part.layout.condition_video for part in parts) == 20
    assert all(part.used == whole.rows and part.layout.condition_audio == 0 for part in parts)
    video, audio = shard_sizes(whole, ranks)
    assert (sum(video), sum(audio)) == (321, 74) and len(video) == ranks
    if ranks == 8:
        assert 0 in audio and not len(parts[-1].layout.video_indices)  # ranks without sound; one of padding alone
    indices = torch.cat([part.take(torch.arange(whole.rows), -5) for part in parts])
    assert torch.equal(indices[: whole.rows], torch.arange(whole.rows)) and set(indices[whole.rows :].tolist()) <= {-5}
