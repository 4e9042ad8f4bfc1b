"""The miniature's config files in both layouts, written from one `Spec` (SPEC 1.1, 1.2, 1.5-1.7)."""

from __future__ import annotations

from typing import Any

from ..spec import SAMPLE_RATE, Partition, Spec
from ..weights import config

Config = dict[str, Any]


def dit_config(spec: Spec, layout: str) -> Config:
    """The DiT's `config.json` in either layout."""
    version = "0.32.2" if layout == "original" else "0.36.0.dev0"
    return {"_diffusers_version": version, **config.dit_config(spec.dit, layout)}


def text_config(spec: Spec) -> Config:
    """The conditioner's `config.json`, the same in both layouts."""
    text = spec.text
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": text.image_token,
        "video_token_id": text.video_token,
        "vision_start_token_id": text.vision_start_token,
        "vision_end_token_id": text.vision_end_token,
        "tie_word_embeddings": text.tied_embeddings,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": text.dtype,
            "head_dim": text.head_dim,
            "hidden_act": "silu",
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": text.heads,
            "num_hidden_layers": text.layers,
            "num_key_value_heads": text.kv_heads,
            "rms_norm_eps": text.norm_eps,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": list(text.mrope_section),
                "rope_type": "default",
            },
            "rope_theta": text.rope_theta,
            "vocab_size": text.vocab,
        },
        "vision_config": {**text.vision, "initializer_range": 0.02, "model_type": "qwen3_vl"},
    }


