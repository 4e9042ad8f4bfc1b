"""Many equal requests in one call of the model, for training: the modules are the ones that generate.

The DiT packs its rows in one sequence; a batch is B such sequences behind one another, whose attention is cut into B
equal parts by an ops table. The conditioner takes one prompt, so its layers are walked here with a batch dim.

Legend: B requests, S packed rows, R table rows of a request, L prompt tokens, P patches, V vision tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layout import PackedLayout
from ..models.dit import RowState, rope_table
from ..models.modulation import MODALITIES
from ..models.mrope import positions, rope_tables
from ..models.text_encoder import TextEncoder, rotate
from ..ops import Affine, Branches, Gated, Norm, Ops, Rope, reference, select
from ..spec import DiTSpec, ProcessorSpec, TextSpec

CLOCKS = 4  # target video, target audio, visual condition, sound condition


@dataclass(frozen=True)
class BatchLayout:
    """A layout of S rows, B times: what the DiT needs to know of the rows, and which table row each row reads.
    The rotary tables in `at` are one request's, [S, 1, d] and ready for `Segments`; `half` of d is what they turn.

    `picks` maps a request's number of table rows to the one-hot [S, R] that selects from them.
    """

    layout: PackedLayout
    batch: int
    half: int
    at: RowState
    clock_indices: Tensor
    picks: dict[int, Tensor]


class Segments:
    """The ops of a batch. Table rows are picked by a product with a one-hot matrix: its gradient is a product too,
    where that of a gather would be millions of atomic additions into a few rows."""

    def __init__(self) -> None:
        self.batch, self.half, self.picks = 1, 0, dict[int, Tensor]()

    def lay_out(self, layout: BatchLayout) -> None:
        """Work on this layout from now on."""
        self.batch, self.half, self.picks = layout.batch, layout.half, layout.picks

    def ops(self) -> Ops:
        """The table to build a DiT with."""
        return replace(
            select("reference"),
            name="batched",
            norm_modulate=self.norm_modulate,
            gate_norm_modulate=self.gate_norm_modulate,
            gate_add=self.gate_add,
            qk_norm_rope=self.qk_norm_rope,
            attention=self.attention,
        )

    def spread(self, table: Tensor) -> Tensor:
        """A table [B R, D] to the rows that read it, [B S, D]."""
        pick_SR = self.picks[table.shape[0] // self.batch].to(table.dtype)
        return (pick_SR @ table.unflatten(0, (self.batch, -1))).flatten(0, 1)

    def norm_modulate(self, x_SD: Tensor, norm: Norm, mod: Affine) -> Tensor:
        return torch.addcmul(self.spread(mod.shift), reference.rms_norm(x_SD, norm), self.spread(1.0 + mod.scale))

    def gate_add(self, x_SD: Tensor, h_SD: Tensor, mod: Gated) -> Tensor:
        return torch.addcmul(x_SD, self.spread(mod.gate), h_SD)

    def gate_norm_modulate(self, x_SD: Tensor, h_SD: Tensor, norm: Norm, mod: Branches) -> tuple[Tensor, Tensor]:
        x_SD = self.gate_add(x_SD, h_SD, mod.msa)
        return x_SD, self.norm_modulate(x_SD, norm, mod.mlp)

    def qk_norm_rope(
        self, qkv_SH3d: Tensor, q_norm: Norm, k_norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_SHd, k_SHd, v_SHd = qkv_SH3d.unbind(2)
        q_SHd, k_SHd = reference.rms_norm(q_SHd, q_norm), reference.rms_norm(k_SHd, k_norm)
        if rope is not None:
            q_SHd, k_SHd = self._turn(q_SHd, rope), self._turn(k_SHd, rope)
        return q_SHd, k_SHd, v_SHd

    def _turn(self, x_SHd: Tensor, rope: Rope) -> Tensor:
        """The rotation by one request's wide tables, for every request: one pass fewer than half by half."""
        x, half = x_SHd.unflatten(0, (self.batch, -1)), self.half
        swapped = torch.cat((x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]), dim=-1)
        return torch.addcmul(x * rope[0], swapped, rope[1]).flatten(0, 1)

    def attention(self, q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
        assert used == q_SHd.shape[0], "a batch has no padding"
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q_SHd, k_SHd, v_SHd))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def batch_layout(
    layout: PackedLayout, batch: int, spec: DiTSpec, dtype: torch.dtype, device: torch.device
) -> BatchLayout:
    """`layout` for `batch` requests behind one another, on `device`; `dtype` is the DiT's."""

    def repeat(index: Tensor, step: int = layout.rows) -> Tensor:
        return (index[None] + step * torch.arange(batch)[:, None]).flatten().to(device)

    rows = layout.clock_S * MODALITIES + layout.tags_S
    return BatchLayout(
        layout=layout,
        batch=batch,
        half=3 * spec.rope_freqs,
        at=RowState(
            video_indices=repeat(layout.video_indices),
            audio_indices=repeat(layout.audio_indices),
            text_indices=repeat(layout.text_indices),
            tags=layout.tags_S.to(device).repeat(batch),
            rope=_wide(rope_table(layout.positions_S3, spec, dtype, device), spec.head_dim),
            used=batch * layout.rows,
        ),
        clock_indices=repeat(layout.clock_S, CLOCKS),
        picks={
            CLOCKS: F.one_hot(layout.clock_S, CLOCKS).to(device, dtype),
            CLOCKS * MODALITIES: F.one_hot(rows, CLOCKS * MODALITIES).to(device, dtype),
        },
    )


