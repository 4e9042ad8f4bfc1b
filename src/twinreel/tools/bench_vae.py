"""`bench vae`: decode and encode of one clip on random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..decoding import out_of_memory
from ..models.video_decoder import VideoDecoder
from ..models.video_encoder import VideoEncoder
from ..ops import frames as frame_ops
from ..ops import vit
from ..spec import Spec
from .bench_dit import Sizes, plan_of
from .random_weights import check_room, fill
from .timing import card, device_memory, measure, release

KINDS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Asked:
    """What is timed: halves `decode` and `encode`; tables of passes; tile batches of a decode; kinds (`KINDS`) and frames
    of an encode. A figure takes about `seconds`, and at least `fewest` runs."""

    halves: Sequence[str]
    passes: Sequence[str]
    tile_batches: Sequence[int]
    kinds: Sequence[str]
    encode_frames: int
    fewest: int
    seconds: float


@torch.inference_mode()
def bench_vae(spec: Spec, sizes: Sizes, device: torch.device, asked: Asked) -> dict[str, Any]:
    """Seconds and peak memory of a decode for each tile batch and table of passes (fp16 products on CUDA) and of an encode
    of each kind and table; of one table beside another the bits, or how far apart they are. Plain values."""
    plan, _ = plan_of(sizes, spec)
    result: dict[str, Any] = {"canvas": [plan.width, plan.height], "frames": plan.frames, "card_before": card(device)}
    if "decode" in asked.halves:
        size = plan.height // spec.video.space, plan.width // spec.video.space
        latents = torch.randn(1, spec.video.latent_channels, plan.latents, *size, device=device)
        result["decode"] = _decodes(spec, latents, asked)
    if "encode" in asked.halves:
        check_room(3 * asked.encode_frames * plan.height * plan.width * 4, device, "pixels")
        pixels = torch.randn(1, 3, asked.encode_frames, plan.height, plan.width, device=device)
        result["encode"] = _encodes(spec, pixels, asked)
    return result | {"card_after": card(device)}


def _decodes(spec: Spec, latents: Tensor, asked: Asked) -> list[dict[str, Any]]:
    device, found, first = latents.device, list[dict[str, Any]](), dict[int, Tensor]()
    compute = torch.float16 if device.type == "cuda" else torch.float32
    for name in asked.passes:
        with torch.device("meta"):
            decoder = VideoDecoder(spec.video, compute, ops=vit.choose(name, device))
        fill(decoder, device)
        for batch in asked.tile_batches:
            frames = torch.cat([clip.cpu() for clip in decoder.clips(latents, batch)], dim=2)
            with device_memory(device) as memory:
                # the frames above were the warm-up
                spent = measure(
                    partial(_decode, decoder, latents, batch), device, asked.seconds, fewest=asked.fewest,
                    warm_up=lambda: None,
                )  # fmt: skip
            equal = torch.equal(frames, first.setdefault(batch, frames))
            found.append({"passes": name, "tile_batch": batch, **spent, **memory, "equal_to_first": equal})
            print(
                f"decode {frames.shape[2]} frames, passes {name}, tile batch {batch}: {spent['seconds']:.3f} s, "
                f"same bits as {asked.passes[0]}: {equal}"
            )
        del decoder
        release(device)
    return found


def _decode(decoder: VideoDecoder, latents: Tensor, tile_batch: int) -> None:
    for _ in decoder.clips(latents, tile_batch):
        pass


def _encodes(spec: Spec, pixels: Tensor, asked: Asked) -> list[dict[str, Any]]:
    device, frames, found = pixels.device, pixels.shape[2], list[dict[str, Any]]()
    clip, kept, first = pixels[:, :, : spec.video.clip], torch.backends.cudnn.allow_tf32, list[Tensor]()
    channels = spec.video.channels
    tables = [(kind, frame_ops.choose(name, kind, channels, device)) for kind in asked.kinds for name in asked.passes]
    for kind, between in dict.fromkeys(tables):
        row: dict[str, Any] = {"kind": kind, "passes": between.name}
        with torch.device("meta"):
            encoder = VideoEncoder(spec.video, compute=KINDS[kind], passes=between)
        fill(encoder, device)
        torch.backends.cudnn.allow_tf32 = kind == "tf32"
        try:
            first.append(encoder.encode(clip)[0])  # one clip is the warm-up of many, and shows the distance
        except RuntimeError as error:
            if KINDS[kind] != torch.float16 or out_of_memory(error):
                raise
            found.append(row | {"refused": str(error)})  # drawn weights may leave its range
            continue
        repeats = torch.equal(encoder.encode(clip)[0], first[-1])
        distance = float((first[-1] - first[0]).norm() / first[0].norm())
        with device_memory(device) as memory:
            spent = measure(
                partial(encoder.encode, pixels), device, asked.seconds, fewest=asked.fewest, warm_up=lambda: None
            )
        found.append({**row, "frames": frames, **spent, **memory, "repeats": repeats, "distance_to_first": distance})
        print(
            f"encode {frames} frames, {kind}, passes {between.name}: {spent['seconds']:.3f} s, "
            f"distance to the first {distance:.1e}"
        )
        del encoder
    torch.backends.cudnn.allow_tf32 = kept
    return found
