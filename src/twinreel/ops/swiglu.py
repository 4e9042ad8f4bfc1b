# mypy: allow-untyped-defs
"""SwiGLU over [gate | value]. No row sum.

Legend: S rows, F feed-forward width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.rounding import EXACT, round_like, silu

BLOCK = 2048


@triton.jit
def _kernel(u_S2F, out_SF, u_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(u_S2F + row * u_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(u_S2F + row * u_stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    out = round_like(value * round_like(silu(gate), u_S2F), u_S2F)
    tl.store(out_SF + row * WIDTH + columns, out.to(out_SF.dtype.element_ty), mask=inside)


def warps_for(block: int) -> int:
    """Warps of a program: 16 values a thread."""
    return max(1, min(4, block // 512))


@library.custom_op("twinreel::swiglu", mutates_args=())
def swiglu(u_S2F: Tensor) -> Tensor:
    """`fl(value * fl(silu(gate)))` of [gate | value] (SPEC 1.3, 2.5). A new [S, F]; rows may be strided."""
    assert u_S2F.ndim == 2 and u_S2F.stride(1) == 1, "rows must be contiguous"
    rows, width = u_S2F.shape[0], u_S2F.shape[1] // 2
    out_SF = torch.empty(rows, width, dtype=u_S2F.dtype, device=u_S2F.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        with torch.cuda.device_of(u_S2F):
            _kernel[(rows, triton.cdiv(width, block))](
                u_S2F, out_SF, u_S2F.stride(0),
                WIDTH=width, BLOCK=block, num_warps=warps_for(block), **EXACT,
            )  # fmt: skip
    return out_SF


@swiglu.register_fake
def _(u_S2F: Tensor) -> Tensor:
    return u_S2F.new_empty(u_S2F.shape[0], u_S2F.shape[1] // 2)
