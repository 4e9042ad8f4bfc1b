"""Layers that own their shard rule. On a tp axis of one rank they are plain linears.

A sharded layer holds only its own part; `shard` cuts that part out of the whole tensor of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinreel.parallel import Axis


class RMSNorm(nn.Module):
    """Weight and epsilon of an RMS norm over the last dim. The arithmetic is an op, so this module only holds them."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps


class ColumnLinear(nn.Linear):
    """A linear whose outputs are dealt out over `axis`; the input is whole on every rank, and there is no collective.

    `parts` is how many equal blocks the outputs consist of, each dealt out by itself: 2 for [gate | value].
    """

    def __init__(self, inputs: int, outputs: int, axis: Axis, dtype: torch.dtype, parts: int = 1) -> None:
        super().__init__(inputs, parts * axis.share(outputs // parts), bias=False, dtype=dtype)
        self.axis, self.parts = axis, parts

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of the whole weight [outputs, inputs]."""
        blocks = whole.unflatten(0, (self.parts, -1))
        return self.axis.slice(blocks, 1).flatten(0, 1)

    def columns(self, input: Tensor, start: int, stop: int) -> Tensor:
        """[..., inputs] -> [..., stop - start]: this rank's outputs [start, stop) alone."""
        return F.linear(input, self.weight[start:stop])


class RowLinear(nn.Linear):
    """A linear whose inputs are dealt out over `axis`: the one place where partial sums are reduced."""

    def __init__(self, inputs: int, outputs: int, axis: Axis, dtype: torch.dtype) -> None:
        super().__init__(axis.share(inputs), outputs, bias=False, dtype=dtype)
        self.axis = axis

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's columns of the whole weight [outputs, inputs]."""
        return self.axis.slice(whole, 1)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs / ranks] -> [..., outputs], the same on every rank."""
        return self.axis.all_reduce(F.linear(input, self.weight))


@dataclass(frozen=True)
class Linears:
    """The classes that a block builds its linears from; a quantised pair goes here."""

    column: Callable[..., Any] = ColumnLinear
    row: Callable[..., Any] = RowLinear