def _wide(rope: Rope, head_dim: int) -> Rope:
    """cos and sin [S, R] -> what multiplies a head and its swapped halves, [S, 1, d] each."""
    (cos, sin), rest = rope, head_dim - 2 * rope[0].shape[-1]
    tables = (
        F.pad(torch.cat((cos, cos), dim=-1), (0, rest), value=1.0),
        F.pad(torch.cat((-sin, sin), dim=-1), (0, rest)),
    )
    return tables[0][:, None], tables[1][:, None]


# ---- the conditioner ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """One image or video of every request: patches float32 [B, P, C] in the tower's order and grid (t, h, w)."""

    patches: Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class PromptLayout:
    """What all prompts of a batch share: rotary tables [L, d], the pads' places int64 [V] in prompt order."""

    rope: tuple[Tensor, Tensor]
    pads: Tensor


def prompt_layout(
    types_L: Tensor, grids: Sequence[tuple[int, int, int]], spec: TextSpec, dtype: torch.dtype, device: torch.device
) -> PromptLayout:
    """From one prompt's token types and the grids of its visions in prompt order."""
    merge = spec.vision["spatial_merge_size"]
    runs = [(h // merge, w // merge) for t, h, w in grids for _ in range(t)]
    places = positions(types_L.tolist(), runs).to(device)
    rope = rope_tables(places, spec.head_dim, spec.rope_theta, spec.mrope_section, dtype)
    return PromptLayout(rope, types_L.nonzero().flatten().to(device))


def encode_prompts(encoder: TextEncoder, ids_BL: Tensor, at: PromptLayout, sights: Sequence[Sight] = ()) -> Tensor:
    """`TextEncoder.forward` of B prompts of one shape: [B L, D]."""
    x_BLD = encoder.language_model.embed_tokens(ids_BL)
    levels: list[Tensor] = []
    if sights:
        seen = [see(encoder.visual, sight) for sight in sights]
        merged, *levels = (torch.cat(parts, dim=1) for parts in zip(*seen, strict=True))
        x_BLD = x_BLD.index_copy(1, at.pads, merged)
    layers: Any = encoder.language_model.layers
    for index, layer in enumerate(layers):
        x_BLD = x_BLD + _attend(layer.self_attn, layer.input_layernorm(x_BLD), at.rope)
        x_BLD = x_BLD + layer.mlp(layer.post_attention_layernorm(x_BLD))
        if index < len(levels):
            x_BLD = x_BLD.index_add(1, at.pads, levels[index])
    return x_BLD.flatten(0, 1)


def _attend(attn: Any, x_BLD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    def heads(linear: nn.Module) -> Tensor:
        return linear(x_BLD).unflatten(-1, (-1, attn.head_dim))

    q = rotate(attn.q_norm(heads(attn.q_proj)).transpose(1, 2), *rope)
    k = rotate(attn.k_norm(heads(attn.k_proj)).transpose(1, 2), *rope)
    v = heads(attn.v_proj).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return attn.o_proj(out.transpose(1, 2).flatten(2))


def see(tower: Any, sight: Sight) -> list[Tensor]:
    """The vision tower over B inputs of one grid: merged features and each deepstack level, all [B, V, D]."""
    slices, rows, columns = sight.grid
    batch, config = sight.patches.shape[0], tower.config
    proj = tower.patch_embed.proj
    x = F.linear(sight.patches.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)
    x = x.unflatten(1, (slices, -1)).flatten(0, 1) + _grid_embedding(tower, rows, columns)
    rope = _grid_rope(config, rows, columns, x.device)
    taps = list(config.deepstack_visual_indexes)
    levels = []
    for index, block in enumerate(tower.blocks):
        x = x + _look(block.attn, block.norm1(x), rope)
        x = x + block.mlp(block.norm2(x))
        if index in taps:
            levels.append(tower.deepstack_merger_list[taps.index(index)](x.flatten(0, 1)))
    merged = tower.merger(x.flatten(0, 1))
    return [y.unflatten(0, (batch, -1)) for y in (merged, *levels)]


def _look(attn: Any, x_NPC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = attn.qkv(x_NPC).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = (rotate(y.float(), *rope).to(v.dtype) for y in (q, k))
    return attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _blocks(x_hwC: Tensor, merge: int) -> Tensor:
    """[h, w, C] to [h w, C] in the tower's order: merge blocks row by row, inside a block row by row."""
    x = x_hwC.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    return x.permute(0, 2, 1, 3, 4).flatten(0, 3)


def _grid_embedding(tower: Any, rows: int, columns: int) -> Tensor:
    side = tower.num_grid_per_side
    grid = tower.pos_embed.weight.view(side, side, -1).permute(2, 0, 1)[None].float()
    grid = F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    return _blocks(grid, tower.config.spatial_merge_size).to(tower.pos_embed.weight.dtype)


def _grid_rope(config: Any, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = config.hidden_size // config.num_heads // 2
    inverse = 1.0 / (10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width))
    h, w = (torch.arange(n, dtype=torch.float32, device=device) for n in (rows, columns))
    places = torch.stack(torch.meshgrid(h, w, indexing="ij"), dim=-1)
    angles = _blocks((places[..., None] * inverse).flatten(2), config.spatial_merge_size).repeat(1, 2)
    return angles.cos(), angles.sin()


def cut_patches(frames_BFHWC: Tensor, processor: ProcessorSpec) -> Sight:
    """uint8 frames [B, F, H, W, 3] that need no resize -> what `presentation.vision_patches` makes of each request."""
    batch, frames, height, width, _ = frames_BFHWC.shape
    patch, merge, group = processor.patch, processor.merge, processor.temporal_patch
    slices, rows, columns = -(-frames // group), height // patch, width // patch
    index = torch.arange(slices * group, device=frames_BFHWC.device).clamp(max=frames - 1)
    x = frames_BFHWC.index_select(1, index)
    x = x.reshape(batch, slices, group, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    x = x.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(batch, slices * rows * columns, 3, -1).float()
    mean, std = (torch.tensor(v, device=x.device).mul(255.0)[:, None] for v in (processor.mean, processor.std))
    return Sight(x.sub(mean).div_(std).flatten(2), (slices, rows, columns))
