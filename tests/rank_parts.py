"""Parts of the model and whole requests on several ranks, each against one rank in the same process."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rank_dit import joined
from ranks import Place
from test_engine import ALL
from test_video_vae import TINY, filled
from twinreel import Engine, EngineConfig
from twinreel.demo.tiny import tiny_spec
from twinreel.launch import Seat
from twinreel.models.text_encoder import TextEncoder
from twinreel.models.video_decoder import VideoDecoder
from twinreel.models.video_encoder import VideoEncoder
from twinreel.output.write import Media
from twinreel.parallel.fully_sharded import Gathered
from twinreel.parallel.mesh import Mesh, join_mesh
from twinreel.parallel.tiles import deal
from twinreel.spec import Spec
from twinreel.weights import locate
from twinreel.weights.stream import load_into

VIDEO = replace(TINY, tile=64, tile_overlap=16)


def wide_spec() -> Spec:
    """The miniature with 56 heads, so that 7 and 8 ranks can share them, and 8 key and value heads in the conditioner."""
    spec = tiny_spec()
    return replace(
        spec,
        dit=replace(spec.dit, heads=56, head_dim=8, ffn=112, rope_freqs=1),
        text=replace(spec.text, heads=16, kv_heads=8, intermediate=96),
    )


@torch.inference_mode()
def tiles(place: Place, sizes: list[tuple[int, int, int]], tile_batch: int) -> tuple[list[str], list[str] | None]:
    """Hashes of what canvases of (frames, height, width) decode and encode to over all ranks; on rank 0 also alone."""
    every = joined(place, Mesh(sp=place.world)).every
    made = _coded(VideoDecoder(VIDEO, ranks=every), VideoEncoder(VIDEO, ranks=every), sizes, tile_batch)
    alone = _coded(VideoDecoder(VIDEO), VideoEncoder(VIDEO), sizes, tile_batch) if place.rank == 0 else None
    return made, alone


def _coded(
    decoder: VideoDecoder, encoder: VideoEncoder, sizes: list[tuple[int, int, int]], tile_batch: int
) -> list[str]:
    filled(decoder), filled(encoder)
    hashes = []
    for frames, height, width in sizes:
        generator = torch.Generator().manual_seed(height * width)
        latents = torch.randn(1, VIDEO.latent_channels, 7, height // 16, width // 16, generator=generator)
        pixels = torch.randn(1, 3, frames, height, width, generator=generator)
        for tensor in (decoder.decode(latents, tile_batch), *encoder.encode(pixels)):
            hashes.append(hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest())
    return hashes


def slow_first(place: Place, patience: float) -> list[float]:
    """One tile for all ranks, which takes its rank twice as long as a collective may."""
    mesh = Mesh(sp=place.world)
    every = join_mesh(mesh, place.rank, backend="gloo", patience=patience).every

    def make(job: int) -> Tensor:
        time.sleep(2 * patience)
        return torch.full((1, 3), 5.0 + job)

    return torch.cat(list(deal(make, [1], every, torch.device("cpu")))).flatten().tolist()


@torch.inference_mode()
def conditioner(place: Place, model: str, text: int) -> tuple[float, Tensor]:
    """Relative L2 distance of the conditioner over `text` ranks to one, and what it made."""
    axis = joined(place, Mesh(sp=place.world, text=text)).text
    checkpoint, spec = locate(Path(model), {}), wide_spec()

    def made(encoder: TextEncoder) -> Tensor:
        load_into(encoder, checkpoint, spec, "text_encoder")
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, 200, (37,), generator=generator)
        return encoder(ids, torch.zeros(37, dtype=torch.int64)).float()

    with torch.device("meta"):
        one, many = TextEncoder(spec.text, torch.float32), TextEncoder(spec.text, torch.float32, axis)
    wanted, out = made(one), made(many)
    return ((out - wanted).norm() / wanted.norm()).item(), out


@torch.inference_mode()
def stored_conditioner(place: Place, model: str) -> tuple[bool, int, int]:
    """Whether the conditioner, stored over all ranks, makes what one rank makes of two prompts, one with a picture; the
    values that a rank keeps, and all of them."""
    parallel = joined(place, Mesh(sp=place.world, stored=place.world))
    checkpoint, spec = locate(Path(model), {}), wide_spec()

    def made() -> TextEncoder:
        with torch.device("meta"):
            encoder = TextEncoder(spec.text, torch.float32)
        load_into(encoder, checkpoint, spec, "text_encoder")
        return encoder

    one, many = made(), made()
    gathered = Gathered(many, many.gathered_parts(), parallel.stored, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    ids, types = torch.randint(0, 200, (37,), generator=generator), torch.zeros(37, dtype=torch.int64)
    values = spec.text.vision["in_channels"] * spec.processor.temporal_patch * spec.processor.patch**2
    picture = torch.randn(16, values, generator=generator), (1, 4, 4)
    seen = types.clone()
    seen[5:9] = 1
    same = torch.equal(gathered(ids, types), one(ids, types))
    same &= torch.equal(gathered(ids, seen, [picture]), one(ids, seen, [picture]))
    kept = [weight.to_local() for weight in many.parameters()]  # type: ignore[attr-defined]
    return same, sum(map(torch.numel, kept)), sum(map(torch.numel, one.parameters()))


@lru_cache(maxsize=4)
def alone(model: str, task: str) -> Media:
    """A request on one rank."""
    return Engine(EngineConfig(model=model, device="cpu", threads=1)).generate(ALL[task])


def request(place: Place, model: str, task: str, options: dict[str, Any]) -> tuple[dict[str, bool], float, float]:
    """A whole request over all ranks: which hashes are those of one rank, and the largest differences to it."""
    key = ("engine", model, *sorted(options.items()))
    if key not in place.kept:
        config = EngineConfig(model=model, device="cpu", threads=1, gpus=place.world, **options)
        place.kept[key] = Engine(config, place=Seat(place.rank, place.world, place.rank, place.world))
    made, wanted = place.kept[key].generate(ALL[task]), alone(model, task)
    same = {name: made.report["sha256"][name] == value for name, value in wanted.report["sha256"].items()}
    video = np.abs(made.video.astype(int) - wanted.video.astype(int)).max()
    return same, float(video), float(np.abs(made.audio - wanted.audio).max())
