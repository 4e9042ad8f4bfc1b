# mypy: allow-untyped-defs
"""A branch enters the residual through its gate. No row sum: equal to the definition bit for bit.

Legend: S packed rows, D hidden, M rows of a modulation table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, round_like

BLOCK = 2048


@triton.jit
def _kernel(
    x_SD, h_SD, out_SD, gate_MD, rows_S, x_stride, h_stride, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    table_row = tl.load(rows_S + row)
    gate = tl.load(gate_MD + table_row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_SD + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(h_SD + row * h_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = round_like(x + round_like(gate * h, x_SD), x_SD)
    tl.store(out_SD + row * WIDTH + columns, x.to(out_SD.dtype.element_ty), mask=inside)


def warps_for(block: int) -> int:
    """Warps of a program: 16 values a thread."""
    return max(1, min(4, block // 512))


@library.custom_op("twinreel::gate_add", mutates_args=())
def gate_add(x_SD: Tensor, h_SD: Tensor, gate_MD: Tensor, rows_S: Tensor) -> Tensor:
    """`fl(x + fl(gate[r] * h))` (SPEC 2.5). A new [S, D]; rows of every input may be strided."""
    assert x_SD.stride(1) == h_SD.stride(1) == gate_MD.stride(1) == 1, "rows must be contiguous"
    rows, width = x_SD.shape
    out_SD = torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        with torch.cuda.device_of(x_SD):
            _kernel[(rows, triton.cdiv(width, block))](
                x_SD, h_SD, out_SD, gate_MD, rows_S, x_SD.stride(0), h_SD.stride(0), gate_MD.stride(0),
                WIDTH=width, BLOCK=block, num_warps=warps_for(block), **EXACT,
            )  # fmt: skip
    return out_SD


@gate_add.register_fake
def _(x_SD: Tensor, h_SD: Tensor, gate_MD: Tensor, rows_S: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape)
