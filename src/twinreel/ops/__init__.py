"""The table of operations that a block is made of, one entry for each place where a kernel may be cut.

The plain run and a run with other kernels are the same program with another table. Every op takes and returns plain
tensors plus the small read-only records described by the protocols below.

Legend: S packed rows, D hidden, H heads, d head dim, F ffn, M modulation rows, R rotary angles (half the rotated dims).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

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
    """

    name: str
    rms_norm: Callable[[Tensor, Norm], Tensor]
    norm_modulate: Callable[[Tensor, Norm, Affine], Tensor]
    gate_norm_modulate: Callable[[Tensor, Tensor, Norm, Branches], tuple[Tensor, Tensor]]
    gate_add: Callable[[Tensor, Tensor, Gated], Tensor]
    qk_norm_rope: Callable[[Tensor, Norm, Norm, Rope | None], tuple[Tensor, Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _reference(device: str, attention: str) -> Ops:
    return Ops(
        name="reference",
        rms_norm=reference.rms_norm,
        norm_modulate=reference.norm_modulate,
        gate_norm_modulate=reference.gate_norm_modulate,
        gate_add=reference.gate_add,
        qk_norm_rope=reference.qk_norm_rope,
        swiglu=reference.swiglu,
        attention=dense.choose(attention, device),
    )


# In the order in which `auto` prefers them.
TABLES: dict[str, Callable[[str, str], Ops]] = {"reference": _reference}


def select(name: str = "auto", device: str = "cpu", attention: str = "auto") -> Ops:
    """The table called `name` for a device such as "cpu" or "cuda:0"; `auto` takes the first that it can run.

    ValueError: an unknown name of a table or of an attention; the message lists the known ones.
    """
    chosen = next(iter(TABLES)) if name == "auto" else name
    if chosen not in TABLES:
        raise ValueError(f"unknown ops {name!r}; known: auto, {', '.join(TABLES)}")
    return TABLES[chosen](device.partition(":")[0], attention)


def describe(ops: Ops) -> dict[str, str]:
    """Which implementation each op uses, as `module.function`: for reports, `doctor` and tests of engagement."""
    entries = {field.name: getattr(ops, field.name) for field in fields(ops) if field.name != "name"}
    return {name: f"{op.__module__.rpartition('.')[2]}.{op.__qualname__}" for name, op in entries.items()}
