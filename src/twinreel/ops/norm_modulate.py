# mypy: allow-untyped-defs
"""RMS norm, indexed modulation and the gated residual before them: one kernel, one program a row.

`rms_norm`, `norm_modulate` and `gate_norm_modulate` are the same program with stages left out. Their row sums run in
the same order over the same layout, so joining stages changes no bit. The quantized ones end with `quantize_rows`.

Legend: S packed rows, D hidden, M rows of a modulation table.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.quantize_rows import empty_rows
from twinreel.ops.rounding import EXACT, round_like, scales_of, to_e4m3

MAX_WIDTH = 16384  # one program holds a whole row in registers


@triton.jit
def _kernel(
    x_SD, h_SD, sum_SD, out_SD, weight_D, gate_MD, gate_rows_S, shift_MD, scale_MD, rows_S,
    out_scale_S, x_stride, h_stride, gate_stride, shift_stride, scale_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, MODULATED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # a row times its stride passes 2^31
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_SD + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate_row = tl.load(gate_rows_S + row)
        gate = tl.load(gate_MD + gate_row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(h_SD + row * h_stride + columns, mask=inside, other=0.0).to(tl.float32)
        x = round_like(x + round_like(gate * h, x_SD), x_SD)
        tl.store(sum_SD + row * WIDTH + columns, x.to(sum_SD.dtype.element_ty), mask=inside)
    scale_of_row = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_D + columns, mask=inside, other=0.0).to(tl.float32)
    n = round_like(x * scale_of_row * weight, x_SD)
    if MODULATED:
        table_row = tl.load(rows_S + row)
        scale = tl.load(scale_MD + table_row * scale_stride + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_MD + table_row * shift_stride + columns, mask=inside, other=0.0).to(tl.float32)
        n = round_like(n * round_like(1.0 + scale, x_SD), x_SD)
        n = round_like(n + shift, x_SD)
    if QUANTIZED:
        inverse, out_scale = scales_of(tl.max(tl.abs(n), axis=0))
        tl.store(out_SD + row * WIDTH + columns, to_e4m3(n * inverse), mask=inside)
        tl.store(out_scale_S + row, out_scale)
    else:
        tl.store(out_SD + row * WIDTH + columns, n.to(out_SD.dtype.element_ty), mask=inside)


def warps_for(block: int) -> int:
    """Warps of a program. On an H200 a row of 5,376 runs at 99 % of a copy with 4, at 75 % with 16."""
    return max(1, min(4, block // 512))


def launch(tensors: dict[str, Tensor], strides: dict[str, int], eps: float, *, rows: int, width: int) -> None:
    """Run the kernel over `rows` rows; tensors that a stage does not use are left out."""
    if rows == 0:
        return
    assert width <= MAX_WIDTH, f"a row of {width} values is wider than {MAX_WIDTH}"
    unused = tensors["weight_D"]
    names = (
        "x_SD", "h_SD", "sum_SD", "out_SD", "weight_D", "gate_MD", "gate_rows_S", "shift_MD", "scale_MD", "rows_S",
        "out_scale_S",
    )  # fmt: skip
    spans = ("x_stride", "h_stride", "gate_stride", "shift_stride", "scale_stride")
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(unused):
        _kernel[(rows,)](
            *(tensors.get(name, unused) for name in names), *(strides.get(name, 0) for name in spans), eps,
            WIDTH=width, BLOCK=block, GATED="h_SD" in tensors, MODULATED="scale_MD" in tensors,
            QUANTIZED="out_scale_S" in tensors, num_warps=warps_for(block), **EXACT,
        )  # fmt: skip


def _row_stride(x: Tensor) -> int:
    assert x.ndim == 2 and x.stride(1) == 1, f"rows must be contiguous, got strides {x.stride()} of {tuple(x.shape)}"
    return x.stride(0)


@library.custom_op("twinreel::rms_norm", mutates_args=())
def rms_norm(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim, computed in fp32 with one rounding at the end (SPEC 2.2). A new [S, D]."""
    out_SD = torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device)
    tensors = {"x_SD": x_SD, "out_SD": out_SD, "weight_D": weight_D}
    launch(tensors, {"x_stride": _row_stride(x_SD)}, eps, rows=x_SD.shape[0], width=x_SD.shape[1])
    return out_SD


@library.custom_op("twinreel::norm_modulate", mutates_args=())
def norm_modulate(
    x_SD: Tensor, weight_D: Tensor, eps: float, shift_MD: Tensor, scale_MD: Tensor, rows_S: Tensor
) -> Tensor:
    """`fl(fl(RMS(x) * fl(1 + scale[r])) + shift[r])` (SPEC 2.5). A new [S, D]; the tables' rows may be strided."""
    out_SD = torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device)
    tensors, strides = _modulation(x_SD, weight_D, [shift_MD, scale_MD, rows_S])
    launch(tensors | {"out_SD": out_SD}, strides, eps, rows=x_SD.shape[0], width=x_SD.shape[1])
    return out_SD


