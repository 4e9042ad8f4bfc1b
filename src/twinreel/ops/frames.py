"""The video encoder's convolutions and what stands before each, as a table: plain, or Triton passes over
channels-innermost frames, whose sums run in another order. In fp32 the convolutions themselves are Winograd's
(`winograd`): other products, no further from exact ones than a small multiple of PyTorch's own.

Legend: B clips, F frames, H, W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAST = 2  # frames that a convolution looks back
Edges = tuple[int, int]  # pixels reflected above and left, and below and right


@dataclass(frozen=True)
class FrameOps:
    """`padded(x_BCFHW, norm, edges)`: `x`, through SiLU of `norm` (GroupNorm with the statistics of each frame alone) where
    there is one, behind two frames of zeros, its edges reflected; [B, C, F + 2, H', W'].

    `convolve(x_BCFHW, conv)`: the convolution of what is padded already. `prepare(conv)` lays its stored weight out for
    that, once. `order` is the memory order that weights have."""

    name: str
    padded: Callable[[Tensor, nn.GroupNorm | None, Edges], Tensor]
    order: torch.memory_format
    convolve: Callable[[Tensor, nn.Conv3d], Tensor]
    prepare: Callable[[nn.Conv3d], None]


def padded(x_BCFHW: Tensor, norm: nn.GroupNorm | None, edges: Edges) -> Tensor:
    """The plain member: PyTorch's own norm and SiLU, then one pass that pads."""
    if norm is not None:
        batch, _, frames, _, _ = x_BCFHW.shape
        x = x_BCFHW.transpose(1, 2).flatten(0, 1)
        x = F.silu(F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps), inplace=True)
        x_BCFHW = x.unflatten(0, (batch, frames)).transpose(1, 2)
    # `F.pad` reflects slowly on a GPU, and pads the past in a second pass.
    first, last = edges
    batch, channels, frames, height, width = x_BCFHW.shape
    out = x_BCFHW.new_empty(batch, channels, frames + PAST, height + first + last, width + first + last)
    out[:, :, :PAST] = 0.0
    now = out[:, :, PAST:]
    now[..., first : first + height, first : first + width] = x_BCFHW
    if first:
        now[..., 0] = now[..., 2]
        now[..., 0, :] = now[..., 2, :]
    if last:
        now[..., -1] = now[..., -3]
        now[..., -1, :] = now[..., -3, :]
    return out


def convolve(x_BCFHW: Tensor, conv: nn.Conv3d) -> Tensor:
    """The plain member: PyTorch's own."""
    return F.conv3d(x_BCFHW, conv.weight, conv.bias, conv.stride)


def prepare(conv: nn.Conv3d) -> None:
    """The plain member: the stored weight is what `convolve` reads."""


PLAIN = FrameOps("reference", padded, torch.contiguous_format, convolve, prepare)


def choose(name: str, kind: str, channels: Sequence[int], device: torch.device) -> FrameOps:
    """The table for an encode of `kind`: plain where `name` asks for it, and for widths that no kernel takes."""
    if name != "triton" or device.type == "meta" or any(c & (c - 1) for c in channels):
        return PLAIN
    from twinreel.ops import frame_norm, winograd

    if kind == "fp32":
        return FrameOps("winograd", frame_norm.padded, torch.contiguous_format, winograd.convolve, winograd.prepare)
    return FrameOps("triton", frame_norm.padded, torch.channels_last_3d, convolve, prepare)
