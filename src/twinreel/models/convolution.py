"""The audio VAE's weight-normalised 1-D convolutions, stored as a direction `weight_v` and a length `weight_g`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NormedConv(nn.Module):
    """`[B, in, n]` to `[B, out, n']` with the weight `v g / |v|`, the norm over all dims but the first (SPEC 1.6).

    `freeze` replaces the stored pair by one parameter `weight`; before it, each call computes the weight anew.
    """

    transposed = False

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        padding: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.stride, self.dilation = stride, dilation
        self.padding = dilation * (kernel - 1) // 2 if padding is None else padding
        first, second = (inputs, outputs) if self.transposed else (outputs, inputs)
        self.weight_g = nn.Parameter(torch.ones(first, 1, 1))
        self.weight_v = nn.Parameter(torch.empty(first, second, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.kaiming_uniform_(self.weight_v, a=5**0.5)

    @torch.no_grad()
    def freeze(self) -> None:
        """Fold the stored pair into `weight`, once; for after the stored tensors are assigned."""
        if hasattr(self, "weight_v"):
            self.weight = nn.Parameter(self._weight(), requires_grad=False)
            del self.weight_g, self.weight_v

    def _weight(self) -> Tensor:
        # The function behind torch's weight_norm: v * (g / |v|) on the CPU and its own kernel on a GPU. Written out
        # by hand the GPU's bits would differ from the released program's.
        return torch._weight_norm(self.weight_v, self.weight_g, 0) if hasattr(self, "weight_v") else self.weight

    def forward(self, x_BCn: Tensor) -> Tensor:
        return F.conv1d(x_BCn, self._weight(), self.bias, self.stride, self.padding, self.dilation)


class NormedConvTransposed(NormedConv):
    """The transposed convolution; the first dim of its weight, and so of the norm, is the input channels."""

    transposed = True

    def forward(self, x_BCn: Tensor) -> Tensor:
        return F.conv_transpose1d(x_BCn, self._weight(), self.bias, self.stride, self.padding)


def fold_norms(module: nn.Module) -> None:
    """`freeze` every weight-normalised convolution inside `module`."""
    for part in module.modules():
        if isinstance(part, NormedConv):
            part.freeze()
