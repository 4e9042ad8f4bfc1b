"""What one component folder is, told from its config file and tensor names, never from its folder name (SPEC 1.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .files import has_weights, read_json, shown, tensor_names, there

ORIGINAL, DIFFUSERS, BOTH = "original", "diffusers", "both"

CLASSES = {
    "MiniMaxH3DiTModel": ("transformer", ORIGINAL),
    "MiniMaxH3Transformer3DModel": ("transformer", DIFFUSERS),
    "MiniMaxH3VideoVAE": ("video_vae", ORIGINAL),
    "AutoencoderKLMiniMaxH3": ("video_vae", DIFFUSERS),
    "MiniMaxH3AudioVAE": ("audio_vae", ORIGINAL),
    "AutoencoderKLMiniMaxH3Audio": ("audio_vae", DIFFUSERS),
    "Qwen3VLForConditionalGeneration": ("text_encoder", BOTH),
    "MiniMaxH3Qwen3VLHFEncoder": ("text_encoder", BOTH),
}
# Where a config names no class: a set of fields that only this kind has.
FIELDS = (
    ({"token_refiner_num_layers", "latents_dim"}, ("transformer", ORIGINAL)),
    ({"num_refiner_layers", "audio_in_channels"}, ("transformer", DIFFUSERS)),
    ({"vae_clip_length", "source_path"}, ("video_vae", ORIGINAL)),
    ({"block_out_channels", "token_drop"}, ("video_vae", DIFFUSERS)),
    ({"source_metadata_path", "source_config_path"}, ("audio_vae", ORIGINAL)),
    ({"encoder_rates", "decoder_rates"}, ("audio_vae", DIFFUSERS)),
    ({"text_config", "vision_config"}, ("text_encoder", BOTH)),
)
# One tensor name that only this kind has. The audio VAE is stored alike in both layouts.
MARKERS = {
    "video_patch_proj.weight": ("transformer", ORIGINAL),
    "audio_proj_in.weight": ("transformer", DIFFUSERS),
    "encoder.down.0.block.0.conv1.weight": ("video_vae", ORIGINAL),
    "encoder.down_blocks.0.resnets.0.conv1.weight": ("video_vae", DIFFUSERS),
    "pre_block.attn.zero_k_bias": ("audio_vae", BOTH),
    "model.language_model.embed_tokens.weight": ("text_encoder", BOTH),
}
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
PROCESSOR_FILES = ("preprocessor_config.json",)
SMALL = (".json", ".yaml", ".txt", ".jinja")


@dataclass(frozen=True)
class Component:
    """One recognised folder. `weights` is where its safetensors lie (`folder/source` for the original video VAE)."""

    kind: str
    layout: str
    folder: Path
    weights: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.json"


def no_folder(path: Path) -> str:
    """What to say of a path that is no folder."""
    return f"{path}: {'is a file and no folder' if path.exists() else 'no such folder'}"


def recognise(folder: Path) -> Component:
    """The component in `folder`: kind and layout from its config, confirmed by its tensors' names when it has weights.

    Raises CheckpointError when the folder is absent or of no known kind, or when config and tensors tell different
    stories (an original DiT under a diffusers config, for example).
    """
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    config = folder / "config.json"
    if not there(config):
        for kind, names in (("tokenizer", TOKENIZER_FILES), ("processor", PROCESSOR_FILES)):
            if any(there(folder / name) for name in names):
                return Component(kind, BOTH, folder, folder)
    told = _from_config(config) if there(config) else None
    if told is not None and told[0] == "video_vae" and told[1] == ORIGINAL:
        weights = _inside(folder, read_json(config).get("source_path", "source"), config)
    else:
        weights = folder
    stored = _from_tensors(weights)
    if told is None:
        found = f"tensors of the {_words(stored)}" if stored else f"{listing(folder)}"
        raise CheckpointError(
            f"{folder}: no known component: config.json is needed and absent or unknown, found {found}"
        )
    if stored is not None and not _agree(told, stored):
        raise CheckpointError(
            f"{folder}: config.json describes the {_words(told)}, but its tensors are those of the {_words(stored)}: "
            "config and weights of two layouts are mixed; take both from the same release folder"
        )
    if stored is None and has_weights(weights):
        first = ", ".join(sorted(tensor_names(weights))[:3])
        raise CheckpointError(
            f"{folder}: config.json describes the {_words(told)}, but no tensor is named so (found {first}, ...)"
        )
    return Component(told[0], told[1], folder, weights)


def _from_config(path: Path) -> tuple[str, str] | None:
    data = read_json(path)
    if data.get("_class_name") == "AutoencoderKLLegacy":
        raise CheckpointError(
            f"{path.parent}: is the inner folder of a video VAE; name its parent, {path.parent.parent}"
        )
    told = {_class(path, name) for name in _declared(path, data)}
    if len(told) > 1:
        raise CheckpointError(f"{path}: _class_name and architectures: name components of two kinds")
    if told:
        return told.pop()
    if data.get("model_type") == "qwen3_vl":
        return "text_encoder", BOTH
    return next((kind for fields, kind in FIELDS if fields <= data.keys()), None)


def _declared(path: Path, data: dict[str, Any]) -> list[Any]:
    """The classes that a config names: diffusers' one, transformers' list."""
    name, architectures = data.get("_class_name"), data.get("architectures")
    if not isinstance(architectures, list | None):
        raise CheckpointError(f"{path}: architectures: a list of names is needed, got {shown(architectures)}")
    return ([] if name is None else [name]) + (architectures or [])


def _class(path: Path, name: Any) -> tuple[str, str]:
    if not isinstance(name, str) or name not in CLASSES:
        raise CheckpointError(f"{path}: class {shown(name)} is unknown; known are {', '.join(CLASSES)}")
    return CLASSES[name]


def _from_tensors(folder: Path) -> tuple[str, str] | None:
    names = set(tensor_names(folder)) if folder.is_dir() else set()
    found = [marker for marker in MARKERS if marker in names]
    if len(found) > 1:
        raise CheckpointError(f"{folder}: holds tensors of two layouts ({found[0]} and {found[1]}); separate them")
    return MARKERS[found[0]] if found else None


def _agree(told: tuple[str, str], stored: tuple[str, str]) -> bool:
    return told[0] == stored[0] and (BOTH in (told[1], stored[1]) or told[1] == stored[1])


def _words(kind: tuple[str, str] | None) -> str:
    if kind is None:
        return "unknown component"
    name = {"transformer": "DiT", "video_vae": "video VAE", "audio_vae": "audio VAE", "text_encoder": "conditioner"}[
        kind[0]
    ]
    return name if kind[1] == BOTH else f"{name} of the {kind[1]} layout"


def _inside(folder: Path, relative: Any, config: Path) -> Path:
    if not isinstance(relative, str) or not relative.isprintable():
        raise CheckpointError(f"{config}: source_path: the name of a folder is needed, got {shown(relative)}")
    target = folder / relative
    if not target.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{config}: source_path: {relative!r} leads out of the folder")
    return target


def small_files(component: Component) -> Iterator[Path]:
    """Config, index, tokenizer and processor files. CheckpointError for what is called so and is no file."""
    for folder in dict.fromkeys((component.folder, component.weights)):
        for path in sorted(folder.iterdir()):
            if path.suffix in SMALL and there(path):
                yield path


def listing(folder: Path) -> str:
    """What lies in a folder, for an error message."""
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "an empty folder"
