# mypy: allow-untyped-defs
"""q, k and v as e4m3 with one scale a head, k and v with their means taken out: what e4m3 attention reads.

Two passes over q, k, v: the first takes sums and extremes of each head, the second writes. Rounding is monotone, so the
largest size after the mean is taken out is that of the largest or of the smallest value. Rows of padding are not read.

Legend: S rows, H heads, d head dim, C chunks of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, scales_of, to_e4m3

CHUNK = 512  # rows whose sums one program makes: fixed, because the order of a sum is part of the bits
TILE = 64  # rows in flight


def warps_for(dims: int) -> int:
    """Warps of a program, for `TILE` rows of a head of so many dims, a power of two. On an H200 128 values a thread beat
    64 by a third and 32 by more than the double."""
    return max(1, min(8, TILE * dims // 4096))


@triton.jit
def _extremes(x_d, row_stride, first, last, at, inside, DIMS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros([DIMS], tl.float32)
    low, high = tl.full([DIMS], float("inf"), tl.float32), tl.full([DIMS], float("-inf"), tl.float32)
    for start in range(0, CHUNK, TILE):
        rows = first + start + tl.arange(0, TILE)
        there = (rows < last)[:, None] & inside[None, :]
        x = tl.load(x_d + rows.to(tl.int64)[:, None] * row_stride + at[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.sum(x, axis=0)
        low = tl.minimum(low, tl.min(tl.where(there, x, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(there, x, float("-inf")), axis=0))
    return total, low, high


@triton.jit
def _measure_kernel(
    q_SHd, k_SHd, v_SHd, sums_C2Hd, lows_C3Hd, highs_C3Hd, q_row, q_head, k_row, k_head, v_row, v_head, used,
    DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, DIMS)
    inside = at < DIM
    first = chunk * CHUNK
    place = (chunk * 3 * heads + head) * DIM + at
    _, low, high = _extremes(q_SHd + head * q_head, q_row, first, used, at, inside, DIMS, TILE, CHUNK)
    tl.store(lows_C3Hd + place, low, mask=inside)
    tl.store(highs_C3Hd + place, high, mask=inside)
    total, low, high = _extremes(k_SHd + head * k_head, k_row, first, used, at, inside, DIMS, TILE, CHUNK)
    place += heads * DIM
    tl.store(lows_C3Hd + place, low, mask=inside)
    tl.store(highs_C3Hd + place, high, mask=inside)
    sum_place = (chunk * 2 * heads + head) * DIM + at
    tl.store(sums_C2Hd + sum_place, total, mask=inside)
    total, low, high = _extremes(v_SHd + head * v_head, v_row, first, used, at, inside, DIMS, TILE, CHUNK)
    place += heads * DIM
    tl.store(lows_C3Hd + place, low, mask=inside)
    tl.store(highs_C3Hd + place, high, mask=inside)
    tl.store(sums_C2Hd + sum_place + heads * DIM, total, mask=inside)


@triton.jit
def _write(x_d, out_d, row_stride, out_stride, rows, used, at, inside, mean, inverse):
    there = (rows < used)[:, None] & inside[None, :]
    x = tl.load(x_d + rows[:, None] * row_stride + at[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out_d + rows[:, None] * out_stride + at[None, :], to_e4m3((x - mean[None, :]) * inverse), mask=there)


@triton.jit
def _quantize_kernel(
    q_SHd, k_SHd, v_SHd, q_out, k_out, v_out, means_2Hd, most_3H, scales_3H,
    q_row, q_head, k_row, k_head, v_row, v_head, used, DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, DIMS)
    inside = at < DIM
    rows = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    to, out_row = head * DIM, heads * DIM
    q_inverse, q_scale = scales_of(tl.load(most_3H + head))
    k_inverse, k_scale = scales_of(tl.load(most_3H + heads + head))
    v_inverse, v_scale = scales_of(tl.load(most_3H + 2 * heads + head))
    k_mean = tl.load(means_2Hd + head * DIM + at, mask=inside, other=0.0)
    v_mean = tl.load(means_2Hd + (heads + head) * DIM + at, mask=inside, other=0.0)
    _write(q_SHd + head * q_head, q_out + to, q_row, out_row, rows, used, at, inside, k_mean * 0.0, q_inverse)
    _write(k_SHd + head * k_head, k_out + to, k_row, out_row, rows, used, at, inside, k_mean, k_inverse)
    _write(v_SHd + head * v_head, v_out + to, v_row, out_row, rows, used, at, inside, v_mean, v_inverse)
    if tile == 0:
        tl.store(scales_3H + head, q_scale)
        tl.store(scales_3H + heads + head, k_scale)
        tl.store(scales_3H + 2 * heads + head, v_scale)


def _measure(parts: list[Tensor], strides: list[int], used: int) -> tuple[Tensor, Tensor]:
    """Means of k and v [2, H, d] and the largest sizes of q, k and v without them [3, H], all fp32."""
    _, heads, dim = parts[0].shape
    chunks, dims = triton.cdiv(used, CHUNK), triton.next_power_of_2(dim)
    sums = torch.empty(chunks, 2, heads, dim, dtype=torch.float32, device=parts[0].device)
    lows, highs = (torch.empty(chunks, 3, heads, dim, dtype=torch.float32, device=sums.device) for _ in range(2))
    _measure_kernel[(chunks, heads)](
        *parts, sums, lows, highs, *strides, used,
        DIM=dim, DIMS=dims, TILE=TILE, CHUNK=CHUNK, num_warps=warps_for(dims), **EXACT,
    )  # fmt: skip
    means = sums.sum(0) / used
    taken = torch.cat((torch.zeros_like(means[:1]), means))
    return means, torch.maximum(highs.amax(0) - taken, taken - lows.amin(0)).amax(-1)


@library.custom_op("twinreel::quantize_heads", mutates_args=())
def quantize_heads(
    q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as e4m3 [used, H, d], their scales [3, H] and the mean of v [H, d], both fp32. Strided rows and heads."""
    parts = [q_SHd, k_SHd, v_SHd]
    assert used > 0 and all(x.stride(2) == 1 for x in parts), "a head's values must be contiguous"
    _, heads, dim = q_SHd.shape
    strides = [stride for x in parts for stride in x.stride()[:2]]
    values = [torch.empty(used, heads, dim, dtype=torch.uint8, device=q_SHd.device) for _ in parts]
    scales, dims = torch.empty(3, heads, dtype=torch.float32, device=q_SHd.device), triton.next_power_of_2(dim)
    with torch.cuda.device_of(q_SHd):
        means, most = _measure(parts, strides, used)
        _quantize_kernel[(triton.cdiv(used, TILE), heads)](
            *parts, *values, means, most, scales, *strides, used,
            DIM=dim, DIMS=dims, TILE=TILE, num_warps=warps_for(dims), **EXACT,
        )  # fmt: skip
    q, k, v = (x.view(torch.float8_e4m3fn) for x in values)
    return q, k, v, scales, means[1].clone()


@quantize_heads.register_fake
def _(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, heads, dim = q_SHd.shape
    q, k, v = (q_SHd.new_empty(used, heads, dim, dtype=torch.float8_e4m3fn) for _ in range(3))
    scales = q_SHd.new_empty(3, heads, dtype=torch.float32)
    return q, k, v, scales, q_SHd.new_empty(heads, dim, dtype=torch.float32)