def processor_configs(spec: Spec) -> dict[str, Config]:
    """File name -> config of the image and of the video processor."""
    processor = spec.processor
    shared = {
        "patch_size": processor.patch,
        "temporal_patch_size": processor.temporal_patch,
        "merge_size": processor.merge,
        "image_mean": list(processor.mean),
        "image_std": list(processor.std),
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "preprocessor_config.json": shared | {
            "size": {"longest_edge": processor.image_max_pixels, "shortest_edge": processor.image_min_pixels},
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": shared | {
            "size": {"longest_edge": processor.video_max_pixels, "shortest_edge": processor.video_min_pixels},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }  # fmt: skip


def video_configs(spec: Spec, layout: str) -> dict[str, Config]:
    """File name below the VAE's folder -> config."""
    video = spec.video
    statistics = {"latents_mean": list(video.mean), "latents_std": list(video.std)}
    if layout == "diffusers":
        return {
            "config.json": {
                "_class_name": "AutoencoderKLMiniMaxH3",
                "_diffusers_version": "0.36.0.dev0",
                "in_channels": 3,
                "out_channels": 3,
                "latent_channels": video.latent_channels,
                "block_out_channels": list(video.channels),
                "layers_per_block": video.resnets,
                "spatial_downsample_factors": list(video.space_down),
                "temporal_downsample_factors": list(video.time_down),
                "norm_num_groups": video.norm_groups,
                "norm_eps": video.norm_eps,
                "spatial_padding_mode": "reflect",
                "decoder_num_layers": video.decoder_layers,
                "decoder_num_attention_heads": video.decoder_heads,
                "decoder_attention_head_dim": video.decoder_head_dim,
                "decoder_num_register_tokens": video.decoder_registers,
                "decoder_ffn_mult": video.decoder_ffn_mult,
                "decoder_rope_theta": video.decoder_rope_theta,
                "decoder_rope_dim_ratio": video.decoder_rope_ratio,
                "decoder_norm_eps": video.decoder_norm_eps,
                "clip_length": video.clip,
                "token_drop": video.token_drop,
                **statistics,
            }
        }
    return _original_video(spec, statistics)


def _original_video(spec: Spec, statistics: Config) -> dict[str, Config]:
    video = spec.video
    outer = {
        "_class_name": "MiniMaxH3VideoVAE",
        "_diffusers_version": "0.32.2",
        "source_path": "source",
        "source_safetensors_path": "model.safetensors",
        "vae_clip_length": video.clip,
        "vae_token_drop": video.token_drop,
        "vae_tile_size": video.tile,
        "vae_tile_overlap_min": video.tile_overlap,
        "latent_channels": video.latent_channels,
        **statistics,
    }
    source = {
        "_class_name": "AutoencoderKLLegacy",
        "causal_decoder": False,
        "causal_encoder": True,
        "ch": video.channels[0],
        "ch_mult": [width // video.channels[0] for width in video.channels],
        "embed_dim": video.latent_channels,
        "z_channels": video.latent_channels,
        "in_channels": 3,
        "out_ch": 3,
        "num_res_blocks": video.resnets,
        "padding_mode": "reflect",
        "pixel_norm_type": "imagenet",
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "space_down": list(video.space_down),
        "time_down": list(video.time_down),
        "use_t_isolated_gn": True,
        "use_vit_decoder": True,
        "vit_decoder_kwargs": {
            "dim_head": video.decoder_head_dim,
            "heads": video.decoder_heads,
            "num_layers": video.decoder_layers,
            "ffn_activation_fn": "silu",
            "ffn_use_gated": True,
            "norm_affine": True,
            "norm_type": "rms_norm",
            "qk_norm_affine": False,
            "qk_norm_type": "rms_norm",
            "rope_dim_ratio": video.decoder_rope_ratio,
            "rope_theta": video.decoder_rope_theta,
        },
    }
    return {"config.json": outer, "source/config.json": source}


def audio_configs(spec: Spec, layout: str) -> dict[str, Config]:
    """File name below the audio VAE's folder -> config (`config.yaml` is left out: metadata.json has all of it)."""
    audio = spec.audio
    statistics = {"latents_mean": list(audio.mean), "latents_std": list(audio.std)}
    sizes = {
        "encoder_dim": audio.encoder_dim,
        "encoder_rates": list(audio.encoder_rates),
        "latent_dim": audio.latent_dim,
        "num_attention_heads": audio.attention_heads,
        "decoder_dim": audio.decoder_dim,
        "decoder_rates": list(audio.decoder_rates),
    }
    if layout == "diffusers":
        return {
            "config.json": {
                "_class_name": "AutoencoderKLMiniMaxH3Audio",
                "_diffusers_version": "0.36.0.dev0",
                **sizes,
                "latent_channels": audio.latent_channels,
                "decoder_kernel_sizes": list(audio.decoder_kernels),
                "resblock_kernel_sizes": list(audio.resblock_kernels),
                "resblock_dilation_sizes": [list(row) for row in audio.resblock_dilations],
                "sampling_rate": SAMPLE_RATE,
                **statistics,
            }
        }
    outer = {
        "_class_name": "MiniMaxH3AudioVAE",
        "_diffusers_version": "0.32.2",
        "output_channel": 2,
        "sample_rate": SAMPLE_RATE,
        "source_metadata_path": "metadata.json",
        "latent_channels": audio.latent_channels,
        **statistics,
    }
    kwargs = {**sizes, "attn_proj": True, "decoder_type": "bigvgan", "sample_rate": SAMPLE_RATE}
    kwargs |= {"vae_latent_channels": audio.latent_channels}
    return {"config.json": outer, "metadata.json": {"metadata": {"kwargs": kwargs}}}


def world_block(spec: Spec) -> Config:
    """The `_twinreel` block: what the released files leave to the documentation (see `weights.config`)."""
    world = spec.world
    return {
        "hidden_layer": spec.text.hidden_layer,
        "short_edge": world.short_edge,
        "area_cap": world.area_cap,
        "reference_edge": world.reference_edge,
        "min_seconds": world.min_seconds,
        "max_seconds": world.max_seconds,
        "min_clip_seconds": world.min_clip_seconds,
        "max_clip_seconds": world.max_clip_seconds,
    }


def partition_index(spec: Spec, partition: Partition) -> Config:
    """`model_index.json` of one original partition."""
    return {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.32.2",
        "text_encoder": ["transformers", "MiniMaxH3Qwen3VLHFEncoder"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "video_vae": ["diffusers", "MiniMaxH3VideoVAE"],
        "audio_vae": ["diffusers", "MiniMaxH3AudioVAE"],
        "scheduler": None,
        "transformer": ["diffusers", "MiniMaxH3DiTModel"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "_minimax_h3": {
            "schema_version": 1,
            "partition": partition.name,
            "tasks": list(partition.tasks),
            "task_aliases": {},
            "sigma_shift_scales": {"video": spec.world.shifts[0], "audio": spec.world.shifts[1]},
        },
        "_twinreel": world_block(spec),
    }


def diffusers_index(spec: Spec) -> Config:
    """`model_index.json` of a diffusers root."""
    return {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": "0.36.0.dev0",
        "_blocks_class_name": "MiniMaxH3Blocks",
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "vae": ["diffusers", "AutoencoderKLMiniMaxH3"],
        "audio_vae": ["diffusers", "AutoencoderKLMiniMaxH3Audio"],
        "transformer": ["diffusers", "MiniMaxH3Transformer3DModel"],
        "transformer_ref": ["diffusers", "MiniMaxH3Transformer3DModel"],
        "scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "audio_scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "_twinreel": world_block(spec),
    }
