"""The miniature's random values: one value per parameter, whatever layout it is stored in."""

from __future__ import annotations

import hashlib
from math import prod

import torch
from torch import Tensor

from ..models.audio_decoder import lowpass_filter
from ..spec import Spec
from ..weights.keymap import Stored, stored_tensors
from ..weights.stream import ROPE, cut, rope_frequencies


def tiny_tensors(component: str, layout: str, spec: Spec, seed: str = "") -> dict[str, Tensor]:
    """Every tensor of a component as `layout` stores it. The values depend on parameter name and `seed` alone, so both
    layouts hold the same model; the sizes keep activations near one and the waveform inside [-1, 1]."""
    return {name: _stored(row, spec, seed) for name, row in stored_tensors(component, layout, spec).items()}


def _stored(row: Stored, spec: Spec, seed: str) -> Tensor:
    name = row.parameter or row.name
    whole = cut(row, draw_value(name, row.target_shape, spec, seed))
    return whole.to(getattr(torch, row.dtype)).contiguous()


def draw_value(name: str, shape: tuple[int, ...], spec: Spec, seed: str) -> Tensor:
    """One whole parameter's float32 value, on the CPU."""
    leaf = name.rpartition(".")[2]
    if name == ROPE:
        return rope_frequencies(spec.dit)
    if leaf == "filter":
        return lowpass_filter().reshape(shape)
    if leaf in ("zero_k_bias", "mask_token"):
        return torch.zeros(shape)
    noise = _noise(f"{seed}/{name}", shape)
    if leaf == "weight_g":
        return _gain(name) * (1 + 0.05 * noise)
    if leaf in ("scale1", "scale2"):
        return 0.3 + 0.05 * noise
    if leaf == "alpha" and ".act." not in name or "norm" in name and leaf == "weight":
        return 1 + 0.1 * noise
    if len(shape) == 1:
        return 0.05 * noise
    if leaf in ("weight_v", "register_tokens") or "embed" in name and leaf == "weight" and len(shape) == 2:
        return 0.5 * noise
    return noise * _strength(name) / prod(shape[1:]) ** 0.5


def _gain(name: str) -> float:
    """Length of a weight-normalised filter: residual branches are weak, so that their sums do not grow with depth."""
    residual = ".convs2." in name or ".block.3." in name and name.count(".block.") > 1
    return 0.3 if residual or "conv_post" in name else 1.0


def _strength(name: str) -> float:
    if name.endswith("conv2.weight") or "final_layer" in name:
        return 0.3
    return 1.0 if name.startswith(("encoder.", "quant_conv", "post_quant_conv")) else 0.5


def _noise(name: str, shape: tuple[int, ...]) -> Tensor:
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator)
