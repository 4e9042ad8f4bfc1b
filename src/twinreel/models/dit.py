"""The DiT: one stack of blocks over one packed sequence of text, condition, audio and video rows (SPEC 2).

`refine` runs once a request, `forward` once a step; what does not change between steps (`RowState`) and what the
timesteps decide (`StepModulation`) arrive as arguments.

Legend: S packed rows of this rank, N rows of one modality, C values of a row, T text rows, D hidden, H heads of this
rank, d head dim, R rotary angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from twinreel.models.layers import Linears, RMSNorm
from twinreel.models.modulation import BlockModulation, StepModulation
from twinreel.ops import Ops, Rope
from twinreel.parallel import Attend, Axis, Parallel
from twinreel.parallel.attend import Local, Rows, chunks
from twinreel.spec import DiTSpec

# Stored and computed in fp32 whatever dtype is asked for (SPEC 1.3). The time embedder lives in the modulation module.
FP32_PREFIXES = (
    "video_patch_proj.",
    "audio_patch_proj.",
    "time_embedder.",
    "final_layer.video_out.",
    "final_layer.audio_out.",
)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class TextState:
    """What blocks need to know about the refiner's rows: all of them count, and they have no positions."""

    used: int
    rope: None = None
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class RowState:
    """What a request fixes for its packed rows, on the device of the DiT.

    video_indices, audio_indices, text_indices: int64, where each modality's rows stand among the S rows of this rank.
    tags: [S] int64, 0 video, 1 text, 2 audio; padding rows carry 0 or -1.
    rope: cos and sin, each [S, R] in block dtype. used: packed rows of all ranks before the padding.
    chunk: rows that go through qkv and the feed-forward at a time, which saves memory; 0 for all at once.
    """

    video_indices: Tensor
    audio_indices: Tensor
    text_indices: Tensor
    tags: Tensor
    rope: Rope
    used: int
    chunk: int = 0


def rope_table(position_ids_S3: Tensor, spec: DiTSpec, dtype: torch.dtype, device: torch.device | str) -> Rope:
    """cos and sin [S, 3 * rope_freqs] in `dtype` for fp64 positions (t, h, w) (SPEC 2.4).

    Angles, cos and sin are fp32 on `device`. The rotation is by halves, so each value serves dims i and i + R.
    """
    # The frequencies come from the CPU whatever the device is, so that no device's pow decides their last bit.
    exponent = torch.arange(0, 2 * spec.rope_freqs, 2, dtype=torch.float32, device="cpu") / (2 * spec.rope_freqs)
    inv_freq = (1.0 / spec.rope_theta**exponent).to(device)
    # fp64 to fp32 before the product: the angle's rounding is part of what the model was trained on.
    positions = position_ids_S3.to(device=device, dtype=torch.float32)
    angles_SR = (positions.unsqueeze(-1) * inv_freq).flatten(1)
    return angles_SR.cos().to(dtype), angles_SR.sin().to(dtype)


def make_row_state(
    positions_S3: Tensor,
    tags_S: Tensor,
    indices: tuple[Tensor, Tensor, Tensor],
    spec: DiTSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    used: int | None = None,
    chunk: int = 0,
) -> RowState:
    """The `RowState` of a rank's rows on `device`: fp64 positions, int64 tags, (text, video, audio) indices.

    `used`: rows of all ranks before the padding; None where these rows are all and none is padding. `chunk`: see there.
    """
    text_indices, video_indices, audio_indices = (index.to(device) for index in indices)
    return RowState(
        video_indices=video_indices,
        audio_indices=audio_indices,
        text_indices=text_indices,
        tags=tags_S.to(device),
        rope=rope_table(positions_S3, spec, dtype, device),
        used=tags_S.shape[0] if used is None else used,
        chunk=chunk,
    )


@dataclass(frozen=True)
class Recipe:
    """What every block of one DiT is built from."""

    spec: DiTSpec
    ops: Ops
    tp: Axis
    dtype: torch.dtype
    linears: Linears = field(default_factory=Linears)


@dataclass(frozen=True)
class Kind:
    """What a block is made of that differs from the others: its table of ops and the classes of its linears."""

    ops: Ops
    linears: Linears


@dataclass(frozen=True)
class HeadNorm:
    """What happens to q and k between the product and attention. It holds no weights of its own."""

    ops: Ops
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int

    def __call__(self, qkv: Tensor, at: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """[S, H*3*d] for any whole number of heads -> q, k, v [S, H, d], normalised and rotated."""
        qkv_SH3d = qkv.unflatten(-1, (-1, 3, self.head_dim))
        return self.ops.qk_norm_rope(qkv_SH3d, self.q_norm, self.k_norm, at.rope)


class Attention(nn.Module):
    """Full self-attention of a block. qkv stays in the released per-head order [S, H, 3, d]."""

    def __init__(self, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        spec, tp, dtype, linears = recipe.spec, recipe.tp, recipe.dtype, recipe.linears
        self.attend = attend
        self.qkv_proj = linears.column(spec.hidden, 3 * spec.inner, tp, dtype)
        self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps, dtype)
        self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm_eps, dtype)
        self.out_proj = linears.row(spec.inner, spec.hidden, tp, dtype)
        self.qk_norm = HeadNorm(recipe.ops, self.q_norm, self.k_norm, spec.head_dim)

    def forward(self, x_SD: Tensor, at: Rows) -> Tensor:
        """x_SD -> x_SD."""
        return self.out_proj(self.attend(x_SD, self.qkv_proj, self.qk_norm, at))


