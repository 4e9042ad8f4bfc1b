"""AdaLN: from the distinct timesteps of a step to the shift, scale and gate that every row reads (SPEC 2.3).

This is apart from the blocks because 13.0 of the 33.1 billion parameters do nothing else: a step needs a few table
rows, and whoever can say them beforehand does not need the weights.

Legend: S packed rows, M distinct timesteps of a step, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinreel.spec import DiTSpec

if TYPE_CHECKING:
    from twinreel.watch import Stages

# Video, text and audio rows of one timestep: the tags 0, 1, 2 select among three table rows.
MODALITIES = 3
BRANCH_VECTORS = 6


@dataclass(frozen=True)
class Affine:
    """shift, scale: [rows of the table, D] in block dtype. rows: [S] int64, the table row of each packed row."""

    shift: Tensor
    scale: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Gated(Affine):
    """An `Affine` and the gate [rows of the table, D] of its branch."""

    gate: Tensor


@dataclass(frozen=True)
class BlockModulation:
    """The two branches of a block."""

    msa: Gated
    mlp: Gated


@dataclass(frozen=True)
class StepModulation:
    """Everything that the timesteps decide in one step.

    block_table: block index -> [M, 3*6*D] in block dtype, called once a block and a step, so that a live projection
        keeps one block's table alive and not fifty.
    final_table: [M, 2D], shift then scale.
    rows: [S] int64, `timestep index * 3 + tag`. timestep_rows: [S] int64.
    """

    block_table: Callable[[int], Tensor]
    final_table: Tensor
    rows: Tensor
    timestep_rows: Tensor

    def block(self, index: int) -> BlockModulation:
        """The tables of block `index`, each [3M, D]: rows are timestep-major, then video, text, audio."""
        table = self.block_table(index)
        width = table.shape[-1] // (MODALITIES * BRANCH_VECTORS)
        parts = table.view(-1, BRANCH_VECTORS * width).chunk(BRANCH_VECTORS, dim=-1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = parts
        return BlockModulation(
            msa=Gated(shift_msa, scale_msa, self.rows, gate_msa),
            mlp=Gated(shift_mlp, scale_mlp, self.rows, gate_mlp),
        )

    def final(self) -> Affine:
        """The output norm's tables, each [M, D]."""
        shift, scale = self.final_table.chunk(2, dim=-1)
        return Affine(shift, scale, self.timestep_rows)


class Tagged(Protocol):
    """Rows with tags [S] int64: 0 video, 1 text, 2 audio; padding may carry -1 and reads the video row."""

    @property
    def tags(self) -> Tensor: ...


@dataclass(frozen=True)
class StepRows:
    """Which rows of the tables each packed row reads in a step, [S] int64 on the device of the blocks.

    table: of a block's tables, `timestep index * 3 + tag`. timestep: of the output norm's, the timestep index.
    """

    table: Tensor
    timestep: Tensor


class Modulation(Protocol):
    """Answers for the steps of one request."""

    def prepare(self, timesteps: Sequence[Tensor], stages: Stages | None = None) -> dict[str, Any]:
        """Once, before the first step: each step's distinct timesteps. Returns what was done, for the report."""
        ...

    def step(self, timesteps_M: Tensor, rows: StepRows) -> StepModulation:
        """timesteps_M: fp32 on the CPU, the step's distinct values in [0, 1], ascending; `rows` points into them."""
        ...


def step_rows(timestep_indices_S: Tensor, tags_S: Tensor) -> StepRows:
    """The `StepRows` of timestep indices [S] and tags [S]."""
    return StepRows(table_rows(timestep_indices_S, tags_S), timestep_indices_S)


def table_rows(timestep_indices_S: Tensor, tags_S: Tensor) -> Tensor:
    """The AdaLN table row of each packed row, [S] int64 (SPEC 2.3); a tag of -1 counts as 0 (SPEC 2.7)."""
    return timestep_indices_S * MODALITIES + tags_S.clamp(min=0)


def time_features(timesteps_M: Tensor, size: int) -> Tensor:
    """Sinusoidal features [M, size] fp32 of timesteps in [0, 1], cosines first (SPEC 2.3). `size` must be even."""
    half = size // 2
    # The order (multiply, then divide, then exp) is the checkpoint's: exp(-log(1e4) * (k / half)) rounds otherwise.
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps_M.device)
    angles = timesteps_M[:, None].float() * torch.exp(exponent / half)[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimeEmbedder(nn.Module):
    """Two fp32 linears around a SiLU: [M, freq_dim] -> [M, time_dim]."""

    def __init__(self, spec: DiTSpec) -> None:
        super().__init__()
        self.freq_dim = spec.freq_dim
        self.proj_in = nn.Linear(spec.freq_dim, spec.time_hidden, dtype=torch.float32)
        self.proj_out = nn.Linear(spec.time_hidden, spec.time_dim, dtype=torch.float32)

    def forward(self, timesteps_M: Tensor) -> Tensor:
        """fp32 [M] -> fp32 [M, time_dim]."""
        return self.proj_out(F.silu(self.proj_in(time_features(timesteps_M, self.freq_dim))))


def embed_timesteps(embedder: TimeEmbedder, timesteps_M: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [M] -> [M, time_dim] in `dtype`: what every projection of the step reads.

    SiLU in fp32 and one rounding after it: every block reads this vector, so rounding before the SiLU would bias all of
    them the same way in every step.
    """
    return F.silu(embedder(timesteps_M)).to(dtype)


class AdaLN(nn.Module):
    """The one linear `adaln_proj.linear` of a block or of the final layer, in the dtype of the blocks."""

    def __init__(self, time_dim: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.adaln_proj = nn.ModuleDict({"linear": nn.Linear(time_dim, outputs, dtype=dtype)})

    def forward(self, embedding: Tensor) -> Tensor:
        """[M, time_dim] -> [M, outputs]."""
        return self.adaln_proj["linear"](embedding)


class LiveModulation(nn.Module):
    """Runs the projections in every step. dtype: of the blocks; the time embedder is fp32 whatever it is."""

    def __init__(self, spec: DiTSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        block_outputs = MODALITIES * BRANCH_VECTORS * spec.hidden
        self.time_embedder = TimeEmbedder(spec)
        self.blocks = nn.ModuleList(AdaLN(spec.time_dim, block_outputs, dtype) for _ in range(spec.layers))
        self.final_layer = AdaLN(spec.time_dim, 2 * spec.hidden, dtype)

    def prepare(self, timesteps: Sequence[Tensor], stages: Stages | None = None) -> dict[str, Any]:
        """Nothing to do."""
        return {"adaln": "live"}

    def step(self, timesteps_M: Tensor, rows: StepRows) -> StepModulation:
        """See `Modulation.step`. The time embedder runs here, each block's projection when the block asks for it."""
        timesteps_M = timesteps_M.to(self.time_embedder.proj_in.weight.device)
        embedding = embed_timesteps(self.time_embedder, timesteps_M, self.dtype)
        return StepModulation(
            block_table=lambda index: self.blocks[index](embedding),
            final_table=self.final_layer(embedding),
            rows=rows.table,
            timestep_rows=rows.timestep,
        )

    def at(self, timesteps_M: Tensor, timestep_indices_S: Tensor, rows: Tagged) -> StepModulation:
        """`step` for timestep indices [S] and rows with tags."""
        return self.step(timesteps_M, step_rows(timestep_indices_S, rows.tags))
