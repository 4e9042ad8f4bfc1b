# mypy: allow-untyped-defs
"""The Euler update of both modalities in one launch. fp32, every product and sum rounded: equal to the definition."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT

BLOCK = 1024


@triton.jit
def _move(x, velocity, out, count, sigma, ratio, rest, block, BLOCK: tl.constexpr):
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(x + places, mask=inside, other=0.0)
    denoised = value + sigma * tl.load(velocity + places, mask=inside, other=0.0)
    tl.store(out + places, ratio * value + rest * denoised, mask=inside)


@triton.jit
def _kernel(
    x_v, velocity_v, out_v, count_v, sigma_v, ratio_v, rest_v,
    x_a, velocity_a, out_a, count_a, sigma_a, ratio_a, rest_a, video_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < video_blocks:
        _move(x_v, velocity_v, out_v, count_v, sigma_v, ratio_v, rest_v, block, BLOCK)
    else:
        _move(x_a, velocity_a, out_a, count_a, sigma_a, ratio_a, rest_a, block - video_blocks, BLOCK)


@library.custom_op("twinreel::euler", mutates_args={"outs"})
def euler(xs: Sequence[Tensor], velocities: Sequence[Tensor], outs: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Two streams (video, audio) of contiguous fp32 rows, moved into `outs`, which may be `xs` (SPEC 7).

    `factors` holds sigma, ratio and 1 - ratio of the first stream and of the second, each an fp32 value.
    """
    video, audio = zip(xs, velocities, outs, strict=True)
    for tensor in (*video, *audio):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), "rows must be contiguous fp32"
    blocks = [triton.cdiv(x.numel(), BLOCK) for x in xs]
    if sum(blocks):
        with torch.cuda.device_of(video[0]):
            _kernel[(sum(blocks),)](
                *video, video[0].numel(), *factors[:3], *audio, audio[0].numel(), *factors[3:], blocks[0],
                BLOCK=BLOCK, num_warps=4, **EXACT,
            )  # fmt: skip


@euler.register_fake
def _(xs: Sequence[Tensor], velocities: Sequence[Tensor], outs: Sequence[Tensor], factors: Sequence[float]) -> None:
    return None