class MLP(nn.Module):
    """SwiGLU feed-forward. fc1 gives [gate | value], the order of the original layout."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        spec, tp, dtype, linears = recipe.spec, recipe.tp, recipe.dtype, recipe.linears
        self.ops = recipe.ops
        self.fc1 = linears.column(spec.hidden, 2 * spec.ffn, tp, dtype, parts=2)
        self.fc2 = linears.row(spec.ffn, spec.hidden, tp, dtype)

    def forward(self, x_SD: Tensor, at: Rows) -> Tensor:
        """x_SD -> x_SD."""
        parts = chunks(x_SD.shape[0], at.chunk)
        if len(parts) == 1:
            return self._rows(x_SD)
        out_SD = x_SD.new_empty(x_SD.shape)
        for rows in parts:
            out_SD[rows] = self._rows(x_SD[rows])
        return out_SD

    def _rows(self, x_SD: Tensor) -> Tensor:
        return self.fc2(self.ops.swiglu(self.fc1(x_SD)))


class Block(nn.Module):
    """A block of the trunk. Its AdaLN projection lives in the modulation module."""

    def __init__(self, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        self.ops = recipe.ops
        self.norm1 = RMSNorm(recipe.spec.hidden, recipe.spec.norm_eps, recipe.dtype)
        self.attn = Attention(recipe, attend)
        self.norm2 = RMSNorm(recipe.spec.hidden, recipe.spec.norm_eps, recipe.dtype)
        self.mlp = MLP(recipe)

    def forward(self, x_SD: Tensor, mod: BlockModulation, at: Rows) -> Tensor:
        """The residual stream [S, D] in block dtype, one block further (SPEC 2.5)."""
        h_SD = self.ops.norm_modulate(x_SD, self.norm1, mod.msa)
        h_SD = self.attn(h_SD, at)
        x_SD, h_SD = self.ops.gate_norm_modulate(x_SD, h_SD, self.norm2, mod)
        return self.ops.gate_add(x_SD, self.mlp(h_SD, at), mod.mlp)


class RefinerBlock(nn.Module):
    """A plain pre-norm block over the text rows: no modulation, no gate, no positions."""

    def __init__(self, recipe: Recipe, attend: Attend) -> None:
        super().__init__()
        self.ops = recipe.ops
        self.norm1 = RMSNorm(recipe.spec.hidden, recipe.spec.norm_eps, recipe.dtype)
        self.attn = Attention(recipe, attend)
        self.norm2 = RMSNorm(recipe.spec.hidden, recipe.spec.norm_eps, recipe.dtype)
        self.mlp = MLP(recipe)

    def forward(self, x_TD: Tensor, at: Rows) -> Tensor:
        """x_TD -> x_TD."""
        x_TD = x_TD + self.attn(self.ops.rms_norm(x_TD, self.norm1), at)
        return x_TD + self.mlp(self.ops.rms_norm(x_TD, self.norm2), at)


class TokenRefiner(nn.Module):
    """The refiner blocks and their final norm. Text rows are whole on every rank, so they always attend locally."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.ops = recipe.ops
        attend = Local(recipe.ops.attention, Axis("text"))
        self.blocks = nn.ModuleList(RefinerBlock(recipe, attend) for _ in range(recipe.spec.refiner_layers))
        self.final_norm = RMSNorm(recipe.spec.hidden, recipe.spec.final_norm_eps, recipe.dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """x_TD -> x_TD."""
        at = TextState(used=x_TD.shape[0])
        for block in self.blocks:
            x_TD = block(x_TD, at)
        return self.ops.rms_norm(x_TD, self.final_norm)


class FinalLayer(nn.Module):
    """The output norm and the two fp32 heads."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        spec = recipe.spec
        self.ops = recipe.ops
        self.norm = RMSNorm(spec.hidden, spec.final_norm_eps, recipe.dtype)
        self.video_out = nn.Linear(spec.hidden, spec.video_row, dtype=torch.float32)
        self.audio_out = nn.Linear(spec.hidden, spec.audio_channels, dtype=torch.float32)

    def forward(self, x_SD: Tensor, at: RowState, mod: StepModulation) -> tuple[Tensor, Tensor]:
        """x_SD -> fp32 [Nv, video_row], fp32 [Na, audio_channels]."""
        # Modulated in block dtype, then widened: the heads read values that were rounded to block dtype (SPEC 2.6).
        h_SD = self.ops.norm_modulate(x_SD, self.norm, mod.final()).float()
        # Over all rows, selected afterwards, as the patch projections are.
        return (
            self.video_out(h_SD).index_select(0, at.video_indices),
            self.audio_out(h_SD).index_select(0, at.audio_indices),
        )


class DiT(nn.Module):
    """The trunk with its two patch projections, the text projection and refiner, and the output heads.

    dtype: of the blocks, fp32 or bf16; the parts in `FP32_PREFIXES` are fp32 either way. kinds: blocks of the trunk, by
    number, that are made otherwise. ValueError: another dtype, or heads that cannot be dealt out evenly over tp.
    """

    def __init__(
        self,
        spec: DiTSpec,
        ops: Ops,
        parallel: Parallel,
        dtype: torch.dtype,
        kinds: Mapping[int, Kind] | None = None,
    ) -> None:
        super().__init__()
        if dtype == torch.float16:
            raise ValueError("the DiT cannot run in float16: its residual stream passes 65504, float16's largest value")
        if dtype not in DTYPES:
            raise ValueError(f"the DiT runs in {' or '.join(map(str, DTYPES))}, got {dtype}")
        parallel.tp.share(spec.heads)  # a slice of qkv must hold whole heads
        recipe = Recipe(spec, ops, parallel.tp, dtype)
        of_block = dict.fromkeys(range(spec.layers), recipe) | {
            index: replace(recipe, ops=kind.ops, linears=kind.linears) for index, kind in (kinds or {}).items()
        }
        attends = {each.ops.attention: parallel.attend(each.ops.attention) for each in of_block.values()}
        self.spec, self.dtype = spec, dtype
        self.video_patch_proj = nn.Linear(spec.video_row, spec.hidden, dtype=torch.float32)
        self.audio_patch_proj = nn.Linear(spec.audio_channels, spec.hidden, dtype=torch.float32)
        self.condition_proj = nn.Linear(spec.text_dim, spec.hidden, dtype=dtype)
        self.token_refiner = TokenRefiner(recipe)
        self.blocks = nn.ModuleList(Block(each, attends[each.ops.attention]) for each in of_block.values())
        self.final_layer = FinalLayer(recipe)

    def refine(self, text_TC: Tensor) -> Tensor:
        """Prompt embeddings [T, text_dim] of any float dtype -> [T, D] in block dtype. No timestep enters."""
        return self.token_refiner(self.condition_proj(text_TC.to(self.dtype)))

    def embed(self, video_NC: Tensor, audio_NC: Tensor, refined_TD: Tensor, at: RowState) -> Tensor:
        """The packed rows [S, D] in block dtype; padding rows are zero (SPEC 2.2).

        A patch projection runs over all S rows, zeros where another modality stands, and its rows are selected
        afterwards. A product over a few rows rounds unlike one over many, so projecting each rank's own rows would
        make the bits depend on where the shards are cut. On CPU (fp32, PyTorch 2.13 with MKL) this equals the product
        over the selected rows alone bit for bit from 12 rows on, at hidden sizes 64, 96 and 5376; with 1 to 11 rows
        the two differ in the last bits. No request has so few: the shortest has hundreds of each.
        """
        x_SD = refined_TD.new_zeros(at.tags.shape[0], self.spec.hidden).index_copy_(0, at.text_indices, refined_TD)
        for rows_NC, indices, project in (
            (video_NC, at.video_indices, self.video_patch_proj),
            (audio_NC, at.audio_indices, self.audio_patch_proj),
        ):
            rows_SC = torch.zeros(x_SD.shape[0], rows_NC.shape[1], dtype=torch.float32, device=x_SD.device)
            rows_SC.index_copy_(0, indices, rows_NC.float())
            # Projected in fp32 and rounded to block dtype once, on entering the residual stream.
            x_SD.index_copy_(0, indices, project(rows_SC).index_select(0, indices).to(self.dtype))
        return x_SD

    def forward(
        self, video_NC: Tensor, audio_NC: Tensor, refined_TD: Tensor, at: RowState, mod: StepModulation
    ) -> tuple[Tensor, Tensor]:
        """The velocities of one step, data-ward: `x0 = x + (1 - t) * v` (SPEC 2).

        video_NC: fp32 [Nv, 96], rows of `at.video_indices` in that order, condition rows first. audio_NC: fp32
        [Na, 32], likewise. refined_TD: from `refine`, rows of `at.text_indices`. Returns fp32 [Nv, 96] and fp32
        [Na, 32], with predictions for the condition rows too, which the caller drops.
        """
        x_SD = self.embed(video_NC, audio_NC, refined_TD, at)
        for index, block in enumerate(self.blocks):
            x_SD = block(x_SD, mod.block(index), at)
        return self.final_layer(x_SD, at, mod)
