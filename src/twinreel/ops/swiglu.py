# mypy: allow-untyped-defs
"""SwiGLU over [gate | value]. No row sum.

Legend: S rows, F feed-forward width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.quantize_rows import MAX_WIDTH, empty_rows
from twinreel.ops.rounding import EXACT, round_like, scales_of, silu, to_e4m3

BLOCK = 2048


@triton.jit
def _unit(u_2F, columns, WIDTH: tl.constexpr):
    inside = columns < WIDTH
    gate = tl.load(u_2F + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(u_2F + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    return round_like(value * round_like(silu(gate), u_2F), u_2F)


@triton.jit
def _kernel(u_S2F, out_SF, u_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = _unit(u_S2F + row * u_stride, columns, WIDTH)
    tl.store(out_SF + row * WIDTH + columns, out.to(out_SF.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _quantized_kernel(u_S2F, out_SF, scale_S, u_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # A whole row in four parts: in one, twice the registers are alive and only one program fits on a multiprocessor.
    row = tl.program_id(0).to(tl.int64)
    u_2F, out_F = u_S2F + row * u_stride, out_SF + row * WIDTH
    first = tl.arange(0, BLOCK)
    second, third, fourth = first + BLOCK, first + 2 * BLOCK, first + 3 * BLOCK
    a, b = _unit(u_2F, first, WIDTH), _unit(u_2F, second, WIDTH)
    most = tl.maximum(tl.abs(a), tl.abs(b))
    c, d = _unit(u_2F, third, WIDTH), _unit(u_2F, fourth, WIDTH)
    most = tl.maximum(most, tl.maximum(tl.abs(c), tl.abs(d)))
    inverse, scale = scales_of(tl.max(most, axis=0))
    tl.store(out_F + first, to_e4m3(a * inverse), mask=first < WIDTH)
    tl.store(out_F + second, to_e4m3(b * inverse), mask=second < WIDTH)
    tl.store(out_F + third, to_e4m3(c * inverse), mask=third < WIDTH)
    tl.store(out_F + fourth, to_e4m3(d * inverse), mask=fourth < WIDTH)
    tl.store(scale_S + row, scale)


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


def row_warps_for(block: int) -> int:
    """Warps of a program that holds a whole row in four parts of `block`: 32 values a thread."""
    return max(1, min(16, block // 256))


@library.custom_op("twinreel::swiglu_quantized", mutates_args=())
def swiglu_quantized(u_S2F: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu`, in one pass: e4m3 [S, F] and fp32 scales [S, 1]."""
    assert u_S2F.ndim == 2 and u_S2F.stride(1) == 1, "rows must be contiguous"
    rows, width = u_S2F.shape[0], u_S2F.shape[1] // 2
    assert width <= MAX_WIDTH, f"a row of {width} values is wider than {MAX_WIDTH}"
    values, scale = empty_rows(u_S2F, width)
    if rows:
        block = triton.next_power_of_2(triton.cdiv(width, 4))
        with torch.cuda.device_of(u_S2F):
            _quantized_kernel[(rows,)](
                u_S2F, values, scale, u_S2F.stride(0),
                WIDTH=width, BLOCK=block, num_warps=row_warps_for(block), **EXACT,
            )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scale


@swiglu.register_fake
def _(u_S2F: Tensor) -> Tensor:
    return u_S2F.new_empty(u_S2F.shape[0], u_S2F.shape[1] // 2)


@swiglu_quantized.register_fake
def _(u_S2F: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = u_S2F.shape[0], u_S2F.shape[1] // 2
    values = u_S2F.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return values, u_S2F.new_empty(rows, 1, dtype=torch.float32)
