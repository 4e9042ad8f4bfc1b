# mypy: allow-untyped-defs
"""Rows as e4m3 with one scale each: one program a row, read once.

Legend: S rows, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, scales_of, to_e4m3

MAX_WIDTH = 32768  # one program holds a whole row in registers


@triton.jit
def _kernel(x_SD, out_SD, scale_S, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_SD + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    inverse, scale = scales_of(tl.max(tl.abs(x), axis=0))
    tl.store(out_SD + row * WIDTH + columns, to_e4m3(x * inverse), mask=inside)
    tl.store(scale_S + row, scale)


def warps_for(block: int) -> int:
    """Warps of a program: 32 values a thread."""
    return max(1, min(16, block // 1024))


def empty_rows(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Bytes [S, width] for e4m3 values, and scales [S, 1] fp32, for the rows of `like`."""
    rows = like.shape[0]
    values = torch.empty(rows, width, dtype=torch.uint8, device=like.device)
    return values, torch.empty(rows, 1, dtype=torch.float32, device=like.device)


@library.custom_op("twinreel::quantize_rows", mutates_args=())
def quantize_rows(x_SD: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [S, D] and fp32 scales [S, 1] of bf16 or fp32 rows, which may be strided."""
    assert x_SD.ndim == 2 and x_SD.stride(1) == 1, "rows must be contiguous"
    rows, width = x_SD.shape
    assert width <= MAX_WIDTH, f"a row of {width} values is wider than {MAX_WIDTH}"
    values, scale = empty_rows(x_SD, width)
    if rows:
        block = triton.next_power_of_2(width)
        with torch.cuda.device_of(x_SD):
            _kernel[(rows,)](
                x_SD, values, scale, x_SD.stride(0), WIDTH=width, BLOCK=block, num_warps=warps_for(block), **EXACT
            )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scale


@quantize_rows.register_fake
def _(x_SD: Tensor) -> tuple[Tensor, Tensor]:
    return x_SD.new_empty(x_SD.shape, dtype=torch.float8_e4m3fn), x_SD.new_empty(len(x_SD), 1, dtype=torch.float32)
