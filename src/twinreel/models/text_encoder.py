"""The conditioner (SPEC 3.4, 3.5): Qwen3-VL's vision tower and our own decoder layers, without the final norm.

Shapes: `L` prompt tokens, `P` patches, `V` vision tokens (a merged 2x2 block of patches each), `D` hidden width,
`H` query heads, `G` key and value heads, `d` head width. Batch is always 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel import Axis
from ..spec import TextSpec
from .layers import ColumnLinear, RowLinear
from .mrope import positions, rope_tables, type_runs

TEXT, IMAGE, VIDEO = 0, 1, 2  # token types
Grid = tuple[int, int, int]  # (t, h, w) in patches


class RMSNorm(nn.Module):
    """Root-mean-square norm with the conditioner's two roundings (SPEC 3.5)."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of `x`; same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        # Rounded to the weights' dtype before the weight is applied, and again after: the checkpoint was trained so.
        return self.weight * wide.to(x.dtype)


def rotate(x_HLd: Tensor, cos_Ld: Tensor, sin_Ld: Tensor) -> Tensor:
    """Half rotation in the dtype of `x`: every product and the sum round there, as in the released model."""
    first, second = x_HLd.chunk(2, dim=-1)
    return x_HLd * cos_Ld + torch.cat((-second, first), dim=-1) * sin_Ld


