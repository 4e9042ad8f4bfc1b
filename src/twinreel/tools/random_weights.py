"""Random weights of a whole model, `Weights` without files: any bench, and an engine, can run on them.

A value depends on the parameter's name, shape and dtype and on the kind of device alone, so that one model is drawn
again wherever it is asked for: resident, layer by layer, a rank's share of it, or under another program's names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..demo.recipe import demo_spec
from ..demo.tiny import tiny_spec
from ..demo.tiny_weights import draw_value
from ..limits import apart
from ..machine import host_memory
from ..models.modulation import LiveModulation
from ..models.modulation_tables import PrecomputedModulation
from ..models.streamed import Hosted, take_turns
from ..ops.e4m3 import E4M3
from ..parallel import Parallel
from ..spec import AudioVAESpec, Spec, VideoVAESpec
from ..weights.keymap import LAYERS, SCALE
from ..weights.stored import ReadLayer
from ..weights.stream import Prefixes, assign, finish, narrow, share_of

# Of the released conditioner; text alone passes here, but its weights count.
VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 5120,
    "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
NO_VISION = {"depth": 0, "deepstack_visual_indexes": [], "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
WORDS = 200  # token ids that prompts are made of
VAE = TypeVar("VAE", VideoVAESpec, AudioVAESpec)
Draw = Callable[[str, tuple[int, ...], torch.device, torch.dtype], Tensor]


def shape_spec(shape: str, layers: int | None = None) -> Spec:
    """The sizes called `released`, `bundled` (the model in this package), `tiny` (the smallest that run the whole
    program) or `wide` (those with heads for eight ranks); `layers` blocks."""
    if shape in ("tiny", "wide"):
        spec = tiny_spec()
    else:
        spec = demo_spec() if shape == "bundled" else Spec()
        video, audio = _unit_statistics(spec.video), _unit_statistics(spec.audio)
        vision = VISION if shape == "released" else spec.text.vision
        spec = replace(spec, text=replace(spec.text, vision=vision), video=video, audio=audio)
    if shape == "wide":
        spec = replace(
            spec,
            dit=replace(spec.dit, heads=56, head_dim=8, ffn=112, rope_freqs=1),
            text=replace(spec.text, heads=16, kv_heads=8, intermediate=96),
        )
    return spec if layers is None else replace(spec, dit=replace(spec.dit, layers=layers))


def _unit_statistics(vae: VAE) -> VAE:
    """The spec with latents of mean 0 and deviation 1, which a checkpoint's configs say otherwise."""
    return replace(vae, mean=(0.0,) * vae.latent_channels, std=(1.0,) * vae.latent_channels)


