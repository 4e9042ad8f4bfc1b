"""From training files to the bundled model: the original layout, one partition for all three tasks, bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ...errors import CheckpointError
from ...models.audio_decoder import lowpass_filter
from ...spec import Spec
from ...weights.keymap import Stored, stored_tensors
from .. import tiny_configs as configs
from ..recipe import Recipe
from ..words import write_tokenizer
from . import audio, dit, video
from .loop import read_file, read_state

# Module -> training file and the prefix its averaged weights have there.
SOURCES = {
    "dit": (dit.STEM, "dit/"),
    "modulation": (dit.STEM, "modulation/"),
    "text_encoder": (dit.STEM, "text/"),
    "video_encoder": (video.STEM, "vae/encoder."),
    "video_decoder": (video.DECODER_STEM, "decoder/"),
    "audio_encoder": (audio.STEM, "vae/encoder."),
    "audio_decoder": (audio.STEM, "vae/decoder."),
}
# Where the video decoder lies before its own run.
JOINT = {"video_decoder": (video.STEM, "vae/decoder.")}


def write_model(target: Path, recipe: Recipe, folder: Path) -> Path:
    """Write the model of the averaged weights in `folder` into `target`; returns it.

    The latent statistics are those that the DiT was trained with. Raises CheckpointError before anything is written.
    """
    stats = read_state(folder / f"{dit.STEM}-mean.safetensors")["facts"].get("statistics")
    if not stats:
        raise CheckpointError(f"{folder} has a DiT without latent statistics; train it, or name another --folder")
    spec = dit.with_statistics(recipe.spec, stats)
    sources = {
        name: JOINT[name] if name in JOINT and not (folder / f"{stem}-mean.safetensors").is_file() else (stem, prefix)
        for name, (stem, prefix) in SOURCES.items()
    }
    files = {stem: read_file(folder / f"{stem}-mean.safetensors")[0] for stem in {stem for stem, _ in sources.values()}}
    places = {
        "transformer": target / "transformer",
        "text_encoder": target / "text_encoder",
        "video_vae": target / "video_vae" / "source",
        "audio_vae": target / "audio_vae",
    }
    tensors = {
        component: {
            name: _value(row, spec, files, sources).to(getattr(torch, row.dtype)).contiguous()
            for name, row in stored_tensors(component, "original", spec).items()
            if not row.optional
        }
        for component in places
    }
    for component, place in places.items():
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.safetensors").write_bytes(save(tensors[component]))
    _write_configs(target, spec)
    return target


def _value(row: Stored, spec: Spec, files: dict[str, dict[str, Tensor]], sources: dict[str, tuple[str, str]]) -> Tensor:
    leaf = row.name.rpartition(".")[2]
    if row.module is None:
        if row.name == "rope.inv_freq":
            steps = torch.arange(0, 2 * spec.dit.rope_freqs, 2, dtype=torch.float32)
            return 1.0 / spec.dit.rope_theta ** (steps / (2 * spec.dit.rope_freqs))
        # Never loaded (mask token, final norm, log variance of the sound): zeros say that nothing was trained there.
        return torch.zeros(row.shape)
    if leaf == "filter":
        return lowpass_filter().reshape(row.shape)
    if leaf == "zero_k_bias":
        return torch.zeros(row.shape)
    stem, prefix = sources[row.module]
    value = files[stem].get(f"{prefix}{row.parameter}")
    if value is None or value.shape != row.shape:
        given = "no such tensor" if value is None else list(value.shape)
        told = f"{stem}-mean.safetensors: {prefix}{row.parameter}: {given}, {list(row.shape)} is needed"
        raise CheckpointError(f"{told}; --smoke has sizes of its own, so give it as before")
    return value


def _write_configs(target: Path, spec: Spec) -> None:
    stored = {"dtype": spec.video.dtype}
    video_files = configs.video_configs(spec, "original")
    audio_files = configs.audio_configs(spec, "original")
    files: dict[str, Any] = {"transformer/config.json": configs.dit_config(spec, "original")}
    files["text_encoder/config.json"] = configs.text_config(spec)
    files |= {f"processor/{name}": config for name, config in configs.processor_configs(spec).items()}
    files |= {f"video_vae/{name}": config | stored for name, config in video_files.items()}
    files |= {f"audio_vae/{name}": config | {"dtype": spec.audio.dtype} for name, config in audio_files.items()}
    # What only the diffusers config of the audio VAE names may stand in the original's kwargs.
    files["audio_vae/metadata.json"]["metadata"]["kwargs"] |= {
        "decoder_kernel_sizes": list(spec.audio.decoder_kernels),
        "resblock_kernel_sizes": list(spec.audio.resblock_kernels),
        "resblock_dilation_sizes": [list(row) for row in spec.audio.resblock_dilations],
    }
    files["audio_vae/metadata.json"].pop("dtype", None)
    files["model_index.json"] = configs.partition_index(spec, spec.partitions[0])
    for name, data in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer", "processor"):
        write_tokenizer(target / name)
