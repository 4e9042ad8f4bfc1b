"""The sizes of one checkpoint: frozen dataclasses whose defaults are the released H3 model's values.

Nothing here imports torch. `weights.config` fills these from a checkpoint's config files, so a small model is the
same program with other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Facts of the method rather than of a checkpoint: the clock of both streams and the tags of the AdaLN table.
FPS = 24
SAMPLE_RATE = 32_000
AUDIO_LATENTS_PER_SECOND = 40
AUDIO_CHANNELS = 2
TAG_VIDEO, TAG_TEXT, TAG_AUDIO = 0, 1, 2
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)
POSTERIOR_SEED = 42
CONDITION_TIME = 0.999
AUDIO_CONDITION_TIME = 1.0
# The tokens that the checkpoint adds to Qwen's and that a prompt may use; everything else special is plain text.
PROJECT_TOKENS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)


@dataclass(frozen=True)
class DiTSpec:
    """The single-stream DiT (SPEC 1.2). Widths in elements; `dtype` is the stored dtype outside the fp32 islands.

    fp8_edge: the trunk's linears are stored in e4m3 but for so many blocks at either end; None: nowhere.
    """

    hidden: int = 5376
    layers: int = 50
    refiner_layers: int = 2
    heads: int = 56
    head_dim: int = 128
    ffn: int = 14336
    video_channels: int = 24
    audio_channels: int = 32
    patch: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_hidden: int = 5376
    time_dim: int = 2688
    rope_freqs: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5
    dtype: str = "bfloat16"
    fp8_edge: int | None = None

    @property
    def fp8_blocks(self) -> range:
        """The blocks whose linears are in e4m3."""
        return range(0) if self.fp8_edge is None else range(self.fp8_edge, self.layers - self.fp8_edge)

    @property
    def inner(self) -> int:
        """Width of attention: heads x head_dim (7168 in H3, not the hidden width)."""
        return self.heads * self.head_dim

    @property
    def video_row(self) -> int:
        """Values in one video row: channels x patch volume (96 in H3)."""
        pt, ph, pw = self.patch
        return self.video_channels * pt * ph * pw


@dataclass(frozen=True)
class TextSpec:
    """The Qwen3-VL conditioner. `hidden_layer` decoder layers are run, without the final norm (SPEC 3.5)."""

    hidden: int = 5120
    intermediate: int = 25600
    layers: int = 64
    hidden_layer: int = 50
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    tied_embeddings: bool = False
    vision: Mapping[str, Any] = field(default_factory=dict)  # the tower's sizes and activation, in transformers' names
    image_token: int = 151655
    video_token: int = 151656
    vision_start_token: int = 151652
    vision_end_token: int = 151653
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class ProcessorSpec:
    """Pixel budgets of the conditioner's image and video processors (SPEC 3.3), in pixels."""

    patch: int = 16
    temporal_patch: int = 2
    merge: int = 2
    image_min_pixels: int = 65_536
    image_max_pixels: int = 16_777_216
    video_min_pixels: int = 4_096
    video_max_pixels: int = 25_165_824
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class VideoVAESpec:
    """The video VAE (SPEC 1.5 and 8): CNN encoder, ViT decoder, fixed tiling of `tile` pixels and `clip`-frame clips."""

    channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    resnets: int = 2
    space_down: tuple[int, ...] = (2, 2, 2, 2, 1, 1)
    time_down: tuple[int, ...] = (1, 2, 2, 1, 1, 1)
    latent_channels: int = 24
    norm_groups: int = 32
    norm_eps: float = 1e-6
    decoder_layers: int = 36
    decoder_heads: int = 32
    decoder_head_dim: int = 64
    decoder_registers: int = 4
    decoder_ffn_mult: int = 4
    decoder_rope_theta: float = 100.0
    decoder_rope_ratio: float = 0.75
    decoder_norm_eps: float = 1e-5
    clip: int = 17
    token_drop: int = 3
    tile: int = 256
    tile_overlap: int = 64
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: str = "float32"

    @property
    def space(self) -> int:
        """Pixels per latent on each spatial axis (16)."""
        ratio = 1
        for step in self.space_down:
            ratio *= step
        return ratio

    @property
    def time(self) -> int:
        """Frames per latent in time, the first latent of a clip apart (4)."""
        ratio = 1
        for step in self.time_down:
            ratio *= step
        return ratio

    @property
    def clip_latents(self) -> int:
        """Latent frames of one clip: ceil(clip / time) (5)."""
        return -(-self.clip // self.time)


@dataclass(frozen=True)
class AudioVAESpec:
    """The mono audio VAE (SPEC 1.6 and 9); stereo is a batch of two."""

    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 4, 5, 5)
    latent_dim: int = 2048
    latent_channels: int = 32
    decoder_dim: int = 1024
    decoder_rates: tuple[int, ...] = (5, 5, 2, 2, 2, 2, 2)
    decoder_kernels: tuple[int, ...] = (9, 9, 4, 4, 4, 4, 4)
    attention_heads: int = 8
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    resblock_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: str = "float32"

    @property
    def hop(self) -> int:
        """Samples per latent (800)."""
        hop = 1
        for rate in self.encoder_rates:
            hop *= rate
        return hop


@dataclass(frozen=True)
class World:
    """What a checkpoint can be asked for (SPEC 4): canvases in pixels, durations in seconds.

    `min_clip_seconds` to `max_clip_seconds` is a video or audio reference; the latter also bounds all of a kind together.
    """

    short_edge: int = 768
    area_cap: int = 768 * 1344
    reference_edge: int = 2048
    min_seconds: float = 4.0
    max_seconds: float = 15.0
    min_clip_seconds: float = 2.0
    max_clip_seconds: float = 15.0
    shifts: tuple[float, float] = (12.0, 3.0)


@dataclass(frozen=True)
class Partition:
    """One set of DiT weights: its name and the tasks it was trained for."""

    name: str
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """All sizes of a checkpoint."""

    dit: DiTSpec = DiTSpec()
    text: TextSpec = TextSpec()
    processor: ProcessorSpec = ProcessorSpec()
    video: VideoVAESpec = VideoVAESpec()
    audio: AudioVAESpec = AudioVAESpec()
    world: World = World()
    partitions: tuple[Partition, ...] = (Partition("fl2va", ("t2va", "fl2va")), Partition("ref2va", ("ref2va",)))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task some loaded partition declares, in a stable order."""
        return tuple(dict.fromkeys(task for partition in self.partitions for task in partition.tasks))

    @property
    def multiple(self) -> int:
        """Pixels both canvas edges are multiples of: VAE ratio x DiT patch (32)."""
        return self.video.space * self.dit.patch[2]

    def partition_for(self, task: str) -> Partition | None:
        """The partition that declares `task`, or None."""
        return next((partition for partition in self.partitions if task in partition.tasks), None)
