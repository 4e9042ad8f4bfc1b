"""From a block's input to its attention output: where rows meet heads, and so where sequence parallelism lives.

An `Attend` receives the linear as well as its input, so that a variant may split the product by heads.

Legend: S rows on this rank, D hidden, H heads on this rank, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from twinreel.parallel.axis import Axis

AttentionFn = Callable[["Tensor", "Tensor", "Tensor", int], "Tensor"]


class Rows(Protocol):
    """What attention must know about the packed rows.

    used: how many come before the padding, over all ranks of `sp`. rope: cos and sin of this rank's rows, [S, R] each,
    or None where rows have no positions. chunk: rows that go through the products at a time, 0 for all.
    """

    @property
    def used(self) -> int: ...
    @property
    def rope(self) -> tuple[Tensor, Tensor] | None: ...
    @property
    def chunk(self) -> int: ...


@dataclass(frozen=True)
class Stretch:
    """Some rows of a `Rows`, one after the other."""

    used: int
    rope: tuple[Tensor, Tensor] | None
    chunk: int = 0

    @classmethod
    def of(cls, at: Rows, rows: slice) -> Stretch:
        """The given rows of `at`."""
        return cls(at.used, at.rope and (at.rope[0][rows], at.rope[1][rows]))


def chunks(count: int, chunk: int) -> list[slice]:
    """`count` rows in stretches of `chunk`, the last one shorter; all in one where `chunk` is 0."""
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)] if chunk else [slice(0, count)]


class Linear(Protocol):
    """The product that makes qkv [S, 3Hd] of x_SD; `columns` makes the outputs [start, stop) alone."""

    @property
    def out_features(self) -> int: ...
    def __call__(self, x_SD: Tensor, /) -> Tensor: ...
    def columns(self, x_SD: Tensor, start: int, stop: int) -> Tensor: ...


class Norm(Protocol):
    """An RMS norm: its weight [d] and its epsilon."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class QKNorm(Protocol):
    """From qkv [S, H*3*d], for any whole number of heads, to normalised and rotated q, k, v [S, H, d].

    The norms themselves are for a variant that joins the step with its own copy.
    """

    @property
    def head_dim(self) -> int: ...
    @property
    def q_norm(self) -> Norm: ...
    @property
    def k_norm(self) -> Norm: ...
    def __call__(self, qkv: Tensor, at: Rows) -> tuple[Tensor, Tensor, Tensor]: ...


class Attend(Protocol):
    """x_SD, the linear that makes qkv, the map from qkv to q, k, v -> [S, H*d]."""

    def __call__(self, x_SD: Tensor, qkv_linear: Linear, qk_norm: QKNorm, at: Rows) -> Tensor: ...


Strategy = Callable[[AttentionFn, "Axis"], Attend]


class Local:
    """Every row is on this rank: product, norm, dense attention."""

    def __init__(self, attention: AttentionFn, sp: Axis) -> None:
        if sp.size != 1:
            raise ValueError(f"Local attends over the rows of one rank; axis {sp.name!r} has {sp.size}")
        self.attention = attention

    def __call__(self, x_SD: Tensor, qkv_linear: Linear, qk_norm: QKNorm, at: Rows) -> Tensor:
        """x_SD -> [S, H*d] in x's dtype; rows after `at.used` are zero."""
        q_SHd, k_SHd, v_SHd = self._project(x_SD, qkv_linear, qk_norm, at)
        return self.attention(q_SHd, k_SHd, v_SHd, at.used).flatten(1)

    def _project(self, x_SD: Tensor, qkv_linear: Linear, qk_norm: QKNorm, at: Rows) -> tuple[Tensor, Tensor, Tensor]:
        count, parts = x_SD.shape[0], chunks(x_SD.shape[0], at.chunk)
        if len(parts) == 1:
            return qk_norm(qkv_linear(x_SD), at)
        heads = qkv_linear.out_features // (3 * qk_norm.head_dim)
        qkv = tuple(x_SD.new_empty(count, heads, qk_norm.head_dim) for _ in range(3))
        for rows in parts:
            for whole, part in zip(qkv, qk_norm(qkv_linear(x_SD[rows]), Stretch.of(at, rows)), strict=True):
                whole[rows] = part
        return qkv[0], qkv[1], qkv[2]
