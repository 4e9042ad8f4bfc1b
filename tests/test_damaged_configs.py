"""Config files with one field changed: the same model, a read one, or CheckpointError; never another error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinreel.errors import CheckpointError
from twinreel.spec import Spec
from twinreel.weights import Checkpoint, fields, locate, read_spec, recognise
from twinreel.weights.files import open_weights
from twinreel.weights.keymap import canonical_names, stored_tensors
from twinreel.weights.tensors import compare

Config = dict[str, Any]
GONE = object()
OTHERS: tuple[Any, ...] = (-1, 0, 10**9, 10**400, 0.5, float("nan"), True, False, "x", None, [], [[]], {"a": 1}, GONE)
NOTHING: tuple[Any, ...] = (None, [], {}, GONE)  # says no more than an absent field
# Of no consequence for what a request computes: versions, training, classes that the component's own config repeats.
INERT = {
    *("_diffusers_version", "auto_map", "transformers_version", "_blocks_class_name", "mode"),
    *("initializer_range", "attention_dropout", "max_position_embeddings", "processor_class", "task_aliases"),
    *("bos_token_id", "eos_token_id", "use_cache"),
    *("source_safetensors_path", "num_res_blocks_decoder", "space_up", "time_up"),
    *("vae_parallel_tiling", "vae_encoder_parallel", "vae_decoder_parallel"),
}
INERT_IN_INDEX = {"_class_name", "scheduler", "audio_scheduler", "transformer", "transformer_ref", "vae"} | {
    *("text_encoder", "tokenizer", "processor", "video_vae", "audio_vae"),
}
# Read, and told by no tensor's shape.
FREE = {
    *("norm_eps", "qk_norm_eps", "final_norm_eps", "rms_norm_eps", "decoder_norm_eps", "norm_num_groups"),
    *("rope_theta", "decoder_rope_theta", "rope_dim_ratio", "decoder_rope_dim_ratio", "mrope_section"),
    *("num_heads", "num_attention_heads", "num_key_value_heads", "decoder_num_attention_heads"),
    *("resblock_dilation_sizes", "decoder_rates", "deepstack_visual_indexes"),
    *("latents_mean", "latents_std", "image_mean", "image_std", "size", "shortest_edge", "longest_edge"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings"),
    *("vae_tile_size", "vae_tile_overlap_min", "shift", "video", "audio", "partition", "tasks", "_minimax_h3"),
    *("hidden_layer", "short_edge", "area_cap", "reference_edge", "_twinreel"),
    *("min_seconds", "max_seconds", "min_clip_seconds", "max_clip_seconds"),
}


def leaves(data: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in data.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))


def changed(data: Config, path: tuple[str, ...], value: Any) -> Config:
    data = copy.deepcopy(data)
    block = data
    for name in path[:-1]:
        block = block[name]
    block.pop(path[-1]) if value is GONE else block.update({path[-1]: value})
    return data


def configs(root: Path) -> dict[Path, Config]:
    """Every config file by path, those of the tokenizer and the weight indexes apart."""
    apart = ("vocab.json", "tokenizer_config.json")
    files = [file for file in root.rglob("*.json") if file.name not in apart and "safetensors" not in file.name]
    return {file: json.loads(file.read_text()) for file in sorted(files)}


class Shelf:
    """A checkpoint whose config files are held in memory, and what its weight files hold."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = configs(root)
        for module in (fields, recognise):
            monkeypatch.setattr(module, "read_json", lambda path: self.files[path])
        self.root, self.checkpoint = root, locate(root)
        self.good = read_spec(self.checkpoint)
        self.components = [*self.checkpoint.dits.values(), *self.checkpoint.components.values()]
        self.components = [each for each in self.components if each.kind not in ("tokenizer", "processor")]
        self.entries = [open_weights(each.weights).entries for each in self.components]

    def read(self, file: Path, data: Config, again: bool) -> Spec:
        """The sizes with `file` holding `data`; `again` looks for the components anew."""
        held, self.files[file] = self.files[file], data
        try:
            found: Checkpoint = locate(self.root) if again else self.checkpoint
            return read_spec(found)
        finally:
            self.files[file] = held

    def fits(self, spec: Spec) -> bool:
        for component, entries in zip(self.components, self.entries, strict=True):
            names = canonical_names(component.kind, entries, component.weights)
            stored = {names[name]: entry for name, entry in entries.items()}
            if compare(stored, stored_tensors(component.kind, component.layout, spec)):
                return False
        return True


LOCATED = {"_class_name", "architectures", "model_type", "source_path", "_minimax_h3", "partition", "tasks"}


@pytest.mark.parametrize("layout", ["tiny_original", "tiny_diffusers"])
def test_every_field(layout: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(request.getfixturevalue(layout), monkeypatch)
    silent, count = [], 0
    for file, data in shelf.files.items():
        if file.parent.name in ("Ref2VA", "transformer_ref") or file.parent.parent.name == "Ref2VA":
            continue  # another partition of the same kind
        inert = INERT | (INERT_IN_INDEX if file.name == "model_index.json" else set())
        for path in leaves(data):
            name, held = path[-1], data
            for part in path:
                held = held[part]
            again = not LOCATED.isdisjoint(path)
            for value in (value for value in OTHERS if not (again and isinstance(value, float | bool))):
                where = f"{file.relative_to(shelf.root)}: {'.'.join(path)} = {value!r}"
                try:
                    spec = shelf.read(file, changed(data, path, value), again)
                except CheckpointError as error:
                    assert len(str(error)) < 1500, where
                    continue
                count += 1
                if spec == shelf.good:
                    same = value == held and isinstance(value, bool) == isinstance(held, bool)
                    if not (same or value in NOTHING or inert.intersection(path)):
                        silent.append(where)
                elif name not in FREE and shelf.fits(spec):
                    silent.append(f"{where}: another model that fits the weights")
    assert not silent, "\n".join(silent)
    assert count > 100
