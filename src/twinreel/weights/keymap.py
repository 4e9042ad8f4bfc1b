"""The stored tensors of every component in both layouts, from the sizes alone (SPEC 1.3-1.6).

Each row says name, shape and dtype in the file, and which parameter of which module it fills. Our parameter names are
the original layout's, so that layout maps onto itself; in the diffusers layout query, key and value are stored apart
and the halves of the gated feed-forward are swapped, hence the placements. Legend: D hidden, H heads, d head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ..errors import CheckpointError
from ..spec import AudioVAESpec, DiTSpec, Spec, TextSpec, VideoVAESpec

# Which component (folder) a module's weights come from.
MODULES = {
    "dit": "transformer",
    "modulation": "transformer",
    "text_encoder": "text_encoder",
    "video_encoder": "video_vae",
    "video_decoder": "video_vae",
    "audio_encoder": "audio_vae",
    "audio_decoder": "audio_vae",
}
COMPONENTS = ("transformer", "text_encoder", "video_vae", "audio_vae")
# What begins the names of parameters that belong to layers run one after the other, by module.
LAYERS = {"dit": "blocks.", "modulation": "blocks.", "text_encoder": "language_model.layers."}
Shape = tuple[int, ...]
Pairs = list[tuple[str, Shape]]
WHOLE, QUERY, KEY, VALUE, SWAPPED = "whole", "query", "key", "value", "swapped"
# Linears of the trunk that a quantized checkpoint holds in e4m3, each with fp32 scales of its rows in a tensor beside it.
FP8_LINEARS = ("attn.qkv_proj.weight", "attn.out_proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
E4M3, SCALE, NARROW_ROWS = "float8_e4m3fn", "_scale", 4096  # rows quantized at a time: their fp32 copies stay small
SLOT = {QUERY: 0, KEY: 1, VALUE: 2}  # place inside one head's group of 3 x d rows


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `module` None means known and checked, never loaded.

    `placement`: `whole`; `query`, `key`, `value` fill that third of each of `heads` groups of rows of the parameter
    [(H, 3, d), ...]; `swapped` fills the parameter with the two halves of its rows exchanged. `island` parameters stay
    float32 whatever dtype is asked for. `optional` tensors may be absent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    module: str | None
    parameter: str
    placement: str = WHOLE
    heads: int = 1
    island: bool = False
    optional: bool = False

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the parameter it goes into."""
        return (3 * self.shape[0], *self.shape[1:]) if self.placement in SLOT else self.shape


def stored_tensors(component: str, layout: str, spec: Spec) -> dict[str, Stored]:
    """Every tensor that `component` ("transformer", "text_encoder", "video_vae", "audio_vae") stores, by file name.

    `layout` is "original" or "diffusers"; the conditioner and the audio VAE are the same in both.
    """
    rows: Iterator[Stored]
    if component == "transformer":
        rows = _dit(spec.dit)
    elif component == "text_encoder":
        rows = _text(spec.text)
    elif component == "video_vae":
        rows = _video(spec.video)
    elif component == "audio_vae":
        rows = _audio(spec.audio)
    else:
        raise KeyError(f"{component!r} is none of {', '.join(COMPONENTS)}")
    if layout == "diffusers" and component in DIFFUSERS:
        rename, heads = DIFFUSERS[component](spec)
        rows = (new for row in rows for new in _split(row, rename, heads))
    return {row.name: row for row in rows}


def canonical(component: str, name: str) -> str:
    """The released spelling of a stored name: torch's weight-norm parametrisation becomes `weight_g`, `weight_v`."""
    if component != "audio_vae":
        return name
    name = name.replace(".parametrizations.weight.original0", ".weight_g")
    return name.replace(".parametrizations.weight.original1", ".weight_v")


def canonical_names(component: str, names: Mapping[str, object], where: object) -> dict[str, str]:
    """File name -> released name. CheckpointError when a file holds both spellings of one tensor."""
    result = {name: canonical(component, name) for name in names}
    if len(set(result.values())) != len(result):
        raise CheckpointError(
            f"{where}: holds both weight-norm spellings (weight_g and parametrizations.weight) of a tensor"
        )
    return result


