"""diffusers' DiT and ours with equal weights, and packed layouts to run them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from golden_dit import golden_pair, golden_state
from twinreel.models.dit import DiT, RowState, make_row_state
from twinreel.models.modulation import LiveModulation
from twinreel.spec import DiTSpec


def oracle(spec: DiTSpec) -> MiniMaxH3Transformer3DModel:
    """diffusers' class for a spec, fp32, random weights."""
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=spec.heads,
        attention_head_dim=spec.head_dim,
        hidden_size=spec.hidden,
        num_layers=spec.layers,
        num_refiner_layers=spec.refiner_layers,
        ffn_dim=spec.ffn,
        in_channels=spec.video_channels,
        audio_in_channels=spec.audio_channels,
        patch_size=spec.patch,
        text_dim=spec.text_dim,
        freq_dim=spec.freq_dim,
        time_embed_hidden_dim=spec.time_hidden,
        time_embed_dim=spec.time_dim,
        rope_freq_dim=spec.rope_freqs,
        rope_theta=spec.rope_theta,
        norm_eps=spec.norm_eps,
        qk_norm_eps=spec.qk_norm_eps,
        final_norm_eps=spec.final_norm_eps,
    ).eval()


@dataclass(frozen=True)
class Pair:
    """The two implementations with equal weights (SPEC 13.7), each in memory of its own."""

    spec: DiTSpec
    theirs: MiniMaxH3Transformer3DModel
    dit: DiT
    modulation: LiveModulation


def make_pair(spec: DiTSpec, dtype: torch.dtype) -> Pair:
    """Blocks of both in `dtype`, the islands of both in fp32."""
    theirs = oracle(spec)
    theirs.load_state_dict(golden_state(spec))
    for name, parameter in theirs.named_parameters():
        if not any(island in name for island in theirs._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return Pair(spec, theirs, *golden_pair(spec, dtype))


@dataclass(frozen=True)
class Packed:
    """A packed sequence: rows in order, what their timestep is, and which leading rows of a modality are conditions."""

    positions: Tensor
    tags: Tensor
    clocks: tuple[str, ...]
    text: Tensor
    video: Tensor
    audio: Tensor
    condition_video: int
    condition_audio: int

    def row_state(self, pair: Pair) -> RowState:
        """Our static row arguments."""
        return make_row_state(
            self.positions, self.tags, (self.text, self.video, self.audio), pair.spec, pair.dit.dtype, "cpu"
        )

    def timesteps(self, video: float, audio: float) -> tuple[Tensor, Tensor]:
        """SPEC 5.3: distinct timesteps ascending, and each row's index into them."""
        values = {"video": video, "audio": audio, "still": max(video, 0.999), "sound": 1.0}
        rows = torch.tensor([values[clock] for clock in self.clocks], dtype=torch.float32)
        return torch.unique(rows, sorted=True, return_inverse=True)


def pack(*segments: tuple[str, int], text_tags: tuple[int, ...], seed: int = 0) -> Packed:
    """Segments (`clock`, rows) behind the text: clock `still` and `sound` are conditions, `video` and `audio` targets.

    Positions are random fp64: what they mean is the layout's business, and the models must take any.
    """
    tags, clocks = list(text_tags), ["video"] * len(text_tags)
    for clock, rows in segments:
        tags += [0 if clock in ("still", "video") else 2] * rows
        clocks += [clock] * rows
    tag, rows = torch.tensor(tags), torch.arange(len(tags))
    after = rows >= len(text_tags)
    positions = torch.rand(len(tags), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 300
    return Packed(
        positions=positions,
        tags=tag,
        clocks=tuple(clocks),
        text=rows[~after],
        video=rows[after & (tag == 0)],
        audio=rows[after & (tag == 2)],
        condition_video=clocks.count("still"),
        condition_audio=clocks.count("sound"),
    )
