"""Finding checkpoints and reading their sizes: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import tiny_spec, write_tiny
from twinreel.errors import CheckpointError
from twinreel.spec import Partition, Spec
from twinreel.weights import locate, read_spec
from twinreel.weights.files import open_weights

SHARED = {"text_encoder", "tokenizer", "processor", "video_vae", "audio_vae"}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


# ---- locate ---------------------------------------------------------------------------------------------------------


def test_both_layouts_are_recognised(tiny_original: Path, tiny_diffusers: Path, tiny_all: Path) -> None:
    for path, layout in ((tiny_original, "original"), (tiny_diffusers, "diffusers")):
        checkpoint = locate(path)
        assert (checkpoint.layout, checkpoint.notes) == (layout, ())
        assert checkpoint.partitions == tiny_spec().partitions
        assert set(checkpoint.components) == SHARED
    single = locate(tiny_all)
    assert single.partitions == (Partition("miniature", ("t2va", "fl2va", "ref2va")),)
    alone = locate(tiny_original / "FL2VA")
    assert [partition.name for partition in alone.partitions] == ["fl2va"]


def test_specs_are_read_back(tiny_original: Path, tiny_diffusers: Path) -> None:
    for path in (tiny_original, tiny_diffusers):
        assert read_spec(locate(path)) == tiny_spec()


def test_released_configs_are_the_defaults(release: Path) -> None:
    parts = {name: release / "FL2VA" / name for name in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    tokenizer = {"tokenizer": release / "tokenizer", "processor": release / "processor"}
    original = read_spec(locate(None, parts | tokenizer, weights=False))
    default = Spec()
    filled = replace(
        default,
        text=replace(default.text, vision=original.text.vision),
        video=replace(default.video, mean=original.video.mean, std=original.video.std),
        audio=replace(default.audio, mean=original.audio.mean, std=original.audio.std),
        partitions=default.partitions[:1],
    )
    assert original == filled
    assert original.video.mean[0] == 0.858090341091156 and original.audio.std[-1] == 1.5613768203168363
    parts |= {"transformer": release / "transformer", "visual_vae": release / "vae", "audio_vae": release / "audio_vae"}
    del parts["video_vae"]
    diffusers = read_spec(locate(None, parts | tokenizer, weights=False))
    # The two files print the same float32 values with other digits (SPEC 1.7).
    assert torch.equal(torch.tensor(diffusers.video.std), torch.tensor(original.video.std))
    assert replace(diffusers, video=original.video) == original


def test_partitions_share_one_copy(tmp_path: Path) -> None:
    root = write_tiny(tmp_path / "copies", copies=True)
    checkpoint = locate(root)
    assert (root / "Ref2VA" / "text_encoder").is_dir()
    assert all(folder.is_relative_to(root / "FL2VA") for folder in checkpoint.folders.values())
    edit(root / "Ref2VA" / "audio_vae" / "config.json", lambda data: data.update(latents_mean=[0.5] * 32))
    with pytest.raises(CheckpointError, match=r"audio_vae.*differ in config\.json; name the one"):
        locate(root)
    assert locate(root, {"audio_vae": root / "Ref2VA" / "audio_vae"}).folders["audio_vae"].parent.name == "Ref2VA"


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("copies"), copies=True)


@pytest.mark.parametrize(
    "name",
    [
        *("audio_vae/metadata.json", "video_vae/source/config.json", "text_encoder/config.json"),
        *("tokenizer/tokenizer_config.json", "tokenizer/merges.txt", "processor/video_preprocessor_config.json"),
        *("processor/preprocessor_config.json", "text_encoder/model.safetensors.index.json"),
    ],
)
def test_copies_that_differ_in_a_small_file(copies: Path, name: str) -> None:
    file = copies / "Ref2VA" / name
    before = file.read_text()
    file.write_text(before + "\n")
    kind, _, inside = name.partition("/")
    with pytest.raises(CheckpointError, match=rf"Ref2VA/{kind} should be the same {kind} and differ in {inside};"):
        locate(copies)
    file.write_text(before)
    locate(copies)


def test_both_layouts_in_one_root(original: Path, tiny_diffusers: Path) -> None:
    shutil.copytree(tiny_diffusers, original, dirs_exist_ok=True)
    checkpoint = locate(original)
    assert checkpoint.layout == "original" and "both layouts" in checkpoint.notes[0]
    for file in original.glob("*/transformer/*.safetensors*"):
        file.unlink()
    assert locate(original).layout == "diffusers"


def test_a_partition_without_weights_is_left_out(original: Path) -> None:
    for file in (original / "Ref2VA" / "transformer").glob("*.safetensors*"):
        file.unlink()
    checkpoint = locate(original)
    assert [partition.name for partition in checkpoint.partitions] == ["fl2va"]
    assert "Ref2VA" in checkpoint.notes[0]


def test_component_folders(tiny_original: Path, tiny_diffusers: Path, tmp_path: Path) -> None:
    first = tiny_original / "FL2VA"
    parts: dict[str, Path] = {name: first / name for name in ("text_encoder", "tokenizer", "audio_vae")}
    parts |= {"transformer_ref": tiny_original / "Ref2VA" / "transformer", "visual_vae": first / "video_vae"}
    checkpoint = locate(None, parts)
    assert checkpoint.partitions == (tiny_spec().partitions[1],)
    assert read_spec(checkpoint).world == tiny_spec().world, "the index beside the DiT is read"
    assert "processor" not in checkpoint.components
    swapped = locate(tiny_original, {"video_vae": tiny_diffusers / "vae"})
    assert swapped.layout == "mixed" and read_spec(swapped) == tiny_spec()
    with pytest.raises(CheckpointError, match="is a audio_vae, a video_vae is needed"):
        locate(tiny_original, {"video_vae": first / "audio_vae"})
    with pytest.raises(CheckpointError, match=r"vocoder: no such component; known are transformer, transformer_ref"):
        locate(tiny_original, {"vocoder": first})
    with pytest.raises(CheckpointError, match=r"missing .*video_vae.*found transformer \(ref2va\), text_encoder"):
        locate(None, {name: folder for name, folder in parts.items() if name != "visual_vae"})
    unnamed = shutil.copytree(first / "transformer", tmp_path / "dit")
    edit(unnamed / "config.json", lambda data: data.pop("_class_name"))
    assert locate(tiny_original, {"transformer": unnamed}).component("dit", "fl2va").layout == "original"


def test_one_layout_in_the_place_of_the_other(original: Path, diffusers: Path) -> None:
    dit, theirs = original / "FL2VA" / "transformer", diffusers / "transformer"
    shutil.rmtree(theirs)
    shutil.copytree(dit, theirs)
    with pytest.raises(CheckpointError, match=r"transformer: is in the original layout, but .* is a diffusers root"):
        locate(diffusers)
    shutil.copy(diffusers / "transformer_ref" / "config.json", theirs / "config.json")
    with pytest.raises(
        CheckpointError, match="describes the DiT of the diffusers layout, but its tensors are those of the"
    ):
        locate(diffusers)
    for file in (diffusers / "transformer_ref").glob("*.safetensors*"):
        shutil.copy(file, dit)
    with pytest.raises(CheckpointError, match="two layouts mixed in one folder"):
        locate(original)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root.mkdir(), r"found an empty folder; needed: a folder with FL2VA/"),
        (lambda root: None, "no such folder"),
        (lambda root: (root / "pictures").mkdir(parents=True), "found pictures/"),
    ],
)
def test_nothing_there(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        locate(tmp_path / "model")


# ---- sizes ----------------------------------------------------------------------------------------------------------

DIT, TEXT = "FL2VA/transformer/config.json", "FL2VA/text_encoder/config.json"
INDEX, VIDEO, AUDIO = "FL2VA/model_index.json", "FL2VA/video_vae/config.json", "FL2VA/audio_vae/config.json"
SOURCE, META = "FL2VA/video_vae/source/config.json", "FL2VA/audio_vae/metadata.json"


@pytest.mark.parametrize(
    ("file", "block", "values", "message"),
    [
        (DIT, "", {"hidden_size": "64"}, "hidden_size: an integer from 1 to 2147483648 is needed, got '64'"),
        (DIT, "", {"rope_inv_freq_len": 6}, "rope_inv_freq_len: 3 axes x 2 x 6 = 36 exceeds attention_head_dim 32"),
        (DIT, "", {"adaln_out_features": 7}, "adaln_out_features: 18 x hidden_size = 1152 is needed, got 7"),
        (DIT, "", {"dtype": "float16"}, "float16 is refused: .* 65,504"),
        (DIT, "", {"text_dim": 40}, "Ref2VA/transformer/config.json: text_dim: differ from .*FL2VA/"),
        (TEXT, "text_config", {"num_hidden_layers": 3}, "text_config.num_hidden_layers: 3 layers, but layer 4's"),
        (TEXT, "text_config", {"num_key_value_heads": 3}, "3 do not divide 4 heads"),
        (TEXT, "", {"video_token_id": 320}, "video_token_id: 320 is outside of vocab_size 320"),
        (TEXT, "vision_config", {"deepstack_visual_indexes": [1, 4]}, "reach beyond depth 4"),
        (TEXT, "vision_config", {"out_hidden_size": 49}, "vision_config.out_hidden_size: 49 is not"),
        (VIDEO, "", {"latents_mean": [0.0] * 23}, "latents_mean: 24 numbers are needed .*, got 23"),
        (VIDEO, "", {"vae_clip_length": 16}, "vae_clip_length: clips of 17 frames"),
        ("FL2VA/video_vae/source/config.json", "", {"ch": 40}, "do not divide into 32 groups"),
        ("FL2VA/video_vae/source/config.json", "", {"padding_mode": "zeros"}, "only 'reflect' is supported"),
        (TEXT, "text_config", {"hidden_act": "relu"}, "text_config.hidden_act: only 'silu' is supported, got 'relu'"),
        (TEXT, "text_config", {"attention_bias": True}, "attention_bias: only False is supported, got True"),
        (TEXT, "text_config.rope_scaling", {"rope_type": "yarn"}, "rope_scaling.rope_type: only 'default'"),
        (
            TEXT,
            "text_config",
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "yarn"}},
            "rope_parameters.rope_type",
        ),
        (TEXT, "text_config", {"rope_parameters": {"mrope_section": [8, 0, 0]}}, "contradicts rope_scaling"),
        (TEXT, "text_config", {"model_type": "qwen3"}, "only 'qwen3_vl_text' is supported"),
        (TEXT, "text_config", {"rms_norm_eps": 3}, "rms_norm_eps: a finite number from 1e-15 to 0.1"),
        (TEXT, "text_config.rope_scaling", {"mrope_section": [1, 5, 2]}, "at most a third"),
        (TEXT, "vision_config", {"hidden_act": "relu"}, "vision_config.hidden_act: only 'gelu_pytorch_tanh'"),
        (TEXT, "vision_config", {"deepstack_visual_indexes": [1, 1, 2]}, "ascending is needed"),
        (TEXT, "", {"image_token_id": 283}, "_id: 283 is the id of another vision token too"),
        (TEXT, "", {"_class_name": "MiniMaxH3DiTModel"}, "name components of two kinds"),
        (TEXT, "", {"architectures": [[]]}, r"class \[\] is unknown; known are"),
        (DIT, "", {"_class_name": []}, r"class \[\] is unknown; known are"),
        (DIT, "", {"_class_name": "FluxTransformer2DModel"}, "class 'FluxTransformer2DModel' is unknown"),
        ("FL2VA/processor/preprocessor_config.json", "", {"resample": 2}, "resample: only 3 is supported, got 2"),
        ("FL2VA/processor/preprocessor_config.json", "", {"rescale_factor": 1.0}, "rescale_factor: only 0.0039"),
        ("FL2VA/processor/video_preprocessor_config.json", "", {"do_resize": False}, "do_resize: only True"),
        (VIDEO, "", {"vae_decoder_tiling": 0}, "vae_decoder_tiling: only 1 is supported, got 0"),
        (VIDEO, "", {"source_path": "../.."}, "leads out of the folder"),
        (VIDEO, "", {"source_path": []}, "source_path: the name of a folder is needed"),
        (VIDEO, "", {"latents_std": [0.0] * 24}, "latents_std: finite numbers from 1e-06"),
        (SOURCE, "", {"zq_ch_encoder": 4}, "zq_ch_encoder: only None is supported, got 4"),
        (SOURCE, "", {"vae_ratio": 8}, "vae_ratio: only 16 is supported"),
        (SOURCE, "", {"num_res_blocks": 10**9}, "num_res_blocks: an integer from 1 to 1024"),
        (SOURCE, "vit_decoder_kwargs", {"norm_eps": 1e-3}, "vit_decoder_kwargs.norm_eps: unknown; known are"),
        (AUDIO, "", {"output_channel": 1}, "output_channel: only 2 is supported"),
        (AUDIO, "", {"latents_std": None}, "latents_std: 32 numbers are needed .*, got nothing"),
        (META, "metadata.kwargs", {"decoder_kernel_sizes": [8, 9, 4, 4, 4, 4, 4]}, "a kernel of 8 does not multiply"),
        (META, "metadata.kwargs", {"resblock_kernel_sizes": [3, 6, 11]}, "odd numbers are needed, got 6"),
        (META, "metadata.kwargs", {"snake": False}, "metadata.kwargs.snake: unknown"),
        (META, "metadata.kwargs", {"encoder_rates": [2, 4, 4, 5, 4]}, "a product of 640"),
        (INDEX, "_twinreel", {"min_seconds": 7.0}, "_twinreel.min_seconds: 0.9 contradicts 7.0 of .*FL2VA/"),
        (INDEX, "_twinreel", {"canvas": 7}, "_twinreel.canvas: unknown; known are hidden_layer"),
        (INDEX, "_twinreel", {"short_edge": 31}, "_twinreel.short_edge: 64 contradicts 31"),
        (INDEX, "_minimax_h3", {"tasks": "t2va"}, "_minimax_h3.tasks: a list of names is needed, got 't2va'"),
        (INDEX, "_minimax_h3", {"schema_version": 2}, "schema_version: only 1 is supported, got 2"),
        (INDEX, "_minimax_h3", {"tasks": ["i2va"]}, "'i2va' is none of t2va, fl2va, ref2va"),
        (INDEX, "_minimax_h3.sigma_shift_scales", {"video": 5.0}, r"contradicts \(5.0, 3.0\)"),
    ],
)
def test_contradicting_sizes(original: Path, file: str, block: str, values: Mapping[str, Any], message: str) -> None:
    def change(data: dict[str, Any]) -> None:
        for name in filter(None, block.split(".")):
            data = data[name]
        data.update(values)

    edit(original / file, change)
    with pytest.raises(CheckpointError, match=message):
        read_spec(locate(original))


def test_contradictions_inside_one_partition(original: Path) -> None:
    single = original / "FL2VA"
    edit(single / "model_index.json", lambda data: data["_twinreel"].update(min_seconds=7.0))
    with pytest.raises(CheckpointError, match="_twinreel.min_seconds: 7.0 exceeds max_seconds 6.0"):
        read_spec(locate(single))
    edit(single / "model_index.json", lambda data: data["_twinreel"].update(min_seconds=0.9))
    edit(single / "transformer" / "config.json", lambda data: data.update(text_dim=40))
    with pytest.raises(CheckpointError, match="config.json: text_dim: 40, but .*text_encoder has 48"):
        read_spec(locate(single))


def test_config_yaml_is_compared(original: Path) -> None:
    file = original / "FL2VA" / "audio_vae" / "config.yaml"
    file.write_text("model_config:\n  sr: 32000\n  decoder_dim: 128\n  audio_channel: 1\n  vae_latent_channels: 32\n")
    read_spec(locate(original))
    file.write_text(file.read_text().replace("128", "256"))
    with pytest.raises(CheckpointError, match=r"config\.yaml: decoder_dim: 256 contradicts 128"):
        read_spec(locate(original))


@pytest.mark.parametrize("name", ["../victim", "/tmp/victim", "a/b", "a/", "", ".", "..", "\n", 5, None])
def test_the_name_of_a_partition_is_plain(original: Path, diffusers: Path, name: Any) -> None:
    """It becomes the name of a folder."""
    declared = {"transformer": {"name": name, "tasks": ["t2va"]}}
    edit(diffusers / "model_index.json", lambda data: data["_twinreel"].update(partitions=declared))
    edit(original / INDEX, lambda data: data["_minimax_h3"].update(partition=name))
    for root, field in ((diffusers, "_twinreel.partitions.transformer.name"), (original, "_minimax_h3.partition")):
        with pytest.raises(CheckpointError, match=rf"{field}: a plain name is needed, got"):
            locate(root)


def test_an_index_without_shifts_says_nothing_of_them(original: Path) -> None:
    for index in (original / INDEX, original / "Ref2VA/model_index.json"):
        edit(index, lambda data: data["_minimax_h3"]["sigma_shift_scales"].update(video=10, audio=2))
    edit(original / INDEX, lambda data: data["_minimax_h3"].pop("sigma_shift_scales"))
    assert read_spec(locate(original)).world.shifts == (10, 2)
    assert read_spec(locate(original / "FL2VA")).world.shifts == (12, 3)


def test_diffusers_root_may_declare_its_partitions(diffusers: Path) -> None:
    shutil.rmtree(diffusers / "transformer_ref")
    declared = {"transformer": {"name": "all", "tasks": ["t2va", "fl2va", "ref2va"]}}
    edit(diffusers / "model_index.json", lambda data: data["_twinreel"].update(partitions=declared))
    spec = read_spec(locate(diffusers))
    assert spec.partitions == (Partition("all", ("t2va", "fl2va", "ref2va")),)
    (diffusers / "scheduler" / "scheduler_config.json").write_text('{"shift": 6.0}')
    assert read_spec(locate(diffusers)).world.shifts == (6.0, 3.0)


def test_a_damaged_config_does_not_ask_for_a_billion_layers(tiny_original: Path, tmp_path: Path) -> None:
    original = shutil.copytree(tiny_original, tmp_path / "m")
    edit(
        original / "FL2VA/video_vae/source/config.json",
        lambda data: data["vit_decoder_kwargs"].update(num_layers=10**9),
    )
    with pytest.raises(CheckpointError, match="num_layers: an integer from 1 to 1024 is needed"):
        read_spec(locate(original))


NAMED = '"_class_name": "MiniMaxH3DiTModel"'
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("[]", "holds list, a JSON object is needed"),
        (f'{{"hidden_size": {DEEP}}}', "is nested too deeply"),
        (f'{{{NAMED}, "hidden_size": {"[" * 400 + "]" * 400}}}', "hidden_size: an integer from 1"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        (f'{{{NAMED}, "hidden_size": "{"9" * 5000}"}}', r"got '9{20,30}\.\.\.9{20,30}'$"),
        ('{"hidden_size": 64, "hidden_size": 32}', "'hidden_size' stands twice in one object"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_config(original: Path, text: str | bytes, message: str) -> None:
    (original / DIT).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=rf"transformer/config\.json: .*{message}"):
        read_spec(locate(original))


@pytest.mark.parametrize("part", ["FL2VA", "FL2VA/transformer", "FL2VA/text_encoder", "FL2VA/tokenizer", "Ref2VA"])
def test_a_folder_without_rights(original: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way into it is refused, as it is to whoever is not root."""
    plain = os.stat

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and original / part in Path(os.fspath(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    with pytest.raises(CheckpointError, match=f"{part}/.*: cannot be read .Permission denied.; check"):
        read_spec(locate(original))


def test_names_too_long(original: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^/x{254}: cannot be read \(File name too long\)"):
        locate(f"/{'x' * 5000}")
    with pytest.raises(CheckpointError, match="File name too long"):
        locate(original, {"video_vae": "y" * 5000})


def test_a_pipe_among_the_weights_does_not_keep_us_waiting(tiny_original: Path, tmp_path: Path) -> None:
    original = shutil.copytree(tiny_original, tmp_path / "m")
    shard = original / "FL2VA/audio_vae/model.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is no regular file"):
        open_weights(shard.parent)