def total_bytes(rows: Mapping[str, Stored]) -> int:
    """Bytes of all stored tensors (what `metadata.total_size` of an index says)."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2, E4M3: 1}
    return sum(prod(row.shape) * size[row.dtype] for row in rows.values())


def _affine(name: str, *shape: int) -> Pairs:
    return [(f"{name}.weight", shape), (f"{name}.bias", (shape[0],))]


# ---- DiT ------------------------------------------------------------------------------------------------------------


def _dit(spec: DiTSpec) -> Iterator[Stored]:
    D = spec.hidden

    def rows(module: str, pairs: Pairs, island: bool = False) -> Iterator[Stored]:
        for name, shape in pairs:
            yield Stored(name, shape, "float32" if island else spec.dtype, module, name, island=island)

    yield from rows("dit", _affine("video_patch_proj", D, spec.video_row), island=True)
    yield from rows("dit", _affine("audio_patch_proj", D, spec.audio_channels), island=True)
    yield from rows("dit", _affine("condition_proj", D, spec.text_dim))
    yield from rows("modulation", _affine("time_embedder.proj_in", spec.time_hidden, spec.freq_dim), island=True)
    yield from rows("modulation", _affine("time_embedder.proj_out", spec.time_dim, spec.time_hidden), island=True)
    for index in range(spec.refiner_layers):
        yield from rows("dit", _dit_block(f"token_refiner.blocks.{index}", spec))
    yield from rows("dit", [("token_refiner.final_norm.weight", (D,))])
    for index in range(spec.layers):
        for row in rows("dit", _dit_block(f"blocks.{index}", spec)):
            yield from _narrow(row) if index in spec.fp8_blocks else [row]
        yield from rows("modulation", _affine(f"blocks.{index}.adaln_proj.linear", 18 * D, spec.time_dim))
    yield from rows("dit", [("final_layer.norm.weight", (D,))])
    yield from rows("modulation", _affine("final_layer.adaln_proj.linear", 2 * D, spec.time_dim))
    yield from rows("dit", _affine("final_layer.video_out", spec.video_row, D), island=True)
    yield from rows("dit", _affine("final_layer.audio_out", spec.audio_channels, D), island=True)
    yield Stored("rope.inv_freq", (spec.rope_freqs,), "float32", None, "")


def _dit_block(prefix: str, spec: DiTSpec) -> Pairs:
    D, inner, d = spec.hidden, spec.inner, spec.head_dim
    return [
        (f"{prefix}.norm1.weight", (D,)),
        (f"{prefix}.norm2.weight", (D,)),
        (f"{prefix}.attn.qkv_proj.weight", (3 * inner, D)),
        (f"{prefix}.attn.q_norm.weight", (d,)),
        (f"{prefix}.attn.k_norm.weight", (d,)),
        (f"{prefix}.attn.out_proj.weight", (D, inner)),
        (f"{prefix}.mlp.fc1.weight", (2 * spec.ffn, D)),
        (f"{prefix}.mlp.fc2.weight", (D, spec.ffn)),
    ]


def _narrow(row: Stored) -> list[Stored]:
    """A block's linear in e4m3 and the scales of its rows; other tensors as they are."""
    name, shape = row.name + SCALE, (row.shape[0], 1)
    scale = replace(row, name=name, parameter=name, shape=shape, dtype="float32", island=True)
    return [replace(row, dtype=E4M3), scale] if row.parameter.endswith(FP8_LINEARS) else [row]


# ---- conditioner ----------------------------------------------------------------------------------------------------


