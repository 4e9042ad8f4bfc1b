"""The bundled model's sizes and the numbers of its training: everything that retraining it needs to know.

A recipe is data. `RELEASE` is what was shipped, `SMOKE` runs the same program in seconds on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..spec import AudioVAESpec, DiTSpec, Partition, ProcessorSpec, Spec, TextSpec, VideoVAESpec, World
from .words import token_ids

PARTITION = Partition("demo", ("t2va", "fl2va", "ref2va"))


@dataclass(frozen=True)
class Pace:
    """One training run: rates, shares of the run, and when to look at it.

    `warmup` and `cooldown` are shares of the whole run; the rate falls linearly to `floor` of itself. A run that is
    resumed starts its moments anew and warms up again over `rewarm` steps.
    """

    batch: int
    rate: float
    warmup: float = 0.02
    cooldown: float = 0.35
    floor: float = 0.02
    rewarm: int = 40
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    ema: float = 0.999
    log_every: int = 50


@dataclass(frozen=True)
class VideoRecipe:
    """The video VAE. A canvas named more often is drawn more often. `emphasis` is the extra weight of coloured pixels
    and their outlines, `squares` and `edges` those of squared errors and of errors in differences, `kl` that of the
    latents' size. `scenes` a canvas, `kept` windows for the decoder's own run per mention of a canvas, `unseen` windows
    to check with."""

    pace: Pace = Pace(batch=24, rate=1e-3)
    decoder_pace: Pace = Pace(batch=64, rate=8e-4)
    canvases: tuple[tuple[int, int], ...] = ((224, 128), (224, 128), (224, 128), (128, 128), (128, 224))
    scenes: int = 2048
    kept: int = 3072
    unseen: int = 128
    emphasis: float = 4.0
    squares: float = 2.0
    edges: float = 0.5
    kl: float = 1e-3


@dataclass(frozen=True)
class AudioRecipe:
    """The audio VAE: stretches of `window` latents; the spectral loss has its full weight from `spectral_from` on."""

    pace: Pace = Pace(batch=64, rate=1.5e-3, warmup=0.03)
    window: int = 16
    scenes: int = 3072
    unseen: int = 512
    spectral: float = 0.3
    spectral_from: float = 0.2


@dataclass(frozen=True)
class DitRecipe:
    """The DiT with its conditioner. `late` is the share of draws pushed towards the clean end; a piece encodes `scenes`
    scenes of its own, `shelves` says of which (canvas, frames, share); `tasks` are names and shares."""

    pace: Pace = Pace(batch=80, rate=1.2e-3)
    late: float = 0.3
    scenes: int = 2560
    measured: int = 256
    unseen: int = 64
    shelves: tuple[tuple[tuple[int, int], int, float], ...] = (
        ((224, 128), 124, 0.6),
        ((128, 128), 124, 0.14),
        ((128, 224), 124, 0.1),
        ((224, 128), 107, 0.08),
        ((224, 128), 158, 0.08),
    )
    tasks: tuple[tuple[str, float], ...] = (
        ("t2va", 0.47),
        ("first", 0.13),
        ("last", 0.1),
        ("both", 0.06),
        ("image", 0.09),
        ("image+audio", 0.09),
        ("video", 0.06),
    )


@dataclass(frozen=True)
class Recipe:
    """Sizes and paces of the four parts."""

    spec: Spec
    video: VideoRecipe = field(default_factory=VideoRecipe)
    audio: AudioRecipe = field(default_factory=AudioRecipe)
    dit: DitRecipe = field(default_factory=DitRecipe)


def demo_spec() -> Spec:
    """The bundled model's sizes; latent statistics are filled in when the VAEs are trained."""
    ids = token_ids()
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0, 1],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "model_type": "qwen3_vl",
    }
    return Spec(
        dit=DiTSpec(
            hidden=192, layers=6, refiner_layers=1, heads=3, head_dim=64, ffn=416, text_dim=128, freq_dim=128,
            time_hidden=128, time_dim=16, rope_freqs=10,
        ),
        text=TextSpec(
            hidden=128, intermediate=256, layers=2, hidden_layer=2, heads=4, kv_heads=2, head_dim=32,
            vocab=-(-len(ids) // 64) * 64, mrope_section=(6, 5, 5), tied_embeddings=True, vision=vision,
            rope_theta=1e4, image_token=ids["<|image_pad|>"], video_token=ids["<|video_pad|>"],
            vision_start_token=ids["<|vision_start|>"], vision_end_token=ids["<|vision_end|>"],
        ),
        processor=ProcessorSpec(
            image_min_pixels=1024, image_max_pixels=32_768, video_min_pixels=1024, video_max_pixels=327_680
        ),
        video=VideoVAESpec(
            channels=(32, 32, 32, 64, 64, 128), resnets=1, decoder_layers=3, decoder_heads=4, decoder_head_dim=56,
            dtype="bfloat16",
        ),
        audio=AudioVAESpec(
            encoder_dim=8, encoder_rates=(5, 5, 4, 8), latent_dim=256, decoder_dim=128, decoder_rates=(8, 5, 5, 4),
            decoder_kernels=(16, 15, 15, 8), resblock_kernels=(3, 7), resblock_dilations=((1, 3), (1, 3)),
            dtype="bfloat16",
        ),
        world=World(short_edge=128, area_cap=128 * 224, reference_edge=128, min_seconds=4.0, max_seconds=6.0),
        partitions=(PARTITION,),
    )  # fmt: skip


def release() -> Recipe:
    """What was shipped."""
    return Recipe(demo_spec())


def smoke() -> Recipe:
    """The same program in seconds on a CPU: narrow, two scenes a batch."""
    spec = demo_spec()
    spec = replace(
        spec,
        dit=replace(spec.dit, hidden=64, layers=2, heads=1, ffn=64),
        video=replace(spec.video, channels=(32,) * 6, decoder_layers=1, decoder_heads=2, decoder_head_dim=32),
        audio=replace(spec.audio, encoder_dim=2, decoder_dim=32),
    )
    pace = Pace(2, 1e-3, log_every=1)
    return Recipe(
        spec,
        VideoRecipe(pace, pace, canvases=((64, 64),), scenes=4, kept=4, unseen=2),
        AudioRecipe(replace(pace, batch=4), window=8, scenes=4, unseen=4),
        DitRecipe(
            pace,
            scenes=2,
            measured=1,
            unseen=1,
            shelves=(((64, 64), 107, 1.0),),
            tasks=(("t2va", 0.4), ("both", 0.3), ("image+audio", 0.3)),
        ),
    )
