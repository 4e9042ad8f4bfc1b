# mypy: allow-untyped-defs
"""SiLU of a GroupNorm of each frame, written behind two frames of zeros with reflected edges: what a causal convolution
reads, in one pass after one over the statistics. Channels are innermost.

Sums are of differences from a frame's first pixel, so that flat frames keep their variance. Arithmetic is fp32, the last
sums fp64. Legend: N frames of all clips, P pixels, C channels, G groups, K chunks of pixels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, library, nn

from twinreel.ops.frames import PAST, Edges
from twinreel.ops.rounding import EXACT

SPAN = 1024  # pixels whose sums one program makes
VALUES = 4096  # in flight


@triton.jit
def _sums_kernel(x_NPC, sums_NK2C, pixels, C: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    frame, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    channels = tl.arange(0, C)
    x_PC = x_NPC + frame * pixels * C
    origin = tl.load(x_PC + channels).to(tl.float32)
    total, squares = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for start in range(0, SPAN, BLOCK):
        rows = chunk * SPAN + start + tl.arange(0, BLOCK)
        there = (rows < pixels)[:, None]
        x = tl.load(x_PC + rows[:, None].to(tl.int64) * C + channels[None, :], mask=there, other=0.0).to(tl.float32)
        apart = tl.where(there, x - origin[None, :], 0.0)
        total += tl.sum(apart, axis=0)
        squares += tl.sum(apart * apart, axis=0)
    place = (frame * chunks + chunk) * 2 * C + channels
    tl.store(sums_NK2C + place, total)
    tl.store(sums_NK2C + place + C, squares)


@triton.jit
def _statistics_kernel(
    x_NPC, sums_NK2C, mean_NG, scale_NG, pixels, chunks, eps, C: tl.constexpr, G: tl.constexpr, EACH: tl.constexpr
):
    frame = tl.program_id(0).to(tl.int64)
    channels, groups = tl.arange(0, C), tl.arange(0, G)
    total, squares = tl.zeros([C], tl.float64), tl.zeros([C], tl.float64)
    for chunk in range(0, chunks):
        place = (frame * chunks + chunk) * 2 * C + channels
        total += tl.load(sums_NK2C + place).to(tl.float64)
        squares += tl.load(sums_NK2C + place + C).to(tl.float64)
    apart = total / pixels
    mean = tl.load(x_NPC + frame * pixels * C + channels).to(tl.float64) + apart
    variance = squares / pixels - apart * apart
    mean_GE, variance_GE = tl.reshape(mean, [G, EACH]), tl.reshape(variance, [G, EACH])
    mean_G = tl.sum(mean_GE, axis=1) / EACH
    between = mean_GE - mean_G[:, None]
    variance_G = tl.sum(variance_GE + between * between, axis=1) / EACH
    tl.store(mean_NG + frame * G + groups, mean_G.to(tl.float32))
    tl.store(scale_NG + frame * G + groups, (1.0 / tl.sqrt(variance_G + eps)).to(tl.float32))


@triton.jit
def _padded_kernel(
    x_NPC, mean_NG, scale_NG, weight_C, bias_C, out_MQC, frames, height, width, out_height, out_width, first,
    C: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    target, channels = tl.program_id(0), tl.arange(0, C)
    clip, at = target // (frames + PAST), target % (frames + PAST) - PAST
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < out_height * out_width
    y, x = places // out_width - first, places % out_width - first
    y = tl.where(y < 0, -y, tl.where(y >= height, 2 * (height - 1) - y, y))
    x = tl.where(x < 0, -x, tl.where(x >= width, 2 * (width - 1) - x, x))
    frame = (clip * frames + tl.maximum(at, 0)).to(tl.int64)
    source = (frame * height * width + y * width + x)[:, None] * C + channels[None, :]
    value = tl.load(x_NPC + source, mask=(inside & (at >= 0))[:, None], other=0.0).to(tl.float32)
    if NORM:
        group = channels // EACH
        mean, scale = tl.load(mean_NG + frame * (C // EACH) + group), tl.load(scale_NG + frame * (C // EACH) + group)
        weight, bias = tl.load(weight_C + channels).to(tl.float32), tl.load(bias_C + channels).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] * weight[None, :] + bias[None, :]
        value = value / (1.0 + tl.exp(-value))
        value = tl.where(at >= 0, value, 0.0)
    out = (target.to(tl.int64) * out_height * out_width + places)[:, None] * C + channels[None, :]
    tl.store(out_MQC + out, value.to(out_MQC.dtype.element_ty), mask=inside[:, None])


def padded(x_BCFHW: Tensor, norm: nn.GroupNorm | None, edges: Edges) -> Tensor:
    """See `frames.FrameOps`. Channels a power of two; any memory order comes in, channels innermost go out."""
    x_BFHWC = x_BCFHW.permute(0, 2, 3, 4, 1).contiguous()
    if norm is None:
        return pad_frames(x_BFHWC, edges).permute(0, 4, 1, 2, 3)
    made = norm_pad_frames(x_BFHWC, norm.weight, norm.bias, norm.num_groups, norm.eps, edges)
    return made.permute(0, 4, 1, 2, 3)


@library.custom_op("twinreel::norm_pad_frames", mutates_args=())
def norm_pad_frames(
    x_BFHWC: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, edges: Sequence[int]
) -> Tensor:
    """`silu(group_norm(frame))` of each frame [H, W, C], padded like `pad_frames`. fp32, bf16 or fp16."""
    batch, frames, height, width, channels = x_BFHWC.shape
    count, pixels = batch * frames, height * width
    chunks, block = triton.cdiv(pixels, SPAN), max(1, VALUES // channels)
    sums = torch.empty(count, chunks, 2, channels, dtype=torch.float32, device=x_BFHWC.device)
    mean, scale = torch.empty(2, count, groups, dtype=torch.float32, device=x_BFHWC.device)
    with torch.cuda.device_of(x_BFHWC):
        _sums_kernel[(count, chunks)](x_BFHWC, sums, pixels, C=channels, BLOCK=block, SPAN=SPAN, num_warps=4, **EXACT)
        _statistics_kernel[(count,)](
            x_BFHWC, sums, mean, scale, pixels, chunks, eps, C=channels, G=groups, EACH=channels // groups,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return _pad(x_BFHWC, edges, (mean, scale, weight_C, bias_C))


@library.custom_op("twinreel::pad_frames", mutates_args=())
def pad_frames(x_BFHWC: Tensor, edges: Sequence[int]) -> Tensor:
    """Two frames of zeros before the first; so many pixels (0 or 1) reflected above and left, and below and right."""
    return _pad(x_BFHWC, edges, None)


def _pad(x_BFHWC: Tensor, edges: Sequence[int], norm: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    assert x_BFHWC.is_contiguous() and x_BFHWC.shape[-1] & (x_BFHWC.shape[-1] - 1) == 0, x_BFHWC.shape
    batch, frames, height, width, channels = x_BFHWC.shape
    out = _padded_like(x_BFHWC, edges)
    out_height, out_width = out.shape[2:4]
    block = max(1, VALUES // channels)
    mean, scale, weight, bias = norm or (x_BFHWC,) * 4
    with torch.cuda.device_of(x_BFHWC):
        _padded_kernel[(batch * (frames + PAST), triton.cdiv(out_height * out_width, block))](
            x_BFHWC, mean, scale, weight, bias, out, frames, height, width, out_height, out_width, edges[0],
            C=channels, EACH=1 if norm is None else channels // mean.shape[-1], BLOCK=block, NORM=norm is not None,
            PAST=PAST, num_warps=4, **EXACT,
        )  # fmt: skip
    return out


def _padded_like(x_BFHWC: Tensor, edges: Sequence[int]) -> Tensor:
    batch, frames, height, width, channels = x_BFHWC.shape
    return x_BFHWC.new_empty(batch, frames + PAST, height + sum(edges), width + sum(edges), channels)


@norm_pad_frames.register_fake
def _(x_BFHWC, weight_C, bias_C, groups, eps, edges):
    return _padded_like(x_BFHWC, edges)


@pad_frames.register_fake
def _(x_BFHWC, edges):
    return _padded_like(x_BFHWC, edges)