def random_tensor(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values that keep a forward's variance, the same for the same name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    if name.endswith("norm.weight") or ".norm" in name and len(shape) == 1:
        return drawn.mul_(0.1).add_(1)
    return drawn.mul_(prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.02)


def _drawn(name: str, like: Tensor, shape: tuple[int, ...], device: torch.device, draw: Draw) -> dict[str, Tensor]:
    """A whole parameter in the dtype of `like`, by what its name goes on with: one in e4m3 has scales."""
    if like.dtype == E4M3:
        return narrow("", draw(name, shape, device, torch.bfloat16))
    return {"": draw(name, shape, device, like.dtype)}


def fill(module: nn.Module, device: torch.device, apart: Prefixes = (), draw: Draw = random_tensor) -> nn.Module:
    """A module from the meta device, filled and made ready as `load_into` does it: a rank's share where it has one,
    in the dtypes it was built with. Parameters whose names begin with `apart` have their memory already. Raises
    MemoryError: see `check_room`."""
    check_room(weights_of(module, apart), device)
    given = module.state_dict(keep_vars=True)
    for name, meta in given.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        comes_along = leaf.endswith(SCALE) and hasattr(owner, leaf.removesuffix(SCALE))
        if comes_along or name.startswith(apart):
            continue
        shape = tuple(meta.shape)
        if leaf == "weight" and hasattr(owner, "shard"):
            shape = _whole(owner, shape)
        for more, tensor in _drawn(name, meta, shape, device, draw).items():
            assign(owner, leaf + more, share_of(owner, leaf + more, tensor))
    finish(module, device)
    return module


def weights_of(module: nn.Module, apart: Prefixes = ()) -> int:
    """Bytes that `fill` draws."""
    given = module.state_dict(keep_vars=True)
    return sum(x.nbytes for name, x in given.items() if not name.startswith(apart))


def check_room(need: int, device: torch.device, what: str = "weights") -> None:
    """Raise MemoryError for `need` bytes of weights on a CPU whose host has less free: the kernel would end the process
    that fills them. A CUDA device refuses by itself. `what`: other things than weights."""
    there = host_memory() if device.type == "cpu" else None
    if there is not None and need > there.free:
        needed, free = apart(need, there.free, 2**30, digits=1)
        raise MemoryError(f"{needed} GiB of {what}, and {free} GiB of host memory are free")


def _whole(owner: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that `owner` is one rank's share of: one dim is larger by the size of its axis."""
    ranks = owner.axis.size
    for dim in range(len(shape)):
        whole = tuple(size * ranks if i == dim else size for i, size in enumerate(shape))
        if owner.shard(torch.empty(whole, device="meta")).shape == torch.Size(shape):
            return whole
    raise AssertionError(f"{owner}: no whole for {shape}")


class RandomWeights:
    """`Weights` of the sizes of `spec`, drawn on `device`. Every word of a prompt is a token."""

    path = layout = "random"
    notes: tuple[str, ...] = ()

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device = spec, device

    def load(self, module: nn.Module, part: str, device: torch.device, apart: Prefixes = ()) -> nn.Module:
        """See `Weights`."""
        return fill(module, device, apart, self._sound if part.startswith("audio") else random_tensor)

    def _sound(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """The miniature's recipe, under which samples stay inside their range: other values make a file at fault."""
        return draw_value(name, shape, self.spec, "").to(device, dtype)

    def stream(self, part: str, prefix: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `Weights`; of modulations alone, which nothing else asks for."""
        assert part.startswith("modulation"), part
        with torch.device("meta"):
            live = LiveModulation(self.spec.dit, dtype)
        for name, meta in live.named_parameters():
            if name.startswith(prefix):
                yield name, random_tensor(name, tuple(meta.shape), device, meta.dtype)

    def layers(self, part: str) -> ReadLayer:
        """See `Weights`."""
        prefix = LAYERS[part.partition(":")[0]]

        def read(index: int, tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
                    continue
                made = _drawn(f"{prefix}{index}.{name}", tensor, tuple(tensor.shape), self.device, random_tensor)
                for more, value in made.items():
                    tensors[name + more].copy_(value)

        return read

    def version(self, part: str) -> str:
        """See `Weights`."""
        return "random"

    def check(self, parts: Sequence[str]) -> None:
        """See `Weights`: there is nothing to look at."""

    def tokenizer(self) -> RandomWeights:
        """See `Weights`."""
        return self

    def encode(self, text: str) -> list[int]:
        """A token a word."""
        return [zlib.crc32(word.encode()) % min(WORDS, self.spec.text.vocab) for word in text.split()]

    def by_layers(self, module: nn.Module, part: str) -> nn.Module:
        """A `part` from the meta device, filled, with its layers in host memory."""
        take_turns(module, LAYERS[part], lambda shelves: Hosted(shelves, self.layers(part), self.device), self.device)
        return self.load(module, part, self.device, LAYERS[part])

    def tables(self, dtype: torch.dtype, parallel: Parallel | None = None) -> PrecomputedModulation:
        """AdaLN's tables, made over all ranks from projections that never lie in memory together."""
        source = partial(self.stream, "modulation", device=self.device, dtype=dtype)
        return PrecomputedModulation(
            self.spec.dit, dtype, self.device, source, partial(self.version, "modulation"), parallel=parallel
        )
