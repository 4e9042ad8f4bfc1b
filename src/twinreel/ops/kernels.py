"""The `triton` member of the ops table: the custom ops behind the table's signatures, and what they cannot do.

Importing this module imports Triton. The ops are registered with PyTorch under `twinreel::`, each with a fake, so that
compiling a model that calls them meets no graph break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinreel.ops import euler as moves
from twinreel.ops import gate_add as gates
from twinreel.ops import norm_modulate as norms
from twinreel.ops import qk_norm_rope as heads
from twinreel.ops import quantize_heads as narrow_heads
from twinreel.ops import quantize_rows as narrow_rows
from twinreel.ops import swiglu as units
from twinreel.ops.e4m3 import Quantized, QuantizedHeads
from twinreel.ops.rounding import INTERPRETED

if TYPE_CHECKING:
    from twinreel.ops import Affine, Branches, Gated, Norm, Rope, Stream

# bf16 arithmetic units and the conversions that the kernels rely on.
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16)


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run there, or None."""
    if dtype not in DTYPES:
        return f"the kernels compute {' and '.join(map(str, DTYPES))}, not {dtype}"
    if not 2 <= head_dim <= 512 or head_dim % 2:
        return f"a head must have an even number of dims up to 512, not {head_dim}"
    if device.type == "cpu" and INTERPRETED.value:
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "this machine shows no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {'.'.join(map(str, capability))} is below {'.'.join(map(str, MIN_CAPABILITY))}"
    return None


def rms_norm(x_SD: Tensor, norm: Norm) -> Tensor:
    """See `reference.rms_norm`."""
    return norms.rms_norm(x_SD, norm.weight, norm.eps)


def norm_modulate(x_SD: Tensor, norm: Norm, mod: Affine) -> Tensor:
    """See `reference.norm_modulate`."""
    return norms.norm_modulate(x_SD, norm.weight, norm.eps, mod.shift, mod.scale, mod.rows)


def gate_norm_modulate(x_SD: Tensor, h_SD: Tensor, norm: Norm, mod: Branches) -> tuple[Tensor, Tensor]:
    """See `reference.gate_norm_modulate`."""
    into, out = mod.mlp, mod.msa
    tables = [out.gate, out.rows, into.shift, into.scale, into.rows]
    return norms.gate_norm_modulate(x_SD, h_SD, norm.weight, norm.eps, tables)


def gate_add(x_SD: Tensor, h_SD: Tensor, mod: Gated) -> Tensor:
    """See `reference.gate_add`."""
    return gates.gate_add(x_SD, h_SD, mod.gate, mod.rows)


def qk_norm_rope(qkv_SH3d: Tensor, q_norm: Norm, k_norm: Norm, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.qk_norm_rope`. q and k are new and contiguous, v is a view of qkv."""
    cos, sin = (None, None) if rope is None else rope
    q_SHd, k_SHd = heads.qk_norm_rope(
        qkv_SH3d, q_norm.weight, k_norm.weight, cos, sin, q_eps=q_norm.eps, k_eps=k_norm.eps
    )
    return q_SHd, k_SHd, qkv_SH3d[:, :, 2]


def swiglu(u_S2F: Tensor) -> Tensor:
    """See `reference.swiglu`."""
    return units.swiglu(u_S2F)


def quantize_rows(x_SD: Tensor) -> Quantized:
    """See `reference.quantize_rows`: equal bits."""
    return Quantized(*narrow_rows.quantize_rows(x_SD))


def norm_modulate_quantized(x_SD: Tensor, norm: Norm, mod: Affine) -> Quantized:
    """See `reference.norm_modulate_quantized`."""
    return Quantized(*norms.norm_modulate_quantized(x_SD, norm.weight, norm.eps, mod.shift, mod.scale, mod.rows))


def gate_norm_modulate_quantized(x_SD: Tensor, h_SD: Tensor, norm: Norm, mod: Branches) -> tuple[Tensor, Quantized]:
    """See `reference.gate_norm_modulate_quantized`."""
    into, out = mod.mlp, mod.msa
    tables = [out.gate, out.rows, into.shift, into.scale, into.rows]
    x_SD, values, scale = norms.gate_norm_modulate_quantized(x_SD, h_SD, norm.weight, norm.eps, tables)
    return x_SD, Quantized(values, scale)


def swiglu_quantized(u_S2F: Tensor) -> Quantized:
    """See `reference.swiglu_quantized`."""
    return Quantized(*units.swiglu_quantized(u_S2F))


def quantize_heads(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> QuantizedHeads:
    """See `reference.quantize_heads`; the means are sums in another order."""
    q, k, v, scales, v_mean = narrow_heads.quantize_heads(q_SHd, k_SHd, v_SHd, used)
    return QuantizedHeads((q, k, v), scales, v_mean, q_SHd.shape[0])


def euler(streams: Sequence[Stream]) -> None:
    """See `reference.euler`: two streams, one launch."""
    xs, velocities, outs, factors = zip(*streams, strict=True)
    moves.euler(list(xs), list(velocities), list(outs), [value for each in factors for value in each])
