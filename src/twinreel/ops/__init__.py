"""The table of operations that a block is made of, one entry for each place where a kernel may be cut.

The plain run and a run with other kernels are the same program with another table. Every op takes and returns plain
tensors plus the small read-only records described by the protocols below.

Legend: S packed rows, D hidden, H heads, d head dim, F ffn, M modulation rows, R rotary angles (half the rotated dims).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from twinreel.ops import attention as dense
from twinreel.ops import e4m3, reference
from twinreel.ops.e4m3 import Quantized, QuantizedHeads


class Norm(Protocol):
    """An RMS norm: its weight [n] and its epsilon."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class Affine(Protocol):
    """Shift and scale tables [M, D] in the dtype of the blocks, and rows [S] int64: which table row each row reads."""

    @property
    def shift(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...


class Gated(Affine, Protocol):
    """An `Affine` with the gate table [M, D] of the branch that it opens."""

    @property
    def gate(self) -> Tensor: ...


class Branches(Protocol):
    """The modulation of one block: attention (`msa`) and feed-forward (`mlp`)."""

    @property
    def msa(self) -> Gated: ...
    @property
    def mlp(self) -> Gated: ...


Rope = tuple[Tensor, Tensor]
Stream = tuple[Tensor, Tensor, Tensor, tuple[float, float, float]]


@dataclass(frozen=True)
class Ops:
    """One set of implementations. `reference` defines what each entry means; the others are tested against it.

    - `rms_norm(x, norm)`
    - `norm_modulate(x_SD, norm, mod: Affine) -> h_SD`
    - `gate_norm_modulate(x_SD, h_SD, norm, mod: Branches) -> (x_SD, h_SD)`
    - `gate_add(x_SD, h_SD, mod: Gated) -> x_SD`
    - `qk_norm_rope(qkv_SH3d, q_norm, k_norm, rope or None) -> q, k, v`, each [S, H, d], perhaps views of the input
    - `swiglu(u_S2F) -> [S, F]`, gate first
    - `attention(q, k, v, used) -> [S, H, d]`, strided views in
    - `quantize_rows(x_SD)`, `norm_modulate_quantized`, `gate_norm_modulate_quantized`, `swiglu_quantized`: the op of that
      name whose rows come out in e4m3, `Quantized`
    - `scaled_product(x: Quantized, weight, scale) -> bf16 [S, O]`
    - `quantize_heads(q, k, v, used) -> QuantizedHeads`, `attention_quantized(heads) -> bf16 [S, H, d]`
    - `euler(streams)`: (video, audio), each (x, velocity, out, (sigma, ratio, 1 - ratio)), fp32; writes `out`

    `why` says of the table and of the attention how they were chosen.
    """

    name: str
    rms_norm: Callable[[Tensor, Norm], Tensor]
    norm_modulate: Callable[[Tensor, Norm, Affine], Tensor]
    gate_norm_modulate: Callable[[Tensor, Tensor, Norm, Branches], tuple[Tensor, Tensor]]
    gate_add: Callable[[Tensor, Tensor, Gated], Tensor]
    qk_norm_rope: Callable[[Tensor, Norm, Norm, Rope | None], tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    euler: Callable[[Sequence[Stream]], None]
    quantize_rows: Callable[[Tensor], Quantized]
    norm_modulate_quantized: Callable[[Tensor, Norm, Affine], Quantized]
    gate_norm_modulate_quantized: Callable[[Tensor, Tensor, Norm, Branches], tuple[Tensor, Quantized]]
    swiglu_quantized: Callable[[Tensor], Quantized]
    scaled_product: Callable[[Quantized, Tensor, Tensor], Tensor]
    quantize_heads: Callable[[Tensor, Tensor, Tensor, int], QuantizedHeads]
    attention_quantized: Callable[[QuantizedHeads], Tensor]
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a table is to run: the device, the dtype of the blocks, the size of a head."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int


def _reference(attention: dense.AttentionFn, why: Mapping[str, str]) -> Ops:
    return Ops(
        name="reference",
        rms_norm=reference.rms_norm,
        norm_modulate=reference.norm_modulate,
        gate_norm_modulate=reference.gate_norm_modulate,
        gate_add=reference.gate_add,
        qk_norm_rope=reference.qk_norm_rope,
        swiglu=reference.swiglu,
        attention=attention,
        euler=reference.euler,
        quantize_rows=reference.quantize_rows,
        norm_modulate_quantized=reference.norm_modulate_quantized,
        gate_norm_modulate_quantized=reference.gate_norm_modulate_quantized,
        swiglu_quantized=reference.swiglu_quantized,
        scaled_product=reference.scaled_product,
        quantize_heads=reference.quantize_heads,
        attention_quantized=reference.attention_quantized,
        why=why,
    )


def _triton(attention: dense.AttentionFn, why: Mapping[str, str]) -> Ops:
    from twinreel.ops import kernels

    return Ops(
        name="triton",
        rms_norm=kernels.rms_norm,
        norm_modulate=kernels.norm_modulate,
        gate_norm_modulate=kernels.gate_norm_modulate,
        gate_add=kernels.gate_add,
        qk_norm_rope=kernels.qk_norm_rope,
        swiglu=kernels.swiglu,
        attention=attention,
        euler=kernels.euler,
        quantize_rows=kernels.quantize_rows,
        norm_modulate_quantized=kernels.norm_modulate_quantized,
        gate_norm_modulate_quantized=kernels.gate_norm_modulate_quantized,
        swiglu_quantized=kernels.swiglu_quantized,
        scaled_product=reference.scaled_product,
        quantize_heads=kernels.quantize_heads,
        attention_quantized=reference.attention_quantized,
        why=why,
    )


def _triton_refusal(place: Place) -> str | None:
    try:
        from twinreel.ops import kernels
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return kernels.refusal(place.device, place.dtype, place.head_dim)


TABLES: dict[str, Callable[[dense.AttentionFn, Mapping[str, str]], Ops]] = {"triton": _triton, "reference": _reference}
REFUSALS: dict[str, Callable[[Place], str | None]] = {"triton": _triton_refusal}


def select(
    name: str = "auto",
    device: torch.device | str = "cpu",
    attention: str = "auto",
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
) -> Ops:
    """The table called `name` for a device, a dtype of the blocks and a head size; attention is chosen apart.

    `auto` is `triton` on a CUDA device that the kernels can run on, `reference` elsewhere; `why` gives the reason.
    ValueError: an unknown name of a table or of an attention, or a named one that cannot run there; the message says
    why, or lists the known ones.
    """
    if name != "auto" and name not in TABLES:
        raise ValueError(f"ops: got {name!r:.80}; use auto, {', '.join(TABLES)}")
    place = Place(torch.device(device), dtype, head_dim)
    chosen, why = name, "asked for"
    if name == "auto":
        problem = "kernels are for CUDA devices" if place.device.type != "cuda" else _triton_refusal(place)
        chosen, why = ("reference", f"auto: {problem}") if problem else ("triton", f"auto on {place.device}")
    elif name in REFUSALS and (problem := REFUSALS[name](place)):
        raise ValueError(f"ops: {name} cannot run here: {problem}; use auto")
    function, reason = dense.choose(attention, place.device, dtype, head_dim)
    return TABLES[chosen](function, {"ops": why, "attention": reason})


def quantized(ops: Ops, device: torch.device | str, attention: str = "auto", *, head_dim: int = 128) -> Ops:
    """The table of blocks whose products take e4m3: the ops of `ops` whose rows come out so, under the plain names.

    attention: `fp8`, `bf16` or `auto`, which is fp8 beside a dense attention that has an e4m3 twin. On the CPU the
    products are emulated, to see what they cost in quality. ValueError: not here, with the reason. `why` gains `fp8`
    and `fp8_attention`.
    """
    device = torch.device(device)
    real: dict[str, Any] = {}
    if device.type == "cpu":
        problem, why = None, "emulated on the CPU: values rounded to e4m3, multiplied in fp32; shows quality, not speed"
        narrow, reason = attention != "bf16", "emulated; a kernel also rounds softmax's weights"
    else:
        problem, why = e4m3.refusal(device), "rows and outputs scaled, e4m3 products summed fast by torch._scaled_mm"
        kind = next((name for name, kind in dense.KINDS.items() if kind.function is ops.attention), "another")
        refused = e4m3.attention_refusal(kind, device, head_dim) if problem is None and attention != "bf16" else None
        narrow, reason = attention != "bf16" and refused is None, refused or f"{kind} in e4m3"
        problem = problem or (f"attention: {refused}" if refused and attention == "fp8" else None)
        real = {"scaled_product": e4m3.scaled_mm, "attention_quantized": e4m3.fa3}
    if problem:
        raise ValueError(f"precision: fp8 cannot run here: {problem}; use bf16")
    reason = "bf16: asked for" if attention == "bf16" else f"fp8: {reason}" if narrow else f"bf16: {reason}"
    table = replace(ops, **real, why={**ops.why, "fp8": why, "fp8_attention": reason})

    def attend(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
        return table.attention_quantized(table.quantize_heads(q_SHd, k_SHd, v_SHd, used))

    # These return `Quantized` where the plain ones return a tensor; the linears that such a block has take either.
    names = ("norm_modulate", "gate_norm_modulate", "swiglu")
    entries: dict[str, Any] = {name: getattr(table, f"{name}_quantized") for name in names}
    return replace(table, **entries, attention=attend if narrow else ops.attention)


def describe(ops: Ops) -> dict[str, str]:
    """Which implementation each op uses, as `module.function`: for reports, `doctor` and tests of engagement."""
    entries = {item.name: getattr(ops, item.name) for item in fields(ops) if item.name not in ("name", "why")}
    return {name: f"{op.__module__.rpartition('.')[2]}.{op.__qualname__}" for name, op in entries.items()}
