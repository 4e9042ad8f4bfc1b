"""Tiny random checkpoints for tests, and how a part of one is built and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from twinreel.demo.tiny import tiny_spec, write_tiny
from twinreel.demo.tiny_weights import tiny_tensors
from twinreel.models.audio_decoder import AudioDecoder
from twinreel.models.audio_encoder import AudioEncoder
from twinreel.models.dit import DiT
from twinreel.models.modulation import LiveModulation
from twinreel.models.text_encoder import TextEncoder
from twinreel.models.video_decoder import VideoDecoder
from twinreel.models.video_encoder import VideoEncoder
from twinreel.ops import select
from twinreel.parallel import Parallel
from twinreel.spec import Spec
from twinreel.weights import Checkpoint, read_spec
from twinreel.weights.stream import load_into

__all__ = ["BUILD", "build_dit", "load", "tiny_spec", "tiny_tensors", "write_tiny"]

BF16 = torch.bfloat16


def build_dit(spec: Spec, dtype: torch.dtype = BF16) -> nn.Module:
    return DiT(spec.dit, select("reference", "cpu"), Parallel.single(), dtype)


BUILD: dict[str, Callable[[Spec], nn.Module]] = {
    "dit": build_dit,
    "modulation": lambda spec: LiveModulation(spec.dit, BF16),
    "text_encoder": lambda spec: TextEncoder(spec.text, BF16),
    "video_encoder": lambda spec: VideoEncoder(spec.video),
    "video_decoder": lambda spec: VideoDecoder(spec.video, torch.float32),
    "audio_encoder": lambda spec: AudioEncoder(spec.audio),
    "audio_decoder": lambda spec: AudioDecoder(spec.audio),
}


def load(checkpoint: Checkpoint, part: str, **options: Any) -> nn.Module:
    """A part ("dit:fl2va", "video_decoder", ...) built on the meta device with the checkpoint's sizes, and loaded."""
    spec = read_spec(checkpoint)
    with torch.device("meta"):
        module = BUILD[part.partition(":")[0]](spec)
    return load_into(module, checkpoint, spec, part, **options)
