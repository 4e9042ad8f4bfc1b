# mypy: allow-untyped-defs
"""RMS norm of q and k per head and their rotation, read from the interleaved qkv rows, written as attention reads them.

A head is cut into the two halves that rotate into each other and the rest, so that no value needs its partner from
another thread, and every load stays wide.

Legend: S rows, H heads, d head dim, R rotary angles (half the rotated dims).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, round_like

# Heads of one program, however many there are: the compiler lays a block out over threads by its shape, and with the
# layout goes the order of a row's sum. One shape means the same bits for all heads, some of them, or those of a rank.
HEADS = 8


@triton.jit
def _normalise(x, weight_d, dims, inside, scale_of_head, pointer):
    weight = tl.load(weight_d + dims, mask=inside, other=0.0).to(tl.float32)
    return round_like(x * scale_of_head * weight[None, :], pointer)


@triton.jit
def _norm_rope(
    source, out, weight_d, cos_R, sin_R, heads, there, head_stride, eps,
    DIM: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    half, rest = tl.arange(0, HALF), 2 * R + tl.arange(0, REST)
    in_half, in_rest = half < R, rest < DIM
    read, write = source + heads[:, None] * head_stride, out + heads[:, None] * DIM
    half_mask, rest_mask = there[:, None] & in_half[None, :], there[:, None] & in_rest[None, :]
    kind = out.dtype.element_ty
    # Where nothing rotates (R = 0) the halves are empty and the rest is the whole head.
    x1 = tl.load(read + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    x2 = tl.load(read + (R + half)[None, :], mask=half_mask, other=0.0).to(tl.float32)
    x3 = tl.load(read + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1) + tl.sum(x3 * x3, axis=1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    x1 = _normalise(x1, weight_d, half, in_half, scale, out)
    x2 = _normalise(x2, weight_d, R + half, in_half, scale, out)
    x3 = _normalise(x3, weight_d, rest, in_rest, scale, out)
    cos = tl.load(cos_R + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_R + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    y1 = round_like(round_like(x1 * cos, out) - round_like(x2 * sin, out), out)
    y2 = round_like(round_like(x2 * cos, out) + round_like(x1 * sin, out), out)
    tl.store(write + half[None, :], y1.to(kind), mask=half_mask)
    tl.store(write + (R + half)[None, :], y2.to(kind), mask=half_mask)
    tl.store(write + rest[None, :], x3.to(kind), mask=rest_mask)


@triton.jit
def _kernel(
    qkv_SH3d, q_SHd, k_SHd, q_weight_d, k_weight_d, cos_SR, sin_SR,
    row_stride, head_stride, part_stride, cos_stride, sin_stride, q_eps, k_eps, num_heads,
    DIM: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = heads < num_heads
    source, target = qkv_SH3d + row * row_stride, row * num_heads * DIM
    cos_R, sin_R = cos_SR + row * cos_stride, sin_SR + row * sin_stride
    _norm_rope(
        source, q_SHd + target, q_weight_d, cos_R, sin_R, heads, there, head_stride, q_eps, DIM, R, HALF, REST
    )  # fmt: skip
    _norm_rope(
        source + part_stride, k_SHd + target, k_weight_d, cos_R, sin_R, heads, there, head_stride, k_eps,
        DIM, R, HALF, REST,
    )  # fmt: skip


def warps_for(values: int) -> int:
    """Warps of a program that turns so many values of q and as many of k. On an H200 8 values of each a thread beat 16
    by a twenty-fifth and 4 by a half."""
    return max(1, min(16, triton.next_power_of_2(values) // 256))


@library.custom_op("twinreel::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    qkv_SH3d: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    cos_SR: Tensor | None,
    sin_SR: Tensor | None,
    *,
    q_eps: float,
    k_eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalised and rotated q and k, two new contiguous [S, H, d] (SPEC 2.4); any strides but the last dim's."""
    assert qkv_SH3d.stride(3) == 1, f"a head's values must be contiguous, got strides {qkv_SH3d.stride()}"
    rows, num_heads, _, dim = qkv_SH3d.shape
    q_SHd, k_SHd = (torch.empty(rows, num_heads, dim, dtype=qkv_SH3d.dtype, device=qkv_SH3d.device) for _ in range(2))
    angles, cos, sin = 0, q_weight_d, q_weight_d
    if cos_SR is not None and sin_SR is not None:
        assert cos_SR.stride(1) == sin_SR.stride(1) == 1 and 2 * cos_SR.shape[1] <= dim
        angles, cos, sin = cos_SR.shape[1], cos_SR, sin_SR
    if rows:
        with torch.cuda.device_of(qkv_SH3d):
            _kernel[(rows, triton.cdiv(num_heads, HEADS))](
                qkv_SH3d, q_SHd, k_SHd, q_weight_d, k_weight_d, cos, sin,
                qkv_SH3d.stride(0), qkv_SH3d.stride(1), qkv_SH3d.stride(2),
                cos.stride(0) if angles else 0, sin.stride(0) if angles else 0, q_eps, k_eps, num_heads,
                DIM=dim, R=angles, HALF=triton.next_power_of_2(max(angles, 1)),
                REST=triton.next_power_of_2(max(dim - 2 * angles, 1)), HEADS=HEADS,
                num_warps=warps_for(HEADS * dim), **EXACT,
            )  # fmt: skip
    return q_SHd, k_SHd


@qk_norm_rope.register_fake
def _(
    qkv_SH3d: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    cos_SR: Tensor | None,
    sin_SR: Tensor | None,
    *,
    q_eps: float,
    k_eps: float,
) -> tuple[Tensor, Tensor]:
    rows, num_heads, _, dim = qkv_SH3d.shape
    return qkv_SH3d.new_empty(rows, num_heads, dim), qkv_SH3d.new_empty(rows, num_heads, dim)
