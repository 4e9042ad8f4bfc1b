"""What is in e4m3, timed: products, attention and the passes that quantize. Part of `bench ops` and of `bench dit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import Ops, e4m3, quantized
from ..ops.e4m3 import Quantized, QuantizedHeads
from ..spec import DiTSpec
from .timing import digits, measure


def product_shapes(spec: DiTSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's four products."""
    return {
        "qkv": (spec.hidden, 3 * spec.inner), "out": (spec.inner, spec.hidden), "fc1": (spec.hidden, 2 * spec.ffn),
        "fc2": (spec.ffn, spec.hidden),
    }  # fmt: skip


def product_rate(table: Ops, rows: int, shape: tuple[int, int], device: torch.device, seconds: float) -> float:
    """TFLOP/s of `scaled_product` of a table that `quantized` made, on random data of `shape` (inputs, outputs)."""
    inputs, outputs = shape
    x, weight = (
        table.quantize_rows(torch.randn(n, inputs, device=device, dtype=torch.bfloat16)) for n in (rows, outputs)
    )
    spent = measure(partial(table.scaled_product, x, weight.values, weight.scale), device, seconds)["seconds"]
    return 2 * rows * inputs * outputs / spent / 1e12


def attention_rates(table: Ops, qkv_SH3d: Tensor, seconds: float) -> dict[str, float]:
    """TFLOP/s of `attention_quantized` alone, and with `quantize_heads` before it."""
    rows, num_heads, _, dim = qkv_SH3d.shape
    work = 4 * rows * rows * num_heads * dim / 1e12
    q, k = (x.contiguous() for x in qkv_SH3d.unbind(2)[:2])  # as qk_norm_rope leaves them
    heads = table.quantize_heads(q, k, qkv_SH3d[:, :, 2], rows)

    def whole() -> Tensor:
        return table.attention_quantized(table.quantize_heads(q, k, qkv_SH3d[:, :, 2], rows))

    runs: dict[str, Callable[[], Tensor]] = {
        "kernel": partial(table.attention_quantized, heads),
        "with_quantize_heads": whole,
    }
    return {name: work / measure(run, qkv_SH3d.device, seconds)["seconds"] for name, run in runs.items()}


def bench_fp8(spec: DiTSpec, ops: Ops, attention: str, qkv_SH3d: Tensor, seconds: float) -> dict[str, Any]:
    """Rates of a block's e4m3 products, both ways of summing on a device, and of attention; or why there are none.

    `attention` is what is asked for of `quantized`; `ops` must have the dense attention that it goes with.
    """
    rows, device = qkv_SH3d.shape[0], qkv_SH3d.device
    try:
        table = quantized(ops, device, attention, head_dim=spec.head_dim)
    except ValueError as error:
        return {"refused": str(error)}
    found: dict[str, Any] = {"why": {name: table.why[name] for name in ("fp8", "fp8_attention")}}
    ways = {"products_tflops": table}
    if table.scaled_product is e4m3.scaled_mm:
        ways["products_promoted_tflops"] = replace(table, scaled_product=promoted)
    for name, way in ways.items():
        shapes = product_shapes(spec).items()
        found[name] = {each: product_rate(way, rows, shape, device, seconds) for each, shape in shapes}
        print(f"fp8 {name}: {', '.join(f'{each} {digits(rate)}' for each, rate in found[name].items())}")
    if table.why["fp8_attention"].startswith("fp8"):
        found["attention_tflops"] = attention_rates(table, qkv_SH3d, seconds)
        print(
            f"fp8 attention: {', '.join(f'{each} {digits(rate)}' for each, rate in found['attention_tflops'].items())}"
        )
    return found


def promoted(x: Quantized, weight_OD: Tensor, scale_O1: Tensor) -> Tensor:
    """`e4m3.scaled_mm` with sums carried on in fp32, which is not the engine's way."""
    return torch._scaled_mm(
        x.values, weight_OD.t(), x.scale, scale_O1.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def values_of(out: Any) -> list[Tensor]:
    """The tensors of an op's result, those in e4m3 as what they stand for."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, Quantized):
        return [out.values.float() * out.scale]
    if isinstance(out, QuantizedHeads):
        return [*(part.float() for part in out.parts), out.scales, out.v_mean]
    return [x for each in out for x in values_of(each)]
