# mypy: allow-untyped-defs
"""Two passes of the video decoder's block: the rotation of its heads, and the scaled way back into the residual.

Neither has a row sum, so both equal their definitions bit for bit. Legend: B tiles, N tokens, H heads, d head dim,
R rotated dims, S rows, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, round_like

BLOCK = 1024


@triton.jit
def _rotate_kernel(
    x_SH2d, cos_NR, sin_NR, q_SHd, k_SHd, tokens,
    WIDTH: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place, which, head = columns % DIM, (columns // DIM) % 2, columns // (2 * DIM)
    turned = inside & (place < R)
    partner = tl.where(place < R // 2, columns + R // 2, columns - R // 2)
    sign = tl.where(place < R // 2, -1.0, 1.0)
    x = round_like(tl.load(x_SH2d + row * WIDTH + columns, mask=inside, other=0.0), cos_NR)
    other = round_like(tl.load(x_SH2d + row * WIDTH + partner, mask=turned, other=0.0), cos_NR) * sign
    cos = tl.load(cos_NR + (row % tokens) * R + place, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_NR + (row % tokens) * R + place, mask=turned, other=0.0).to(tl.float32)
    spun = round_like(round_like(x * cos, cos_NR) + round_like(other * sin, cos_NR), cos_NR)
    out = tl.where(turned, spun, x)
    at = row * (WIDTH // 2) + head * DIM + place
    tl.store(q_SHd + at, out.to(q_SHd.dtype.element_ty), mask=inside & (which == 0))
    tl.store(k_SHd + at, out.to(k_SHd.dtype.element_ty), mask=inside & (which == 1))


@library.custom_op("twinreel::rotate_heads", mutates_args=())
def rotate_heads(x_BNH2d: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, N, H, d] of normalised fp32 heads, rounded to the tables' dtype and rotated in it (SPEC 8.3)."""
    assert x_BNH2d.is_contiguous() and x_BNH2d.dtype == torch.float32 and x_BNH2d.shape[3] == 2
    assert cos_NR.is_contiguous() and sin_NR.is_contiguous() and cos_NR.shape == sin_NR.shape
    batch, tokens, heads, _, dim = x_BNH2d.shape
    q, k = (x_BNH2d.new_empty(batch, tokens, heads, dim, dtype=cos_NR.dtype) for _ in range(2))
    width = heads * 2 * dim
    with torch.cuda.device_of(x_BNH2d):
        _rotate_kernel[(batch * tokens, triton.cdiv(width, BLOCK))](
            x_BNH2d, cos_NR, sin_NR, q, k, tokens,
            WIDTH=width, DIM=dim, R=cos_NR.shape[-1], BLOCK=BLOCK, num_warps=4, **EXACT,
        )  # fmt: skip
    return q, k


@rotate_heads.register_fake
def _(x_BNH2d: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _, dim = x_BNH2d.shape
    return tuple(x_BNH2d.new_empty(batch, tokens, heads, dim, dtype=cos_NR.dtype) for _ in range(2))  # type: ignore


@triton.jit
def _scale_add_kernel(x_SD, h_SD, scale_D, out_SD, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    scale = tl.load(scale_D + columns, mask=inside, other=0.0)
    h = tl.load(h_SD + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_SD + at, mask=inside, other=0.0)
    tl.store(out_SD + at, x + h * scale, mask=inside)


@library.custom_op("twinreel::scale_add", mutates_args=())
def scale_add(x_SD: Tensor, h_SD: Tensor, scale_D: Tensor) -> Tensor:
    """`fl(x + fl(h * scale))` in fp32; `h` may be of less precision. A new [S, D]."""
    assert x_SD.is_contiguous() and h_SD.is_contiguous() and x_SD.dtype == scale_D.dtype == torch.float32
    out_SD = torch.empty_like(x_SD)
    width = x_SD.shape[-1]
    with torch.cuda.device_of(x_SD):
        _scale_add_kernel[(x_SD.numel() // width, triton.cdiv(width, BLOCK))](
            x_SD, h_SD, scale_D, out_SD, WIDTH=width, BLOCK=BLOCK, num_warps=4, **EXACT
        )
    return out_SD


@scale_add.register_fake
def _(x_SD: Tensor, h_SD: Tensor, scale_D: Tensor) -> Tensor:
    return torch.empty_like(x_SD)