class Attention(nn.Module):
    """Causal grouped-query attention with per-head norms of q and k."""

    def __init__(self, spec: TextSpec, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        tp.share(spec.kv_heads)  # whole groups of query heads stay with their key and value head
        self.q_proj = ColumnLinear(spec.hidden, spec.heads * spec.head_dim, tp, dtype)
        self.k_proj = ColumnLinear(spec.hidden, spec.kv_heads * spec.head_dim, tp, dtype)
        self.v_proj = ColumnLinear(spec.hidden, spec.kv_heads * spec.head_dim, tp, dtype)
        self.o_proj = RowLinear(spec.heads * spec.head_dim, spec.hidden, tp, dtype)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)

    def forward(self, x_LD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[L, D] -> [L, D]."""

        def heads(linear: ColumnLinear) -> Tensor:
            return linear(x_LD).unflatten(-1, (-1, self.head_dim))

        q_HLd = rotate(self.q_norm(heads(self.q_proj)).transpose(0, 1), *rope)
        k_GLd = rotate(self.k_norm(heads(self.k_proj)).transpose(0, 1), *rope)
        v_GLd = heads(self.v_proj).transpose(0, 1)
        # A causal flag in place of a mask tensor: that is what reaches the flash kernels, and what the oracle does for
        # an unpadded prompt. One token needs no mask.
        out_HLd = F.scaled_dot_product_attention(
            q_HLd[None],
            k_GLd[None],
            v_GLd[None],
            is_causal=x_LD.shape[0] > 1,
            scale=self.head_dim**-0.5,
            enable_gqa=q_HLd.shape[0] != k_GLd.shape[0],
        )[0]
        return self.o_proj(out_HLd.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, spec: TextSpec, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.gate_proj = ColumnLinear(spec.hidden, spec.intermediate, tp, dtype)
        self.up_proj = ColumnLinear(spec.hidden, spec.intermediate, tp, dtype)
        self.down_proj = RowLinear(spec.intermediate, spec.hidden, tp, dtype)

    def forward(self, x_LD: Tensor) -> Tensor:
        """[L, D] -> [L, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_LD)) * self.up_proj(x_LD))


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, spec: TextSpec, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.self_attn = Attention(spec, dtype, tp)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.mlp = MLP(spec, dtype, tp)

    def forward(self, x_LD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[L, D] -> [L, D]."""
        x_LD = x_LD + self.self_attn(self.input_layernorm(x_LD), rope)
        return x_LD + self.mlp(self.post_attention_layernorm(x_LD))


class LanguageModel(nn.Module):
    """Token embeddings and the layers that are run; holds names only, `TextEncoder` walks it."""

    def __init__(self, spec: TextSpec, dtype: torch.dtype, tp: Axis) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(spec, dtype, tp) for _ in range(spec.hidden_layer))


def vision_tower(vision: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """transformers' Qwen3-VL vision tower with parameters in `dtype`; `vision` is a checkpoint's `vision_config`."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    # The released block names the whole model's type here; the class names its own.
    config = Qwen3VLVisionConfig(**{name: value for name, value in vision.items() if name != "model_type"})
    config._attn_implementation = "sdpa"
    tower: nn.Module = Qwen3VLVisionModel(config)
    return tower.to(dtype)


class TextEncoder(nn.Module):
    """The conditioner: prompt tokens and vision patches in, the residual stream after `hidden_layer` layers out.

    Heads and feed-forward width of the decoder layers are dealt out over `tp`; embeddings and the vision tower are
    whole on every rank. ValueError: key and value heads that cannot be dealt out evenly.
    """

    def __init__(self, spec: TextSpec, dtype: torch.dtype, tp: Axis | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.language_model = LanguageModel(spec, dtype, tp or Axis("text"))
        self.visual = vision_tower(dict(spec.vision), dtype)
        self.init_buffers(self.language_model.embed_tokens.weight.device)

    def gathered_parts(self) -> list[nn.Module]:
        """What is called as a module of its own, innermost first: whoever spreads weights gathers one after another."""
        blocks: Any = self.visual.blocks
        return [*self.language_model.layers, self.language_model.embed_tokens, *blocks, self.visual]

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the tower's rotary frequencies on `device`; call it after a meta-built module got its weights.

        No checkpoint stores them, and casting the tower's weights also rounds them, so they are always made anew, in
        float32 and on the CPU first (SPEC 3.4), whatever the weights' dtype is.
        """
        config: Any = self.visual.config
        width = config.hidden_size // config.num_heads // 2  # each of h and w turns half of a head
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        inverse = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
        for name, _ in list(self.visual.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            assert owner == "rotary_pos_emb" and leaf in ("inv_freq", "original_inv_freq"), f"unknown buffer {name}"
            self.visual.get_submodule(owner).register_buffer(leaf, inverse.to(device, copy=True), persistent=False)

    def forward(self, ids_L: Tensor, types_L: Tensor, vision: Iterable[tuple[Tensor, Grid]] = ()) -> Tensor:
        """Encode one prompt: [L, D] in the weights' dtype, on their device (SPEC 3.5).

        `ids_L` and `types_L` are int64 (types: 0 text, 1 image pad, 2 video pad). `vision` gives float32 patches
        [P, C] and grid (t, h, w) of each image and video in prompt order; an image fills one run of pads, a video one
        run a temporal slice. It is read once, so that a generator holds one input's float32 patches at a time.
        """
        embed = self.language_model.embed_tokens
        device, dtype = embed.weight.device, embed.weight.dtype
        types_L = types_L.cpu()
        patches, merged = self._sort_vision(types_L, vision, device, dtype)
        rope = rope_tables(
            positions(types_L.tolist(), merged).to(device),
            self.spec.head_dim,
            self.spec.rope_theta,
            self.spec.mrope_section,
            dtype,
        )
        x_LD = embed(ids_L.to(device))
        pads_V, deepstack_VD = self._place_vision(x_LD, types_L.to(device), patches)
        for index, layer in enumerate(self.language_model.layers):
            x_LD = layer(x_LD, rope)
            if index < len(deepstack_VD):
                x_LD[pads_V] += deepstack_VD[index]
        return x_LD

    def _sort_vision(
        self, types_L: Tensor, vision: Iterable[tuple[Tensor, Grid]], device: torch.device, dtype: torch.dtype
    ) -> tuple[dict[int, list[tuple[Tensor, Grid]]], list[tuple[int, int]]]:
        """The inputs by token type, cast and moved; and every pad run's merged (height, width), in prompt order."""
        config: Any = self.visual.config
        merge: int = config.spatial_merge_size
        kinds = iter([kind for kind, _, _ in type_runs(types_L.tolist()) if kind != TEXT])
        members: dict[int, list[tuple[Tensor, Grid]]] = {IMAGE: [], VIDEO: []}
        merged: list[tuple[int, int]] = []
        for patches_PC, grid in vision:
            filled = {next(kinds, TEXT) for _ in range(grid[0])}
            assert len(filled) == 1 and TEXT not in filled, "an input fills pads of one type, a run a temporal slice"
            members[filled.pop()].append((patches_PC.to(device, dtype), grid))
            merged += [(grid[1] // merge, grid[2] // merge)] * grid[0]
        assert next(kinds, TEXT) == TEXT, "pads without a vision input"
        return members, merged

    def _place_vision(
        self, x_LD: Tensor, types_L: Tensor, members: dict[int, list[tuple[Tensor, Grid]]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Write the tower's output over the pads of `x_LD`; returns the pads' rows int64 [V] and deepstack [V, D]s."""
        pads_V = types_L.nonzero().flatten()
        levels: list[Tensor] = []
        # All images in one call and all videos in another, in prompt order: a product's bits depend on its row count,
        # and this is how the released pipeline batches them.
        for kind in (IMAGE, VIDEO):
            if not members[kind]:
                continue
            patches, grids = zip(*members.pop(kind), strict=True)
            grid_thw = torch.tensor(grids, dtype=torch.int64, device=x_LD.device)
            patches_PC = torch.cat(patches) if len(patches) > 1 else patches[0]
            seen = self.visual(patches_PC, grid_thw=grid_thw, return_dict=True)
            x_LD[types_L == kind] = seen.pooler_output
            if not levels:
                levels = [x_LD.new_empty(len(pads_V), x_LD.shape[1]) for _ in seen.deepstack_features]
            mine_V = types_L[pads_V] == kind
            for level_VD, features in zip(levels, seen.deepstack_features, strict=True):
                level_VD[mine_V] = features
        return pads_V, levels
