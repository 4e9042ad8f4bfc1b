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

from twinreel.ops import attention
from twinreel.ops.e4m3 import E4M3, LARGEST, SMALLEST, Quantized, QuantizedHeads

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


def _narrow(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x as e4m3, and what it is to be multiplied by, for the largest sizes `most` of its groups."""
    most = most.clamp(min=SMALLEST)
    # Not LARGEST / most: a Python number on the left becomes a reciprocal and a product, two roundings; and a division
    # by a Python number is another product on CUDA than on the CPU.
    return (x * (torch.full_like(most, LARGEST) / most)).to(E4M3), most * (1.0 / LARGEST)


def quantize_rows(x_SD: Tensor) -> Quantized:
    """Each row times 448 / its largest size, rounded to e4m3 (ties to even): the same bits on every device (SPEC 2.8)."""
    x_SD = x_SD.float()
    return Quantized(*_narrow(x_SD, x_SD.abs().amax(-1, keepdim=True)))


def scaled_product(x: Quantized, weight_OD: Tensor, scale_O1: Tensor) -> Tensor:
    """x times the e4m3 weight [O, D] with its scales [O, 1], bf16 [S, O]: products summed in fp32."""
    out_SO = F.linear(x.values.float(), weight_OD.float())
    return (out_SO * x.scale * scale_O1.t()).to(torch.bfloat16)


def norm_modulate_quantized(x_SD: Tensor, norm: Norm, mod: Affine) -> Quantized:
    """`quantize_rows` of `norm_modulate`."""
    return quantize_rows(norm_modulate(x_SD, norm, mod))


def gate_norm_modulate_quantized(x_SD: Tensor, h_SD: Tensor, norm: Norm, mod: Branches) -> tuple[Tensor, Quantized]:
    """`gate_norm_modulate` whose second result is quantized."""
    x_SD, h_SD = gate_norm_modulate(x_SD, h_SD, norm, mod)
    return x_SD, quantize_rows(h_SD)


def swiglu_quantized(u_S2F: Tensor) -> Quantized:
    """`quantize_rows` of `swiglu`."""
    return quantize_rows(swiglu(u_S2F))


def quantize_heads(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> QuantizedHeads:
    """q, k and v with one scale a head, from rows [0, used) alone; k and v without their means over those rows.

    The mean of k adds the same number to all scores of a query, which softmax does not see. That of v is added back
    (SPEC 2.8).
    """
    q, k, v = (x[:used].float() for x in (q_SHd, k_SHd, v_SHd))
    # in fp64, so that the order of the sum, which other heads beside these may change, is in no bit
    k_mean, v_mean = ((x.sum(0, dtype=torch.float64) / used).float() for x in (k, v))
    (q, *q_scale), (k, *k_scale), (v, *v_scale) = (
        _narrow(x, x.abs().amax((0, 2), keepdim=True)) for x in (q, k - k_mean, v - v_mean)
    )
    scales = torch.cat([*q_scale, *k_scale, *v_scale], 1).view(3, -1)
    return QuantizedHeads((q, k, v), scales, v_mean, q_SHd.shape[0])


def attention_quantized(heads: QuantizedHeads) -> Tensor:
    """Attention over what the e4m3 values stand for, bf16 [S, H, d]. Weights of the values stay fp32, kernels' are e4m3."""
    q, k, v = (x.float() * scale.view(1, -1, 1) for x, scale in zip(heads.parts, heads.scales, strict=True))
    out_SHd = (attention.sdpa(q, k, v, q.shape[0]) + heads.v_mean).to(torch.bfloat16)
    return F.pad(out_SHd, (0, 0, 0, 0, 0, heads.rows - out_SHd.shape[0]))