def _text(spec: TextSpec) -> Iterator[Stored]:
    def row(name: str, shape: tuple[int, ...], used: bool = True, optional: bool = False) -> Stored:
        module = "text_encoder" if used else None
        return Stored(name, shape, spec.dtype, module, name.removeprefix("model.") if used else "", optional=optional)

    D, d = spec.hidden, spec.head_dim
    yield row("lm_head.weight", (spec.vocab, D), used=False, optional=spec.tied_embeddings)
    yield row("model.language_model.embed_tokens.weight", (spec.vocab, D))
    for index in range(spec.layers):
        prefix, used = f"model.language_model.layers.{index}", index < spec.hidden_layer
        layer: Pairs = [
            ("input_layernorm", (D,)),
            ("post_attention_layernorm", (D,)),
            ("self_attn.q_proj", (spec.heads * d, D)),
            ("self_attn.k_proj", (spec.kv_heads * d, D)),
            ("self_attn.v_proj", (spec.kv_heads * d, D)),
            ("self_attn.o_proj", (D, spec.heads * d)),
            ("self_attn.q_norm", (d,)),
            ("self_attn.k_norm", (d,)),
            ("mlp.gate_proj", (spec.intermediate, D)),
            ("mlp.up_proj", (spec.intermediate, D)),
            ("mlp.down_proj", (D, spec.intermediate)),
        ]
        for name, shape in layer:
            yield row(f"{prefix}.{name}.weight", shape, used)
    yield row("model.language_model.norm.weight", (D,), used=False)
    for name, shape in _vision(spec):
        yield row(f"model.visual.{name}", shape)


