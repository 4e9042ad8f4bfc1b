"""Sizes of the two VAEs from either layout's config files (SPEC 1.5-1.7)."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ..spec import SAMPLE_RATE, AudioVAESpec, VideoVAESpec
from .fields import MOST_ITEMS, Fields
from .files import read_text, shown, there
from .recognise import ORIGINAL, Component

WIDEST = 2**16  # of channels, factors and kernels
NARROWEST = 1e-6  # of a latent's deviation, by which is divided
# What the original config says of the encoder and of the decoder besides their sizes, and the one value of each that
# the model was trained with.
SOURCE: dict[str, Any] = {
    "padding_mode": "reflect",
    "padding_mode_t": None,
    "causal_encoder": True,
    "causal_decoder": False,
    "use_3d_conv": True,
    "use_t_isolated_gn": True,
    "use_vit_decoder": True,
    "zq_ch_encoder": None,
    "zq_ch_decoder": None,
    "pixel_norm_type": "imagenet",
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
    "in_channels": 3,
    "out_ch": 3,
}
DECODER: dict[str, Any] = {
    "ffn_activation_fn": "silu",
    "ffn_use_gated": True,
    "norm_type": "rms_norm",
    "qk_norm_type": "rms_norm",
    "qk_norm_affine": False,
    "norm_affine": True,
}
AUDIO_SIZES = (
    *("encoder_dim", "encoder_rates", "latent_dim", "num_attention_heads", "decoder_dim", "decoder_rates"),
    *("decoder_kernel_sizes", "resblock_kernel_sizes", "resblock_dilation_sizes"),
)


def video_spec(component: Component) -> VideoVAESpec:
    """The video VAE's sizes, tiling and latent statistics."""
    outer, default = Fields(component.config), VideoVAESpec()
    if component.layout == ORIGINAL:
        sizes = Fields(component.weights / "config.json")
        spec, inner = _original_video(outer, sizes), "ch_mult"
        sizes.fixed(vae_ratio=spec.space, vae_ratio_t=spec.time)
    else:
        spec, inner, sizes = _diffusers_video(outer), "block_out_channels", outer
    levels = {len(spec.channels), len(spec.space_down), len(spec.time_down)}
    sizes.need(
        len(levels) == 1,
        inner,
        f"{len(spec.channels)} levels, {len(spec.space_down)} spatial and {len(spec.time_down)} temporal factors",
    )
    for width in spec.channels:
        sizes.need(
            width % spec.norm_groups == 0, inner, f"{width} channels do not divide into {spec.norm_groups} groups"
        )
    rotated = int(spec.decoder_head_dim * spec.decoder_rope_ratio)
    name = "vit_decoder_kwargs.rope_dim_ratio" if component.layout == ORIGINAL else "decoder_rope_dim_ratio"
    sizes.need(
        rotated % 6 == 0 and 0 < rotated <= spec.decoder_head_dim,
        name,
        f"{rotated} rotated dims of {spec.decoder_head_dim} are no multiple of 6 above 0",
    )
    clip = "vae_clip_length" if component.layout == ORIGINAL else "clip_length"
    outer.need(
        (spec.clip, spec.token_drop, spec.time) == (default.clip, default.token_drop, default.time),
        clip,
        f"clips of 17 frames, 3 dropped, 4 frames a latent are needed, got {spec.clip}, {spec.token_drop}, {spec.time}",
    )
    tile = "vae_tile_size" if component.layout == ORIGINAL else "tile_size"
    outer.need(
        spec.tile % spec.space == 0 and spec.tile_overlap % spec.space == 0 and spec.tile_overlap < spec.tile,
        tile,
        f"tile {spec.tile} and overlap {spec.tile_overlap} must be multiples of {spec.space}, the overlap smaller",
    )
    return spec


