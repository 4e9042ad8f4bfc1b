"""The DiT weights of SPEC 13.7, and the two small DiTs that the tests run. Needs no diffusers."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from twinreel.models.dit import DiT
from twinreel.models.modulation import LiveModulation
from twinreel.ops import select
from twinreel.parallel import Parallel
from twinreel.spec import DiTSpec

# SPEC 13.7; and one in which no two sizes and no two epsilons agree and few sizes are powers of two.
TINY = DiTSpec(
    hidden=64, layers=2, heads=2, head_dim=32, ffn=128, text_dim=48, freq_dim=16, time_hidden=64, time_dim=32,
    rope_freqs=4,
)  # fmt: skip
ODD = DiTSpec(
    hidden=72, layers=3, refiner_layers=1, heads=3, head_dim=40, ffn=56, text_dim=20, freq_dim=10, time_hidden=28,
    time_dim=12, rope_freqs=5, rope_theta=500.0, norm_eps=1e-4, qk_norm_eps=1e-3, final_norm_eps=1e-2,
)  # fmt: skip

# Original name -> diffusers name (SPEC 1.3), apart from weights/keymap.py so that one can check the other.
RENAMES = (
    (r"^video_patch_proj\.", "proj_in."),
    (r"^audio_patch_proj\.", "audio_proj_in."),
    (r"^condition_proj\.", "context_embedder."),
    (r"^time_embedder\.proj_in\.", "time_embedder.linear_1."),
    (r"^time_embedder\.proj_out\.", "time_embedder.linear_2."),
    (r"^token_refiner\.blocks\.", "token_refiner.refiner_blocks."),
    (r"^blocks\.", "transformer_blocks."),
    (r"\.attn\.([qk])_norm\.", r".attn.norm_\1."),
    (r"\.attn\.out_proj\.", ".attn.to_out.0."),
    (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."),
    (r"^final_layer\.norm\.", "norm_out.norm."),
    (r"^final_layer\.adaln_proj\.linear\.", "norm_out.linear."),
    (r"^final_layer\.video_out\.", "proj_out."),
    (r"^final_layer\.audio_out\.", "audio_proj_out."),
)


def diffusers_name(original: str) -> str:
    """The diffusers spelling; `attn.qkv_proj` stays, because it has three."""
    for pattern, replacement in RENAMES:
        original = re.sub(pattern, replacement, original)
    return original


def build(spec: DiTSpec, dtype: torch.dtype) -> tuple[DiT, LiveModulation]:
    """Our DiT and its modulation in one process, plain ops, weights as PyTorch initialises them."""
    return DiT(spec, select(), Parallel.single(), dtype), LiveModulation(spec, dtype)


def diffusers_shapes(spec: DiTSpec) -> dict[str, torch.Size]:
    """Every parameter of the diffusers layout."""
    with torch.device("meta"):
        modules = build(spec, torch.float32)
    shapes = {}
    for original, tensor in (item for module in modules for item in module.state_dict().items()):
        name = diffusers_name(original)
        if "qkv_proj" in name:
            third = torch.Size((tensor.shape[0] // 3, tensor.shape[1]))
            shapes.update({name.replace("qkv_proj", f"to_{letter}"): third for letter in "qkv"})
        else:
            shapes[name] = tensor.shape
    return shapes


def golden_state(spec: DiTSpec) -> dict[str, Tensor]:
    """The weights of SPEC 13.7 by diffusers name, fp32, drawn in the order of the sorted names."""
    generator = torch.Generator().manual_seed(123)
    state = {}
    for name, shape in sorted(diffusers_shapes(spec).items()):
        noise = torch.randn(shape, generator=generator)
        if noise.ndim > 1:
            state[name] = noise * 0.5 / noise.shape[-1] ** 0.5
        elif "norm" in name and name.endswith("weight"):
            state[name] = 1 + 0.1 * noise
        else:
            state[name] = 0.05 * noise
    return state


def golden_weights(spec: DiTSpec) -> dict[str, Tensor]:
    """The weights of SPEC 13.7 by original name: every parameter of `DiT` and of `LiveModulation`, fp32, own memory."""
    state = golden_state(spec)
    with torch.device("meta"):
        modules = build(spec, torch.float32)
    weights = {}
    for original in (name for module in modules for name in module.state_dict()):
        name = diffusers_name(original)
        if "qkv_proj" in name:  # per head: the query rows, the key rows, the value rows
            thirds = [state[name.replace("qkv_proj", f"to_{x}")].unflatten(0, (spec.heads, -1)) for x in "qkv"]
            weights[original] = torch.stack(thirds, dim=1).flatten(0, 2)
        elif ".ff.net.0." in name:  # [value; gate] there, [gate; value] here
            weights[original] = torch.cat(state[name].chunk(2)[::-1])
        else:
            weights[original] = state[name].clone()
    return weights


def golden_pair(spec: DiTSpec, dtype: torch.dtype) -> tuple[DiT, LiveModulation]:
    """Our DiT and its modulation with `golden_weights`: blocks rounded to `dtype`, the islands in fp32."""
    weights = golden_weights(spec)
    modules = build(spec, dtype)
    for module in modules:
        module.load_state_dict({name: weights.pop(name) for name in module.state_dict()})
    assert not weights
    return modules
