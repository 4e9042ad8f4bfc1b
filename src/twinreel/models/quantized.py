"""Linears whose weights are e4m3 with one scale for each output, and the DiT that uses them in some blocks and steps.

Weights are quantized once, rows (`ops.quantize_rows`) when they arrive, unless the op before has done so already.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from twinreel.models.dit import DiT, Kind
from twinreel.models.layers import Linears
from twinreel.ops import Ops
from twinreel.ops.e4m3 import E4M3, Quantized
from twinreel.parallel import Axis


class QuantizedLinear(nn.Module):
    """`weight` [outputs, inputs] e4m3 and `weight_scale` [outputs, 1] fp32; bf16 out."""

    sharded: tuple[str, ...] = ()  # parameters that `shard` cuts

    def __init__(self, inputs: int, outputs: int, ops: Ops) -> None:
        super().__init__()
        self.in_features, self.out_features, self.ops = inputs, outputs, ops
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=E4M3), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outputs, 1), requires_grad=False)

    def product(self, input: Tensor | Quantized, start: int, stop: int) -> Tensor:
        """[S, inputs] -> bf16 [S, stop - start]: outputs [start, stop)."""
        rows = input if isinstance(input, Quantized) else self.ops.quantize_rows(input)
        return self.ops.scaled_product(rows, self.weight[start:stop], self.weight_scale[start:stop])


class QuantizedColumn(QuantizedLinear):
    """`layers.ColumnLinear` in e4m3."""

    sharded = ("weight", "weight_scale")

    def __init__(
        self, inputs: int, outputs: int, axis: Axis, dtype: torch.dtype, parts: int = 1, *, ops: Ops
    ) -> None:  # fmt: skip
        super().__init__(inputs, parts * axis.share(outputs // parts), ops)
        self.axis, self.parts = axis, parts

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of the whole weight or of its scales."""
        return self.axis.slice(whole.unflatten(0, (self.parts, -1)), 1).flatten(0, 1)

    def columns(self, input: Tensor | Quantized, start: int, stop: int) -> Tensor:
        """This rank's outputs [start, stop) alone."""
        return self.product(input, start, stop)

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """[S, inputs] -> bf16 [S, outputs]."""
        return self.product(input, 0, self.out_features)


class QuantizedRow(QuantizedLinear):
    """`layers.RowLinear` in e4m3. A scale is that of a whole weight row; a row of the input has one on each rank."""

    sharded = ("weight",)

    def __init__(self, inputs: int, outputs: int, axis: Axis, dtype: torch.dtype, *, ops: Ops) -> None:
        super().__init__(axis.share(inputs), outputs, ops)
        self.axis = axis

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's columns of the whole weight."""
        return self.axis.slice(whole, 1)

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """[S, inputs / ranks] -> bf16 [S, outputs], the same on every rank."""
        return self.axis.all_reduce(self.product(input, 0, self.out_features))


def quantized_kind(table: Ops) -> Kind:
    """What a block is made of whose products take e4m3; `table` is one that `ops.quantized` made."""
    return Kind(table, Linears(partial(QuantizedColumn, ops=table), partial(QuantizedRow, ops=table)))


class Stepwise(nn.Module):
    """Two DiTs over one set of weights where they are alike: `wide` in the first and last `edge` steps, else `narrow`.

    `narrow` may still be on the meta device: the parameters named in `shared` are those of `wide`, the others are to be
    filled."""

    def __init__(self, narrow: DiT, wide: DiT, edge: int) -> None:
        super().__init__()
        self.narrow, self.wide, self.edge = narrow, wide, edge
        theirs, ours = dict(wide.named_parameters()), dict(narrow.named_parameters())
        self.shared = tuple(name for name in ours if name in theirs and theirs[name].dtype == ours[name].dtype)
        for name in self.shared:
            path, _, leaf = name.rpartition(".")
            setattr(narrow.get_submodule(path), leaf, theirs[name])


def each_step(dit: DiT | Stepwise, calls: int) -> list[DiT]:
    """The DiT of each of a request's `calls` steps."""
    if isinstance(dit, DiT):
        return [dit] * calls
    return [dit.narrow if dit.edge <= step < calls - dit.edge else dit.wide for step in range(calls)]
