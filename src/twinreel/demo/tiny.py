"""A miniature with random weights in the released layouts: it runs the whole program, and what comes out is noise.

The tests are built on it. The sizes of the DiT and of the video VAE are those
of SPEC 13.7.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec import AudioVAESpec, DiTSpec, Partition, ProcessorSpec, Spec, TextSpec, VideoVAESpec, World
from . import tiny_configs as configs
from .tiny_tokenizer import VOCAB, token_ids, write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

ALL_TASKS = Partition("miniature", ("t2va", "fl2va", "ref2va"))


def tiny_spec(dit_dtype: str = "bfloat16") -> Spec:
    """The miniature's sizes: two partitions, canvases around 64 x 112 pixels, 0.9 to 6 seconds."""
    ids = token_ids()
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [1, 2, 3],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return Spec(
        dit=DiTSpec(
            hidden=64, layers=2, refiner_layers=2, heads=2, head_dim=32, ffn=128, text_dim=48, freq_dim=16,
            time_hidden=64, time_dim=32, rope_freqs=4, dtype=dit_dtype,
        ),
        text=TextSpec(
            hidden=48, intermediate=96, layers=6, hidden_layer=4, heads=4, kv_heads=2, head_dim=16, vocab=VOCAB,
            mrope_section=(4, 2, 2), vision=vision, image_token=ids["<|image_pad|>"], video_token=ids["<|video_pad|>"],
            vision_start_token=ids["<|vision_start|>"], vision_end_token=ids["<|vision_end|>"],
        ),
        processor=ProcessorSpec(image_min_pixels=1024, video_min_pixels=1024),
        video=VideoVAESpec(
            channels=(32, 32, 32, 64, 64, 64), resnets=1, decoder_layers=2, decoder_heads=4, decoder_head_dim=32,
            mean=_wave(24, 0.0, 0.1), std=_wave(24, 1.0, 0.2),
        ),
        audio=AudioVAESpec(
            encoder_dim=4, latent_dim=256, decoder_dim=128, attention_heads=4, mean=_wave(32, 0.0, 0.1),
            std=_wave(32, 1.0, 0.2),
        ),
        world=World(
            short_edge=64, area_cap=64 * 112, reference_edge=64, min_seconds=0.9, max_seconds=6.0,
            min_clip_seconds=0.9, max_clip_seconds=6.0,
        ),
    )  # fmt: skip


def write_tiny(folder: Path | str, layout: str = "original", spec: Spec | None = None, copies: bool = False) -> Path:
    """Write the miniature into `folder` and return it; the same files, byte for byte, on every call.

    `layout`: "original" (`FL2VA/` and `Ref2VA/`), "diffusers" (a root), or "single" (one original partition that
    declares all three tasks). Both DiTs differ; in "single" it is the first. `Ref2VA/` holds its DiT alone, or with
    `copies` a copy of everything shared, as released. `spec` replaces `tiny_spec()`.
    """
    folder, spec = Path(folder), spec or tiny_spec()
    if layout == "diffusers":
        for name, partition in zip(("transformer", "transformer_ref"), spec.partitions, strict=True):
            _write_dit(folder / name, layout, spec, partition)
        _write_shared(folder, layout, spec)
        for name, shift in zip(("scheduler", "audio_scheduler"), spec.world.shifts, strict=True):
            scheduler = {"_class_name": "MiniMaxH3Scheduler", "_diffusers_version": "0.36.0.dev0", "shift": shift}
            _write_json(folder / name / "scheduler_config.json", scheduler)
        _write_json(folder / "model_index.json", configs.diffusers_index(spec))
    elif layout == "original":
        for name, partition in zip(("FL2VA", "Ref2VA"), spec.partitions, strict=True):
            _write_partition(folder / name, spec, partition, partition.name, copies or name == "FL2VA")
    elif layout == "single":
        _write_partition(folder, spec, ALL_TASKS, spec.partitions[0].name, True)
    else:
        raise ValueError(f"layout {layout!r} is none of original, diffusers, single")
    return folder


def _wave(count: int, center: float, swing: float) -> tuple[float, ...]:
    return tuple(round(center + swing * math.sin(index), 6) for index in range(count))


def _write_partition(folder: Path, spec: Spec, partition: Partition, seed: str, shared: bool) -> None:
    _write_dit(folder / "transformer", "original", spec, Partition(seed, partition.tasks))
    if shared:
        _write_shared(folder, "original", spec)
    _write_json(folder / "model_index.json", configs.partition_index(spec, partition))


def _write_dit(folder: Path, layout: str, spec: Spec, partition: Partition) -> None:
    from .tiny_weights import tiny_tensors

    _write_json(folder / "config.json", configs.dit_config(spec, layout))
    _write_weights(folder, _stem(layout), tiny_tensors("transformer", layout, spec, partition.name), shards=3)


def _write_shared(folder: Path, layout: str, spec: Spec) -> None:
    from .tiny_weights import tiny_tensors

    _write_json(folder / "text_encoder" / "config.json", configs.text_config(spec))
    _write_weights(folder / "text_encoder", "model", tiny_tensors("text_encoder", layout, spec), shards=2)
    for name, config in configs.processor_configs(spec).items():
        _write_json(folder / "processor" / name, config)
    for name in ("tokenizer", "processor"):
        write_tokenizer(folder / name)
    video = folder / ("vae" if layout == "diffusers" else "video_vae")
    for name, config in configs.video_configs(spec, layout).items():
        _write_json(video / name, config)
    weights, shards = (video, 2) if layout == "diffusers" else (video / "source", 1)
    _write_weights(weights, _stem(layout), tiny_tensors("video_vae", layout, spec), shards)
    for name, config in configs.audio_configs(spec, layout).items():
        _write_json(folder / "audio_vae" / name, config)
    _write_weights(folder / "audio_vae", _stem(layout), tiny_tensors("audio_vae", layout, spec), shards=1)


def _stem(layout: str) -> str:
    return "diffusion_pytorch_model" if layout == "diffusers" else "model"


def _write_weights(folder: Path, stem: str, tensors: Mapping[str, Tensor], shards: int) -> None:
    """One safetensors file, or several of about equal tensor counts and their index."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    if shards == 1:
        (folder / f"{stem}.safetensors").write_bytes(save(dict(tensors)))
        return
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * size : (number + 1) * size]
        (folder / file).write_bytes(save({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