def _vision(spec: TextSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision = spec.vision
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    yield from _affine("patch_embed.proj", width, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield "pos_embed.weight", (vision["num_position_embeddings"], width)
    for index in range(vision["depth"]):
        for name, shape in (
            ("norm1", (width,)),
            ("norm2", (width,)),
            ("attn.qkv", (3 * width, width)),
            ("attn.proj", (width, width)),
            ("mlp.linear_fc1", (inner, width)),
            ("mlp.linear_fc2", (width, inner)),
        ):
            yield from _affine(f"blocks.{index}.{name}", *shape)
    # The last merger normalises each patch, the deepstack mergers normalise the merged four.
    mergers = [("merger", width)]
    mergers += [(f"deepstack_merger_list.{k}", merged) for k in range(len(vision["deepstack_visual_indexes"]))]
    for name, norm in mergers:
        yield from _affine(f"{name}.norm", norm)
        yield from _affine(f"{name}.linear_fc1", merged, merged)
        yield from _affine(f"{name}.linear_fc2", spec.hidden, merged)


# ---- video VAE ------------------------------------------------------------------------------------------------------


def _video(spec: VideoVAESpec) -> Iterator[Stored]:
    def rows(module: str, pairs: Pairs) -> Iterator[Stored]:
        for name, shape in pairs:
            yield Stored(name, shape, spec.dtype, module, name, island=True)

    z = spec.latent_channels
    yield from rows("video_encoder", _video_encoder(spec))
    yield from rows("video_encoder", _affine("quant_conv", 2 * z, 2 * z, 1, 1, 1))
    yield from rows("video_decoder", _affine("post_quant_conv", z, z, 1, 1, 1))
    width = spec.decoder_heads * spec.decoder_head_dim
    inner = spec.decoder_ffn_mult * width
    yield from rows("video_decoder", _affine("decoder.x_embedder", width, z))
    yield from rows("video_decoder", [("decoder.register_tokens", (1, spec.decoder_registers, width))])
    yield Stored("decoder.mask_token", (1, 1, width), spec.dtype, None, "")
    for index in range(spec.decoder_layers):
        prefix = f"decoder.transformer_blocks.{index}"
        names = ("scale1", "scale2", "norm1.weight", "norm2.weight")
        yield from rows("video_decoder", [(f"{prefix}.{name}", (width,)) for name in names])
        yield from rows("video_decoder", _affine(f"{prefix}.attn.to_qkv", 3 * width, width))
        yield from rows("video_decoder", _affine(f"{prefix}.attn.to_out", width, width))
        yield from rows("video_decoder", _affine(f"{prefix}.ff.w1", 2 * inner, width))
        yield from rows("video_decoder", _affine(f"{prefix}.ff.w2", width, inner))
    yield from rows("video_decoder", _affine("decoder.norm_out", width))
    yield from rows("video_decoder", _affine("decoder.proj_out", 3 * spec.time * spec.space**2, width))


def _video_encoder(spec: VideoVAESpec) -> Pairs:
    pairs = _affine("encoder.conv_in", spec.channels[0], 3, 3, 3, 3)
    previous = spec.channels[0]
    for level, channels in enumerate(spec.channels):
        for index in range(spec.resnets):
            prefix, width = f"encoder.down.{level}.block.{index}", previous if index == 0 else channels
            pairs += _affine(f"{prefix}.norm1", width) + _affine(f"{prefix}.conv1", channels, width, 3, 3, 3)
            pairs += _affine(f"{prefix}.norm2", channels) + _affine(f"{prefix}.conv2", channels, channels, 3, 3, 3)
            if width != channels:
                pairs += _affine(f"{prefix}.nin_shortcut", channels, width, 1, 1, 1)
        if spec.space_down[level] * spec.time_down[level] > 1:
            pairs += _affine(f"encoder.down.{level}.downsample.conv", channels, channels, 3, 3, 3)
        previous = channels
    return (
        pairs
        + _affine("encoder.norm_out", previous)
        + _affine("encoder.conv_out", 2 * spec.latent_channels, previous, 3, 3, 3)
    )


# ---- audio VAE ------------------------------------------------------------------------------------------------------


def _audio(spec: AudioVAESpec) -> Iterator[Stored]:
    def rows(module: str | None, pairs: Pairs) -> Iterator[Stored]:
        for name, shape in pairs:
            yield Stored(name, shape, spec.dtype, module, name if module else "", island=True)

    latent, z = spec.latent_dim, spec.latent_channels
    yield from rows("audio_encoder", _audio_encoder(spec))
    yield from rows("audio_encoder", _audio_pre_block(latent, z))
    yield from rows("audio_encoder", _affine("mean_proj", z, z, 1))
    yield from rows(None, _affine("logs_proj", z, z, 1))
    yield from rows("audio_decoder", _affine("dec_in_proj", latent, z, 1))
    yield from rows("audio_decoder", _audio_decoder(spec))


def _normed(name: str, bias: int, *shape: int) -> Pairs:
    """A weight-normalised convolution: the gain has one value per index of the first axis."""
    pairs: Pairs = [(f"{name}.weight_g", (shape[0], 1, 1)), (f"{name}.weight_v", shape)]
    return pairs + ([(f"{name}.bias", (bias,))] if bias else [])


def _audio_encoder(spec: AudioVAESpec) -> Pairs:
    width = spec.encoder_dim
    pairs = _normed("encoder.block.0", width, width, 1, 7)
    for stage, rate in enumerate(spec.encoder_rates, start=1):
        prefix = f"encoder.block.{stage}.block"
        for unit in range(3):
            pairs += [(f"{prefix}.{unit}.block.0.alpha", (1, width, 1))]
            pairs += _normed(f"{prefix}.{unit}.block.1", width, width, width, 7)
            pairs += [(f"{prefix}.{unit}.block.2.alpha", (1, width, 1))]
            pairs += _normed(f"{prefix}.{unit}.block.3", width, width, width, 1)
        pairs += [(f"{prefix}.3.alpha", (1, width, 1))]
        pairs += _normed(f"{prefix}.4", 2 * width, 2 * width, width, 2 * rate)
        width *= 2
    last = len(spec.encoder_rates) + 1
    return [*pairs, (f"encoder.block.{last}.alpha", (1, width, 1))] + _normed(
        f"encoder.block.{last + 1}", spec.latent_dim, spec.latent_dim, width, 3
    )


def _audio_pre_block(latent: int, z: int) -> Pairs:
    pairs = _affine("pre_block.norm1", latent) + _affine("pre_block.norm3", latent)
    pairs += _affine("pre_block.norm2", z) + _affine("pre_block.mlp.norm", z)
    pairs += [("pre_block.attn.qkv.weight", (3 * latent, latent))]
    pairs += [(f"pre_block.attn.{name}", (latent,)) for name in ("q_bias", "v_bias", "zero_k_bias")]
    pairs += _affine("pre_block.attn.proj", z, z) + _affine("pre_block.proj", z, latent)
    return (
        pairs
        + _affine("pre_block.mlp.w0", 2 * z, z)
        + _affine("pre_block.mlp.w1", 2 * z, z)
        + _affine("pre_block.mlp.w2", z, 2 * z)
    )


def _audio_decoder(spec: AudioVAESpec) -> Pairs:
    width = spec.decoder_dim
    pairs = _normed("decoder.conv_pre", width, width, spec.latent_dim, 7)
    for stage, kernel in enumerate(spec.decoder_kernels):
        pairs += _normed(f"decoder.ups.{stage}.0", width // 2, width, width // 2, kernel)
        width //= 2
        for offset, (size, dilations) in enumerate(zip(spec.resblock_kernels, spec.resblock_dilations, strict=True)):
            prefix = f"decoder.resblocks.{stage * len(spec.resblock_kernels) + offset}"
            for index in range(len(dilations)):
                pairs += _normed(f"{prefix}.convs1.{index}", width, width, width, size)
                pairs += _normed(f"{prefix}.convs2.{index}", width, width, width, size)
            for index in range(2 * len(dilations)):
                pairs += _activation(f"{prefix}.activations.{index}", width)
    return pairs + _activation("decoder.activation_post", width) + _normed("decoder.conv_post", 0, 1, width, 7)


def _activation(name: str, width: int) -> Pairs:
    filters: Pairs = [(f"{name}.{part}.filter", (1, 1, 12)) for part in ("upsample", "downsample.lowpass")]
    return [(f"{name}.act.alpha", (width,)), (f"{name}.act.beta", (width,)), *filters]


# ---- the diffusers spelling -----------------------------------------------------------------------------------------

Renames = tuple[tuple[str, str], ...]

DIT_RENAMES: Renames = (
    (r"^video_patch_proj\.", "proj_in."),
    (r"^audio_patch_proj\.", "audio_proj_in."),
    (r"^condition_proj\.", "context_embedder."),
    (r"^time_embedder\.proj_in\.", "time_embedder.linear_1."),
    (r"^time_embedder\.proj_out\.", "time_embedder.linear_2."),
    (r"^token_refiner\.blocks\.", "token_refiner.refiner_blocks."),
    (r"^blocks\.", "transformer_blocks."),
    (r"\.attn\.([qk])_norm\.", r".attn.norm_\1."),
    (r"\.attn\.out_proj\.", ".attn.to_out.0."),
    (r"\.attn\.qkv_proj\.", ".attn.to_qkv."),
    (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."),
    (r"^final_layer\.norm\.", "norm_out.norm."),
    (r"^final_layer\.adaln_proj\.linear\.", "norm_out.linear."),
    (r"^final_layer\.video_out\.", "proj_out."),
    (r"^final_layer\.audio_out\.", "audio_proj_out."),
)
VIDEO_RENAMES: Renames = (
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^decoder\.x_embedder\.", "decoder.proj_in."),
    (r"\.attn\.to_out\.", ".attn.to_out.0."),
    (r"\.ff\.w1\.", ".ff.net.0.proj."),
    (r"\.ff\.w2\.", ".ff.net.2."),
)
DIFFUSERS: Mapping[str, Callable[[Spec], tuple[Renames, int]]] = {
    "transformer": lambda spec: (DIT_RENAMES, spec.dit.heads),
    "video_vae": lambda spec: (VIDEO_RENAMES, spec.video.decoder_heads),
}


def _split(row: Stored, renames: Renames, heads: int) -> Iterator[Stored]:
    """The diffusers tensors that hold what one original tensor holds; the unused ones have none there."""
    if row.module is None:
        return
    name = row.name
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    if ".attn.to_qkv." in name:
        shape = (row.shape[0] // 3, *row.shape[1:])
        for placement, letter in ((QUERY, "q"), (KEY, "k"), (VALUE, "v")):
            yield replace(
                row, name=name.replace("to_qkv", f"to_{letter}"), shape=shape, placement=placement, heads=heads
            )
    else:
        yield replace(row, name=name, placement=SWAPPED if ".ff.net.0.proj." in name else WHOLE)