@library.custom_op("twinreel::norm_modulate_quantized", mutates_args=())
def norm_modulate_quantized(
    x_SD: Tensor, weight_D: Tensor, eps: float, shift_MD: Tensor, scale_MD: Tensor, rows_S: Tensor
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `norm_modulate`, in one pass: e4m3 [S, D] and fp32 scales [S, 1]."""
    values, scale = empty_rows(x_SD, x_SD.shape[1])
    tensors, strides = _modulation(x_SD, weight_D, [shift_MD, scale_MD, rows_S])
    tensors |= {"out_SD": values, "out_scale_S": scale}
    launch(tensors, strides, eps, rows=x_SD.shape[0], width=x_SD.shape[1])
    return values.view(torch.float8_e4m3fn), scale


@library.custom_op("twinreel::gate_norm_modulate", mutates_args=())
def gate_norm_modulate(
    x_SD: Tensor, h_SD: Tensor, weight_D: Tensor, eps: float, tables: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`x = fl(x + fl(gate[r] * h))` and `norm_modulate` of it, in one pass: two new [S, D].

    tables: gate [M, D] and its rows [S]; shift [M, D], scale [M, D] and their rows [S].
    """
    sum_SD, out_SD = (torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device) for _ in range(2))
    tensors, strides = _gated(x_SD, h_SD, weight_D, tables)
    tensors |= {"sum_SD": sum_SD, "out_SD": out_SD}
    launch(tensors, strides, eps, rows=x_SD.shape[0], width=x_SD.shape[1])
    return sum_SD, out_SD


@library.custom_op("twinreel::gate_norm_modulate_quantized", mutates_args=())
def gate_norm_modulate_quantized(
    x_SD: Tensor, h_SD: Tensor, weight_D: Tensor, eps: float, tables: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_norm_modulate` whose second result is quantized: a new [S, D], e4m3 [S, D] and fp32 scales [S, 1]."""
    sum_SD = torch.empty(x_SD.shape, dtype=x_SD.dtype, device=x_SD.device)
    values, scale = empty_rows(x_SD, x_SD.shape[1])
    tensors, strides = _gated(x_SD, h_SD, weight_D, tables)
    tensors |= {"sum_SD": sum_SD, "out_SD": values, "out_scale_S": scale}
    launch(tensors, strides, eps, rows=x_SD.shape[0], width=x_SD.shape[1])
    return sum_SD, values.view(torch.float8_e4m3fn), scale


Inputs = tuple[dict[str, Tensor], dict[str, int]]


def _modulation(x_SD: Tensor, weight_D: Tensor, tables: Sequence[Tensor]) -> Inputs:
    shift_MD, scale_MD, rows_S = tables
    tensors = {"x_SD": x_SD, "weight_D": weight_D, "shift_MD": shift_MD, "scale_MD": scale_MD, "rows_S": rows_S}
    strides = {"x_stride": x_SD, "shift_stride": shift_MD, "scale_stride": scale_MD}
    return tensors, {name: _row_stride(x) for name, x in strides.items()}


def _gated(x_SD: Tensor, h_SD: Tensor, weight_D: Tensor, tables: Sequence[Tensor]) -> Inputs:
    gate_MD, gate_rows_S, *modulation = tables
    tensors, strides = _modulation(x_SD, weight_D, modulation)
    tensors |= {"h_SD": h_SD, "gate_MD": gate_MD, "gate_rows_S": gate_rows_S}
    return tensors, strides | {"h_stride": _row_stride(h_SD), "gate_stride": _row_stride(gate_MD)}


@rms_norm.register_fake
def _(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_SD.new_empty(x_SD.shape)


@norm_modulate.register_fake
def _(x_SD: Tensor, weight_D: Tensor, eps: float, shift_MD: Tensor, scale_MD: Tensor, rows_S: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape)


@gate_norm_modulate.register_fake
def _(x_SD: Tensor, h_SD: Tensor, weight_D: Tensor, eps: float, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return x_SD.new_empty(x_SD.shape), x_SD.new_empty(x_SD.shape)


@norm_modulate_quantized.register_fake
def _(
    x_SD: Tensor, weight_D: Tensor, eps: float, shift_MD: Tensor, scale_MD: Tensor, rows_S: Tensor
) -> tuple[Tensor, Tensor]:
    return x_SD.new_empty(x_SD.shape, dtype=torch.float8_e4m3fn), x_SD.new_empty(len(x_SD), 1, dtype=torch.float32)


@gate_norm_modulate_quantized.register_fake
def _(
    x_SD: Tensor, h_SD: Tensor, weight_D: Tensor, eps: float, tables: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    values, scale = x_SD.new_empty(x_SD.shape, dtype=torch.float8_e4m3fn), x_SD.new_empty(len(x_SD), 1)
    return x_SD.new_empty(x_SD.shape), values, scale.float()
