"""`verify`: what it says of a sound checkpoint, and that each kind of damage is seen and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinreel import cli
from twinreel.errors import CheckpointError, RequestError
from twinreel.weights import verify

MANIFEST = "twinreel-manifest.json"


@pytest.fixture
def model(tiny_original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_original, tmp_path / "model")


def change_tensor(file: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file)


def test_a_sound_checkpoint(tiny_original: Path, tiny_diffusers: Path) -> None:
    facts = verify(tiny_original)
    assert facts["layout"] == "original" and facts["manifest"].startswith("not compared")
    assert facts["transformer (fl2va)"] == "55 tensors, 575504 bytes, 3 files"
    assert facts["audio_vae"] == "1087 tensors, 6361140 bytes, 1 files"
    theirs = verify(tiny_diffusers)
    assert theirs["transformer (ref2va)"] == "62 tensors, 575488 bytes, 3 files", "rope.inv_freq is not stored there"
    assert json.dumps(facts)


def test_manifest(model: Path) -> None:
    written = verify(model, write_manifest=True)["manifest"]
    listed = json.loads((model / MANIFEST).read_text())["files"]
    assert written == f"written, {len(listed)} files"
    assert {"FL2VA/model_index.json", "FL2VA/tokenizer/vocab.json", "FL2VA/video_vae/source/model.safetensors"} <= set(
        listed
    )
    every = {
        path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file() and path.name != MANIFEST
    }
    assert set(listed) == every
    assert verify(model)["manifest"] == f"matches {len(listed)} files"
    # One value's last bit: shapes, totals and finiteness cannot see it, the hash does.
    change_tensor(
        model / "FL2VA/audio_vae/model.safetensors", "mean_proj.bias", lambda value: value.nextafter(value + 1)
    )
    with pytest.raises(CheckpointError, match="1 problem:\n  FL2VA/audio_vae/model.safetensors: SHA-256"):
        verify(model)
    with pytest.raises(RequestError, match="exists; verify without it"):
        verify(model, write_manifest=True)
    (model / MANIFEST).unlink()
    verify(model, write_manifest=True)
    verify(model)
    (model / "FL2VA" / "tokenizer" / "extra.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"extra.json: not in {MANIFEST}"):
        verify(model)
    (model / MANIFEST).unlink()
    verify(model, write_manifest=True)
    (model / "FL2VA" / "tokenizer" / "extra.json").unlink()
    with pytest.raises(CheckpointError, match="extra.json: in .* not among the files read"):
        verify(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("FL2VA/audio_vae/model.safetensors", "mean_proj.bias"),
        ("FL2VA/text_encoder/model-00001-of-00002.safetensors", "model.language_model.embed_tokens.weight"),
    ],
)
def test_values_that_are_not_finite(model: Path, file: str, name: str, bad: float) -> None:
    def spoil(value: torch.Tensor) -> torch.Tensor:
        value.view(-1)[3:5] = bad
        return value

    change_tensor(model / file, name, spoil)
    with pytest.raises(CheckpointError, match=f"{file}: {name}: 2 values are not finite"):
        verify(model)
    assert not (model / MANIFEST).exists()


def test_stored_rotary_frequencies_are_compared(model: Path) -> None:
    file = next(
        path for path in (model / "FL2VA/transformer").glob("*.safetensors") if "rope.inv_freq" in load_file(path)
    )
    change_tensor(file, "rope.inv_freq", lambda value: value**0.5)
    with pytest.raises(CheckpointError, match="rope.inv_freq ends at 0.0316228, rope_theta 10000 gives 0.001"):
        verify(model)


def test_largest_finite_values_pass(model: Path) -> None:
    top = torch.finfo(torch.float32).max
    change_tensor(
        model / "FL2VA/audio_vae/model.safetensors", "mean_proj.bias", lambda value: torch.full_like(value, top)
    )
    verify(model)


def no_merges(folder: Path) -> None:
    (folder / "merges.txt").write_text("")


def swapped_ids(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = config["added_tokens_decoder"]
    tokens["279"], tokens["280"] = tokens["280"], tokens["279"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"), [(no_merges, "0 merges for 14 tokens"), (swapped_ids, r"<\|vision_start\|> is 280")]
)
def test_the_tokenizer_is_looked_at(model: Path, damage: Callable[[Path], None], message: str) -> None:
    assert verify(model)["tokenizer"] == "303 tokens"
    damage(model / "FL2VA" / "tokenizer")
    with pytest.raises(CheckpointError, match=message):
        verify(model)


def test_the_config_is_held_against_the_tokenizer(model: Path) -> None:
    file = model / "FL2VA" / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_token_id": 0}))
    with pytest.raises(CheckpointError, match=r"<\|image_pad\|> is \d+ in the tokenizer and 0 in the text encoder's"):
        verify(model)


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 5}', '{"files": {"a": 5}}'])
def test_a_manifest_that_is_none(model: Path, text: str) -> None:
    (model / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        verify(model)


@pytest.mark.parametrize("at", ["beforehand", "in the end"])
def test_a_manifest_that_cannot_be_written(
    model: Path, at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, before = {"beforehand": "write_bytes", "in the end": "write_text"}[at], sorted(model.rglob("*"))
    write = getattr(Path, name)

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if MANIFEST in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, name, full)
    assert cli.main(["verify", str(model), "--write-manifest"]) == (2 if at == "beforehand" else 1)
    out, err = capsys.readouterr()
    if at == "beforehand":
        assert not out and "cannot be written (No space left on device)" in err
    else:
        assert "not written (No space left on device)" in out and "all values" in out
    assert sorted(model.rglob("*")) == before


def test_a_manifest_that_was_written_meanwhile_stays(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = json.dumps

    def late(*args: Any, **kwargs: Any) -> str:
        (model / MANIFEST).write_text("of another run")
        return dump(*args, **kwargs)

    monkeypatch.setattr(json, "dumps", late)
    assert verify(model, write_manifest=True)["manifest"] == "not written (File exists)"
    assert (model / MANIFEST).read_text() == "of another run"


def test_the_manifest_has_all_that_is_read_of_a_diffusers_root(tiny_diffusers: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_diffusers, tmp_path / "root")
    verify(root, write_manifest=True)
    listed = json.loads((root / MANIFEST).read_text())["files"]
    every = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.name != MANIFEST}
    assert set(listed) == every
    shutil.copytree(root / "vae", tmp_path / "vae")
    told = verify(root, components={"video_vae": tmp_path / "vae"})["manifest"]
    assert told == f"matches {len(every) - 4} files, 4 more are listed and were not read"
    (root / "audio_scheduler/scheduler_config.json").write_text('{"shift": 4.5}')
    with pytest.raises(CheckpointError, match="audio_scheduler/scheduler_config.json: SHA-256"):
        verify(root)


def test_every_problem_is_collected_and_no_manifest_made(model: Path) -> None:
    change_tensor(model / "FL2VA/audio_vae/model.safetensors", "mean_proj.bias", lambda value: value[:-1].clone())
    index = model / "FL2VA/transformer/model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["metadata"]["total_size"] += 8
    index.write_text(json.dumps(data))
    file = model / "Ref2VA/transformer/model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        verify(model, write_manifest=True)
    text = str(caught.value)
    assert "3 problems" in text
    assert "mean_proj.bias: shape [31], [32] is needed" in text
    assert "total_size is 575512, the shards hold 575504 bytes" in text
    assert "model-00002-of-00003.safetensors: truncated" in text
    assert not (model / MANIFEST).exists()


def test_components_outside_of_the_root(model: Path, tiny_diffusers: Path) -> None:
    facts = verify(model, write_manifest=True, components={"video_vae": tiny_diffusers / "vae"})
    assert facts["layout"] == "mixed"
    assert any(name.endswith("vae/config.json") for name in facts["not in the manifest"])


KINDS = (
    *("FL2VA/model_index.json", "FL2VA/transformer/config.json", "FL2VA/transformer/model.safetensors.index.json"),
    *("FL2VA/transformer/model-00001-of-00003.safetensors", "FL2VA/text_encoder/config.json"),
    *("FL2VA/tokenizer/vocab.json", "FL2VA/tokenizer/merges.txt", "FL2VA/tokenizer/tokenizer_config.json"),
    *("FL2VA/tokenizer/tokenizer.model", "FL2VA/tokenizer/chat_template.jinja", "FL2VA/tokenizer/tokenizer.json"),
    *("FL2VA/processor/preprocessor_config.json", "FL2VA/processor/video_preprocessor_config.json"),
    *("FL2VA/video_vae/source/config.json", "FL2VA/video_vae/source/model.safetensors"),
    *("FL2VA/audio_vae/metadata.json", "FL2VA/audio_vae/config.yaml", "FL2VA/audio_vae/model.safetensors"),
    *("Ref2VA/model_index.json", "Ref2VA/transformer/config.json", MANIFEST),
)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_regular_file_is_named(model: Path, name: str) -> None:
    """Nobody waits for a pipe, and nothing takes its place."""
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
        verify(model)


def test_a_terminal_hears_no_tensor_name(model: Path) -> None:
    file, bad = model / "FL2VA/audio_vae/model.safetensors", "\x1b[31mred\nline"
    save_file(load_file(file) | {bad: torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"'\\x1b\[31mred\\nline' is no name of a tensor") as caught:
        verify(model)
    assert "\x1b" not in str(caught.value)
