"""Whole denoising runs equal diffusers' blocks bit for bit, from processor outputs to latents."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from denoise_oracle import oracle_latents  # noqa: E402
from dit_pair import make_pair  # noqa: E402
from golden_dit import TINY  # noqa: E402
from golden_runs import RUNS, SPEC, fl2va, run  # noqa: E402
from twinreel.layout import build_layout  # noqa: E402
from twinreel.noise import Rows  # noqa: E402
from twinreel.pipeline import split_latents  # noqa: E402

CASES = RUNS | {"fl2va first": lambda: fl2va(("first",)), "fl2va last": lambda: fl2va(("last",))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_runs_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]()
    pair = make_pair(TINY, dtype)
    their_video, their_audio = oracle_latents(case.plan, case.text, case.tags, case.latents, pair.theirs)
    _, end = run(case, pair.dit, pair.modulation)
    layout = build_layout(case.plan, case.tags, SPEC)
    whole = Rows(
        torch.cat([torch.zeros(layout.condition_video, 96), end.video]),
        torch.cat([torch.zeros(layout.condition_audio, 32), end.audio]),
    )
    video, audio = split_latents(whole, layout, case.plan, SPEC)
    assert torch.equal(video, their_video) and torch.equal(audio, their_audio)