def _original_video(outer: Fields, source: Fields) -> VideoVAESpec:
    default, vit = VideoVAESpec(), source.block("vit_decoder_kwargs")
    outer.fixed(source_class_name="AutoencoderKLLegacy", vae_encoder_tiling=1, vae_decoder_tiling=1, vae_chunk_dim=-1)
    source.fixed(_class_name="AutoencoderKLLegacy", **SOURCE)
    vit.known(*DECODER, "heads", "dim_head", "num_layers", "rope_theta", "rope_dim_ratio")
    vit.fixed(**DECODER)
    channels = outer.whole("latent_channels", default.latent_channels)
    for name in ("z_channels", "embed_dim"):
        source.need(
            source.whole(name, channels) == channels,
            name,
            f"{source.whole(name, channels)} contradicts latent_channels {channels} of {outer.path}",
        )
    base = source.whole("ch", 128, high=WIDEST)
    return VideoVAESpec(
        channels=tuple(base * factor for factor in source.wholes("ch_mult", (1, 2, 2, 4, 4, 8), high=WIDEST)),
        resnets=source.whole("num_res_blocks", default.resnets),
        space_down=source.wholes("space_down", default.space_down, high=2),
        time_down=source.wholes("time_down", default.time_down, high=2),
        latent_channels=channels,
        decoder_layers=vit.whole("num_layers", default.decoder_layers),
        decoder_heads=vit.whole("heads", default.decoder_heads),
        decoder_head_dim=vit.whole("dim_head", default.decoder_head_dim),
        decoder_rope_theta=vit.real("rope_theta", default.decoder_rope_theta),
        decoder_rope_ratio=vit.real("rope_dim_ratio", default.decoder_rope_ratio),
        clip=outer.whole("vae_clip_length", default.clip),
        token_drop=outer.whole("vae_token_drop", default.token_drop, low=0),
        tile=outer.whole("vae_tile_size", default.tile),
        tile_overlap=outer.whole("vae_tile_overlap_min", default.tile_overlap),
        mean=outer.reals("latents_mean", channels),
        std=outer.reals("latents_std", channels, NARROWEST),
        dtype=outer.dtype(source.dtype(default.dtype)),
    )


def _diffusers_video(fields: Fields) -> VideoVAESpec:
    default = VideoVAESpec()
    fields.fixed(spatial_padding_mode="reflect", in_channels=3, out_channels=3)
    channels = fields.whole("latent_channels", default.latent_channels)
    return VideoVAESpec(
        channels=fields.wholes("block_out_channels", default.channels),
        resnets=fields.whole("layers_per_block", default.resnets),
        space_down=fields.wholes("spatial_downsample_factors", default.space_down, high=2),
        time_down=fields.wholes("temporal_downsample_factors", default.time_down, high=2),
        latent_channels=channels,
        norm_groups=fields.whole("norm_num_groups", default.norm_groups),
        norm_eps=fields.real("norm_eps", default.norm_eps),
        decoder_layers=fields.whole("decoder_num_layers", default.decoder_layers),
        decoder_heads=fields.whole("decoder_num_attention_heads", default.decoder_heads),
        decoder_head_dim=fields.whole("decoder_attention_head_dim", default.decoder_head_dim),
        decoder_registers=fields.whole("decoder_num_register_tokens", default.decoder_registers),
        decoder_ffn_mult=fields.whole("decoder_ffn_mult", default.decoder_ffn_mult),
        decoder_rope_theta=fields.real("decoder_rope_theta", default.decoder_rope_theta),
        decoder_rope_ratio=fields.real("decoder_rope_dim_ratio", default.decoder_rope_ratio),
        decoder_norm_eps=fields.real("decoder_norm_eps", default.decoder_norm_eps),
        clip=fields.whole("clip_length", default.clip),
        token_drop=fields.whole("token_drop", default.token_drop, low=0),
        mean=fields.reals("latents_mean", channels),
        std=fields.reals("latents_std", channels, NARROWEST),
        dtype=fields.dtype(default.dtype),
    )


