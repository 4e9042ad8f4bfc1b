"""The table of operations that a block is made of, one entry for each place where a kernel may be cut.

The plain run and a run with other kernels are the same program with another table. Every op takes and returns plain
tensors plus the small read-only records described by the protocols below.

Legend: S packed rows, D hidden, H heads, d head dim, F ffn, M modulation rows, R rotary angles (half the rotated dims).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from twinreel.ops import attention as dense
from twinreel.ops import reference


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

    `auto` is `reference`: the kernels have passed Triton's interpreter and compile for sm_90, but no device has run
    them yet, so they are used where they are named. ValueError: an unknown name of a table or of an attention, or a
    named one that cannot run there; the message says why, or lists the known ones.
    """
    if name != "auto" and name not in TABLES:
        raise ValueError(f"unknown ops {name!r}; known: auto, {', '.join(TABLES)}")
    place = Place(torch.device(device), dtype, head_dim)
    chosen, why = name, "asked for"
    if name == "auto":
        unmeasured = "the triton kernels have not run on a device yet; name them to use them"
        reason = unmeasured if place.device.type == "cuda" else "kernels are for CUDA devices"
        chosen, why = "reference", f"auto: {reason}"
    elif name in REFUSALS and (problem := REFUSALS[name](place)):
        raise ValueError(f"ops {name!r} cannot run here: {problem}")
    function, reason = dense.choose(attention, place.device, dtype, head_dim)
    return TABLES[chosen](function, {"ops": why, "attention": reason})


def describe(ops: Ops) -> dict[str, str]:
    """Which implementation each op uses, as `module.function`: for reports, `doctor` and tests of engagement."""
    entries = {item.name: getattr(ops, item.name) for item in fields(ops) if item.name not in ("name", "why")}
    return {name: f"{op.__module__.rpartition('.')[2]}.{op.__qualname__}" for name, op in entries.items()}
