"""Values in e4m3 with scales beside them, and what multiplies them: the records, the real products, where they run.

Legend: S rows, D width, O outputs, H heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of the e4m3 values
SMALLEST = 2.0**-60  # stands for the largest of values that are all zero
# Products sum in the tensor cores' own registers ("fast"): on an H200 a tenth quicker than promoting every 128 terms.
FAST_ACCUMULATION = True
MIN_CAPABILITY = (8, 9)
ATTENTION = "fa3"  # the dense attention that has an e4m3 twin
ATTENTION_DIMS = (64, 128)


@dataclass(frozen=True)
class Quantized:
    """Rows [S, D] in e4m3, each with one fp32 scale [S, 1]; a value is `values * scale`."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """[S, D]."""
        return self.values.shape

    def new_empty(self, *shape: Any) -> Tensor:
        """A tensor for what these rows are multiplied to: bf16, on their device."""
        return self.scale.new_empty(*shape, dtype=torch.bfloat16)

    def __getitem__(self, rows: slice) -> Quantized:
        """Some of the rows."""
        return Quantized(self.values[rows], self.scale[rows])


@dataclass(frozen=True)
class QuantizedHeads:
    """`parts`: q, k, v [used, H, d] in e4m3; scales of the three, [3, H]; the mean of v [H, d], which was taken out, fp32.

    `rows` is how many there were with the padding.
    """

    parts: tuple[Tensor, Tensor, Tensor]
    scales: Tensor
    v_mean: Tensor
    rows: int


def scaled_mm(x: Quantized, weight_OD: Tensor, scale_O1: Tensor) -> Tensor:
    """The product on tensor cores, bf16 [S, O]: `torch._scaled_mm` with a scale for each row and each output."""
    return torch._scaled_mm(
        x.values, weight_OD.t(), x.scale, scale_O1.t(), out_dtype=torch.bfloat16, use_fast_accum=FAST_ACCUMULATION
    )


@library.custom_op("twinreel::fa3_e4m3", mutates_args=())
def _fa3(q: Tensor, k: Tensor, v: Tensor, scales_3H: Tensor) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    q_scale, k_scale, v_scale = scales_3H.unsqueeze(1).unbind(0)
    out = flash_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0),
        q_descale=q_scale, k_descale=k_scale, v_descale=v_scale, num_splits=1,
    )  # fmt: skip
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@_fa3.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scales_3H: Tensor) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.bfloat16)


def fa3(heads: QuantizedHeads) -> Tensor:
    """FlashAttention 3 on e4m3, bf16 [S, H, d]; rows of padding are zero."""
    out_SHd = _fa3(*heads.parts, heads.scales).add_(heads.v_mean)
    padding = heads.rows - out_SHd.shape[0]
    return torch.nn.functional.pad(out_SHd, (0, 0, 0, 0, 0, padding)) if padding else out_SHd


def fits(device: torch.device) -> bool:
    """Whether kernels can round to e4m3 there: on the CPU (interpreted), or from `MIN_CAPABILITY` on."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def refusal(device: torch.device) -> str | None:
    """Why e4m3 products cannot run there, or None; the CPU is not asked. Runs one on a CUDA device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device, not {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        least = ".".join(map(str, MIN_CAPABILITY))
        return f"needs compute capability {least} (Ada, Hopper, Blackwell); {name} has {'.'.join(map(str, capability))}"
    return _probe_product(device)


def attention_refusal(kind: str, device: torch.device, head_dim: int) -> str | None:
    """Why attention beside the dense kernel called `kind` cannot read e4m3 there, or None. Runs it once."""
    if kind != ATTENTION:
        return f"only {ATTENTION} reads e4m3, this run has {kind}"
    if head_dim not in ATTENTION_DIMS:
        return f"takes heads of {' or '.join(map(str, ATTENTION_DIMS))} dims, not {head_dim}"
    from twinreel.ops import reference

    q, k, v = torch.randn(3, 300, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    heads = reference.quantize_heads(q, k + 2, v + 1, 290)
    return _apart(lambda: fa3(heads)[:290], reference.attention_quantized(heads)[:290], 0.1)


def _probe_product(device: torch.device) -> str | None:
    from twinreel.ops import reference

    generator = torch.Generator().manual_seed(0)
    x, weight = (reference.quantize_rows(torch.randn(n, 64, generator=generator).to(device)) for n in (70, 48))
    wanted = reference.scaled_product(x, weight.values, weight.scale)
    return _apart(lambda: scaled_mm(x, weight.values, weight.scale), wanted, 1e-2)


def _apart(run: Any, wanted: Tensor, most: float) -> str | None:
    try:
        out = run().float()
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    distance = ((out - wanted.float()).norm() / wanted.float().norm()).item()
    return None if distance < most else f"relative error {distance:.1e} on a probe"
