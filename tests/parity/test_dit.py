"""The DiT against diffusers' class, bit for bit: single forwards and whole trajectories, fp32 and mixed bf16/fp32."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

import torch  # noqa: E402
from diffusers import MiniMaxH3Scheduler  # noqa: E402
from torch import Tensor  # noqa: E402

from dit_pair import Packed, Pair, make_pair, oracle, pack  # noqa: E402
from golden_dit import ODD, TINY, diffusers_shapes  # noqa: E402
from twinreel.models.dit import rope_table  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS = {
    "t2va": pack(("audio", 74), ("video", 42), text_tags=(1,) * 5),
    "fl2va": pack(("still", 12), ("audio", 74), ("video", 72), text_tags=(1, 1, 0, 0, 0, 1, 1)),
    "ref2va": pack(
        ("still", 15), ("sound", 22), ("sound", 60), ("still", 28), ("still", 8), ("audio", 74), ("video", 48),
        text_tags=(1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1),
    ),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[(spec, dtype) for spec in (TINY, ODD) for dtype in DTYPES],
    ids=["tiny-fp32", "tiny-bf16", "odd-fp32", "odd-bf16"],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(*request.param)


def draw(pair: Pair, layout: Packed, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spec = pair.spec
    video = torch.randn(len(layout.video), spec.video_row, generator=generator)
    audio = torch.randn(len(layout.audio), spec.audio_channels, generator=generator)
    return video, audio, torch.randn(len(layout.text), spec.text_dim, generator=generator)


def their_velocity(pair: Pair, layout: Packed, rows: tuple[Tensor, Tensor, Tensor], t: tuple[float, float]):
    batch = (x[None] for x in rows)
    indices = (layout.video, layout.audio, layout.text)
    outputs = pair.theirs(*batch, *layout.timesteps(*t), layout.tags, layout.positions, *indices, return_dict=False)
    return [output[0] for output in outputs]


def our_velocity(pair: Pair, layout: Packed, rows: tuple[Tensor, Tensor, Tensor], t: tuple[float, float]):
    video, audio, text = rows
    at = layout.row_state(pair)
    return list(pair.dit(video, audio, pair.dit.refine(text), at, pair.modulation.at(*layout.timesteps(*t), at)))


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_a_forward_is_bit_equal(pair: Pair, name: str):
    layout = LAYOUTS[name]
    rows = draw(pair, layout, seed=1)
    for t in ((0.0, 0.0), (0.31, 0.62)):
        for theirs, ours in zip(
            their_velocity(pair, layout, rows, t), our_velocity(pair, layout, rows, t), strict=True
        ):
            assert ours.dtype == torch.float32 and ours.abs().mean() > 0.05
            assert torch.equal(theirs, ours)


@torch.inference_mode()
def trajectory(pair: Pair, layout: Packed, velocity) -> tuple[Tensor, Tensor]:
    """Four grid points, three calls; the condition rows stay as they are."""
    video, audio, text = draw(pair, layout, seed=2)
    schedulers = [MiniMaxH3Scheduler(shift=shift) for shift in (12.0, 3.0)]
    for scheduler in schedulers:
        scheduler.set_timesteps(4)
    for times in zip(*(scheduler.timesteps for scheduler in schedulers), strict=True):
        moved = velocity(pair, layout, (video, audio, text), tuple(t.item() for t in times))
        starts = (layout.condition_video, layout.condition_audio)
        for rows, v, start, scheduler, t in zip((video, audio), moved, starts, schedulers, times, strict=True):
            rows[start:] = scheduler.step(v[start:], t, rows[start:], return_dict=False)[0]
    return video, audio


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trajectory_is_bit_equal(pair: Pair, name: str):
    theirs, ours = (trajectory(pair, LAYOUTS[name], velocity) for velocity in (their_velocity, our_velocity))
    start = draw(pair, LAYOUTS[name], seed=2)
    for before, a, b in zip(start, theirs, ours, strict=False):
        assert torch.equal(a, b) and not torch.equal(a, before)


@torch.inference_mode()
def test_refined_text_and_rope_are_bit_equal(pair: Pair):
    text = draw(pair, LAYOUTS["ref2va"], seed=3)[2]
    theirs = pair.theirs.token_refiner(pair.theirs.context_embedder(text[None].to(pair.dit.dtype)))
    assert torch.equal(theirs[0], pair.dit.refine(text))
    positions = torch.rand(500, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 5000
    half = 3 * pair.spec.rope_freqs
    for theirs, ours in zip(
        pair.theirs.rope(positions), rope_table(positions, pair.spec, torch.float32, "cpu"), strict=True
    ):
        assert torch.equal(theirs[:, :half], ours) and torch.equal(theirs[:, half:], ours)


@pytest.mark.parametrize("spec", [TINY, ODD], ids=["tiny", "odd"])
def test_the_golden_names_and_shapes_are_the_oracles(spec):
    assert diffusers_shapes(spec) == {name: parameter.shape for name, parameter in oracle(spec).named_parameters()}