def audio_spec(component: Component) -> AudioVAESpec:
    """The audio VAE's sizes and latent statistics.

    The original layout keeps them in `metadata.json` (`metadata.kwargs`) and repeats some in `config.yaml`. What only
    the diffusers config names (attention heads, kernel sizes) may stand in those kwargs under the diffusers names.
    """
    outer, default = Fields(component.config), AudioVAESpec()
    if component.layout == ORIGINAL:
        sizes = Fields(component.folder / "metadata.json").block("metadata").block("kwargs")
        channels_name, rate_name = "vae_latent_channels", "sample_rate"
        sizes.known(*AUDIO_SIZES, channels_name, rate_name, "decoder_type", "attn_proj")
        sizes.fixed(decoder_type="bigvgan", attn_proj=True)
        outer.fixed(output_channel=2, sample_rate=SAMPLE_RATE)
        outer.fixed(source_metadata_path="metadata.json", source_config_path="config.yaml")
    else:
        sizes, channels_name, rate_name = outer, "latent_channels", "sampling_rate"
    channels = sizes.whole(channels_name, default.latent_channels)
    sizes.need(sizes.whole(rate_name, SAMPLE_RATE) == SAMPLE_RATE, rate_name, f"{SAMPLE_RATE} is needed")
    outer.need(
        outer.whole("latent_channels", channels) == channels,
        "latent_channels",
        f"contradicts {channels} of {sizes.path}",
    )
    spec = AudioVAESpec(
        encoder_dim=sizes.whole("encoder_dim", default.encoder_dim),
        encoder_rates=sizes.wholes("encoder_rates", default.encoder_rates),
        latent_dim=sizes.whole("latent_dim", default.latent_dim),
        latent_channels=channels,
        decoder_dim=sizes.whole("decoder_dim", default.decoder_dim),
        decoder_rates=sizes.wholes("decoder_rates", default.decoder_rates),
        decoder_kernels=sizes.wholes("decoder_kernel_sizes", default.decoder_kernels),
        attention_heads=sizes.whole("num_attention_heads", default.attention_heads),
        resblock_kernels=sizes.wholes("resblock_kernel_sizes", default.resblock_kernels, high=WIDEST),
        resblock_dilations=_dilations(sizes, default.resblock_dilations),
        mean=outer.reals("latents_mean", channels),
        std=outer.reals("latents_std", channels, NARROWEST),
        dtype=outer.dtype(default.dtype),
    )
    _check_audio(sizes, spec)
    if component.layout == ORIGINAL:
        _check_yaml(component.folder / "config.yaml", spec)
    return spec


def _dilations(fields: Fields, default: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    name = "resblock_dilation_sizes"
    value = fields.data.get(name, default)
    many = isinstance(value, list | tuple) and 1 <= len(value) <= MOST_ITEMS
    fields.need(many, name, f"a list of 1 to {MOST_ITEMS} lists is needed, got {shown(value)}")
    return tuple(Fields(fields.path, {name: row}, fields.prefix).wholes(name, (), high=WIDEST) for row in value)


def _check_audio(sizes: Fields, spec: AudioVAESpec) -> None:
    sizes.need(
        prod(spec.decoder_rates) == spec.hop,
        "decoder_rates",
        f"a product of {spec.hop} (encoder_rates) is needed, got {prod(spec.decoder_rates)}",
    )
    sizes.need(
        len(spec.decoder_kernels) == len(spec.decoder_rates),
        "decoder_kernel_sizes",
        f"{len(spec.decoder_rates)} are needed, one a decoder rate, got {len(spec.decoder_kernels)}",
    )
    for rate, kernel in zip(spec.decoder_rates, spec.decoder_kernels, strict=True):
        sizes.need(
            kernel >= rate and (kernel - rate) % 2 == 0,
            "decoder_kernel_sizes",
            f"a kernel of {kernel} does not multiply the length by its rate {rate}: rate + an even number is needed",
        )
    for kernel in spec.resblock_kernels:
        sizes.need(kernel % 2 == 1, "resblock_kernel_sizes", f"odd numbers are needed, got {kernel}")
    stages = 2 ** len(spec.decoder_rates)
    sizes.need(
        spec.decoder_dim % stages == 0,
        "decoder_dim",
        f"a multiple of {stages} is needed (halved at each stage), got {spec.decoder_dim}",
    )
    heads, pooled = spec.attention_heads, spec.latent_dim // spec.attention_heads
    sizes.need(spec.latent_dim % heads == 0, "latent_dim", f"{spec.latent_dim} does not divide into {heads} heads")
    sizes.need(
        pooled % spec.latent_channels == 0,
        "latent_dim",
        f"a head of {pooled} does not pool into {spec.latent_channels} latent channels",
    )
    sizes.need(
        len(spec.resblock_kernels) == len(spec.resblock_dilations),
        "resblock_dilation_sizes",
        f"{len(spec.resblock_kernels)} lists are needed, one a kernel",
    )


def _check_yaml(path: Path, spec: AudioVAESpec) -> None:
    """`config.yaml` repeats four sizes as lines `name: number`; one that contradicts the others is an error."""
    if not there(path):
        return
    sizes = {
        "sr": SAMPLE_RATE,
        "decoder_dim": spec.decoder_dim,
        "vae_latent_channels": spec.latent_channels,
        "audio_channel": 1,
    }
    for line in read_text(path).splitlines():
        name, _, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        if name in sizes:
            same = value == str(sizes[name])
            Fields(path, {}).need(same, name, f"{value[:60]} contradicts {sizes[name]}, the model's")
