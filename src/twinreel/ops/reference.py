"""The plain PyTorch member of the ops table: the definition that every kernel is tested against.

Every intermediate is rounded to the dtype of its inputs, one operation at a time, because that is what the released
model was run with (SPEC 2.5). Joining two of these operations without the rounding between them changes the result.

Legend: S packed rows, D hidden, H heads, d head dim, F ffn, M modulation rows, R rotary angles (half the rotated dims).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from twinreel.ops import Affine, Branches, Gated, Norm, Rope, Stream


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMS norm over the last dim, computed in fp32 with one rounding at the end (SPEC 2.2). Keeps shape and dtype."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def norm_modulate(x_SD: Tensor, norm: Norm, mod: Affine) -> Tensor:
    """`fl(fl(RMS(x) * fl(1 + scale[r])) + shift[r])` (SPEC 2.5). Same shape and dtype as x."""
    # 1 + scale is rounded on the small table, before the gather: same bits as after it, and M rows instead of S.
    scale_SD = (1.0 + mod.scale).index_select(0, mod.rows)
    return rms_norm(x_SD, norm) * scale_SD + mod.shift.index_select(0, mod.rows)


def gate_add(x_SD: Tensor, h_SD: Tensor, mod: Gated) -> Tensor:
    """`fl(x + fl(gate[r] * h))`: a branch enters the residual (SPEC 2.5)."""
    return x_SD + mod.gate.index_select(0, mod.rows) * h_SD


def gate_norm_modulate(x_SD: Tensor, h_SD: Tensor, norm: Norm, mod: Branches) -> tuple[Tensor, Tensor]:
    """Adds the attention branch to the residual and prepares the feed-forward's input: (x_SD, h_SD)."""
    x_SD = gate_add(x_SD, h_SD, mod.msa)
    return x_SD, norm_modulate(x_SD, norm, mod.mlp)


def _rotate(x_SHd: Tensor, rope: Rope) -> Tensor:
    cos_S1R, sin_S1R = (table.unsqueeze(1) for table in rope)
    half = cos_S1R.shape[-1]
    x1, x2, rest = x_SHd[..., :half], x_SHd[..., half : 2 * half], x_SHd[..., 2 * half :]
    return torch.cat((x1 * cos_S1R - x2 * sin_S1R, x2 * cos_S1R + x1 * sin_S1R, rest), dim=-1)


def qk_norm_rope(qkv_SH3d: Tensor, q_norm: Norm, k_norm: Norm, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per-head RMS norm of q and k, then the half-split rotation of their first 2R dims (SPEC 2.4); v as it is.

    `rope` is (cos, sin), each [S, R] in the dtype of qkv, or None for rows without positions. Both products and their
    sum are rounded to that dtype.
    """
    q_SHd, k_SHd, v_SHd = qkv_SH3d.unbind(2)
    q_SHd, k_SHd = rms_norm(q_SHd, q_norm), rms_norm(k_SHd, k_norm)
    if rope is not None:
        q_SHd, k_SHd = _rotate(q_SHd, rope), _rotate(k_SHd, rope)
    return q_SHd, k_SHd, v_SHd


def swiglu(u_S2F: Tensor) -> Tensor:
    """`fl(value * fl(silu(gate)))` of [gate | value], the order in which the released fc1 stores them (SPEC 1.3)."""
    gate_SF, value_SF = u_S2F.chunk(2, dim=-1)
    return value_SF * F.silu(gate_SF)


def euler(streams: Sequence[Stream]) -> None:
    """Moves rows along their velocity, all fp32 (SPEC 7): each stream is (x, velocity, out, (sigma, ratio, 1 - ratio)).

    `out` gets `ratio * x + (1 - ratio) * (x + sigma * velocity)`, each product and sum rounded; it may be x itself.
    """
    for x, velocity, out, (sigma, ratio, rest) in streams:
        denoised = x + sigma * velocity
        torch.add(ratio * x, rest * denoised, out=out)
