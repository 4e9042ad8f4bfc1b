"""The passes of the video decoder's block between its products, as a table: plain, or Triton kernels of equal bits.

The two members differ in time alone: nothing here sums a row, so `choose` may follow the kernels of the DiT.
Legend: B tiles, N tokens, H heads, d head dim, R rotated dims, D width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.ops import reference

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class VitOps:
    """`rotate_heads(x_BNH2d fp32, (cos, sin)) -> q, k` [B, N, H, d] in the tables' dtype; `swiglu(u_BN2F) -> [B, N, F]`,
    gate first; `scale_add(x_BND fp32, h_BND, scale_D fp32) -> fp32 [B, N, D]`."""

    name: str
    rotate_heads: Callable[[Tensor, Tables], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    scale_add: Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate_heads(x_BNH2d: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Normalised heads are rounded before the rotation, which runs in the tables' dtype, as released (SPEC 8.3)."""
    cos, sin = tables
    x = x_BNH2d.to(cos.dtype)
    q, k = (_turn(part, cos, sin) for part in x.unbind(3))
    return q, k


def _turn(x_BNHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x_BNHd[..., : cos.shape[-1]], x_BNHd[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def scale_add(x_BND: Tensor, h_BND: Tensor, scale_D: Tensor) -> Tensor:
    """`x + h * scale`: the scale is float32, so a half-precision branch is promoted before it meets the residual."""
    return x_BND + h_BND * scale_D


PLAIN = VitOps("reference", rotate_heads, reference.swiglu, scale_add)


def choose(name: str, device: torch.device) -> VitOps:
    """The member called `name`, "triton" or "reference". The kernels run where those of the DiT do."""
    if name != "triton" or device.type == "meta":
        return PLAIN
    from twinreel.ops import vit_block
    from twinreel.ops.swiglu import swiglu

    return VitOps(
        "triton",
        lambda x_BNH2d, tables: vit_block.rotate_heads(
            x_BNH2d.contiguous(), tables[0].squeeze(1), tables[1].squeeze(1)
        ),
        lambda u_BN2F: swiglu(u_BN2F.flatten(0, -2)).unflatten(0, u_BN2F.shape[:-1]),
        lambda x_BND, h_BND, scale_D: vit_block.scale_add(x_BND, h_BND.contiguous(), scale_D),
    )
