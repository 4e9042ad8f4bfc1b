"""`bench vae`: decode and encode of one clip on random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.video_decoder import VideoDecoder
from ..models.video_encoder import VideoEncoder
from ..spec import Spec
from .bench_dit import Sizes, fill, plan_of
from .timing import card, measure


@torch.inference_mode()
def bench_vae(
    spec: Spec, sizes: Sizes, device: torch.device, tile_batches: list[int], *, encode_frames: int, seconds: float
) -> dict[str, Any]:
    """Seconds of a decode for each tile batch (fp16 products on CUDA) and of an encode in fp32 and TF32."""
    plan, _ = plan_of(sizes, spec)
    compute = torch.float16 if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {"canvas": [plan.width, plan.height], "frames": plan.frames, "decode": {}, "encode": {}}
    with torch.device("meta"):
        decoder, encoder = VideoDecoder(spec.video, compute), VideoEncoder(spec.video)
    fill(decoder, device)
    decoder.freeze()
    height, width = plan.height // spec.video.space, plan.width // spec.video.space
    latents = torch.randn(1, spec.video.latent_channels, plan.latents, height, width, device=device)
    for batch in tile_batches:
        spent = measure(partial(_decode, decoder, latents, batch), device, seconds)
        result["decode"][batch] = spent | _peak(device)
        print(f"decode {plan.frames} frames, tile batch {batch}: {spent['seconds']:.3f} s")
    del decoder
    fill(encoder, device)
    pixels = torch.randn(1, 3, encode_frames, plan.height, plan.width, device=device)
    kept = torch.backends.cudnn.allow_tf32
    for name, allowed in (("fp32", False), ("tf32", True)) if device.type == "cuda" else (("fp32", False),):
        torch.backends.cudnn.allow_tf32 = allowed
        spent = measure(lambda: encoder.encode(pixels), device, seconds)
        result["encode"][name] = spent | {"frames": encode_frames} | _peak(device)
        print(f"encode {encode_frames} frames, {name}: {spent['seconds']:.3f} s")
    torch.backends.cudnn.allow_tf32 = kept
    return result | {"card": card(device)}


def _decode(decoder: VideoDecoder, latents: Tensor, tile_batch: int) -> None:
    for _ in decoder.clips(latents, tile_batch):
        pass


def _peak(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return {"peak_gib": peak}
