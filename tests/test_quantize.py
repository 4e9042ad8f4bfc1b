"""`twinreel quantize`: the bits of quantizing at load, read strictly, whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8_cases import dit_of, engine, same_weights
from tiny import write_tiny
from twinreel.errors import CheckpointError, ConfigError, RequestError
from twinreel.spec import Spec
from twinreel.weights import locate, read_spec, verify
from twinreel.weights.quantize import quantize

ALL = "fp8:blocks=0"


def test_a_quantized_checkpoint_is_whole_and_has_the_bits_of_quantizing_at_load(
    tiny_original: Path, tiny_narrow: Path
) -> None:
    facts = verify(tiny_narrow, write_manifest=True)
    assert "written" in facts["manifest"] and "matches" in verify(tiny_narrow)["manifest"]
    assert read_spec(locate(tiny_narrow)).dit == replace(read_spec(locate(tiny_original)).dit, fp8_edge=0)
    ours, theirs = (dit_of(engine(path, ALL)) for path in (tiny_original, tiny_narrow))
    assert same_weights(ours, theirs)
    dtypes = {name: x.dtype for name, x in ours.state_dict().items()}
    assert sum(dtype == torch.float8_e4m3fn for dtype in dtypes.values()) == 8
    assert {dtype for name, dtype in dtypes.items() if "refiner" in name or "norm" in name} == {torch.bfloat16}


def test_both_layouts_quantize_alike(tiny_original: Path, tiny_diffusers: Path, tmp_path: Path) -> None:
    ours = dit_of(engine(tiny_original, ALL))
    assert same_weights(ours, dit_of(engine(tiny_diffusers, ALL)))
    facts = quantize(tiny_diffusers, tmp_path / "made", 0, print)
    component = {"transformer": facts["transformers"][0], "transformer_ref": facts["transformers"][1]}
    assert same_weights(ours, dit_of(engine(tiny_diffusers, ALL, components=component)))
    assert "left where it is" in facts["shared"]
    verify(tiny_diffusers, components=component)


@pytest.mark.parametrize(
    ("slots", "shifts"),
    [(("transformer", "transformer_ref"), (10, 2)), (("transformer_ref",), (12, 3)), (("transformer",), (10, 2))],
)
def test_a_diffusers_root_runs_as_told(
    diffusers: Path, tmp_path: Path, slots: tuple[str, ...], shifts: tuple[float, float]
) -> None:
    for slot in {"transformer", "transformer_ref"} - set(slots):
        shutil.rmtree(diffusers / slot)
    for name, shift in zip(("scheduler", "audio_scheduler"), shifts, strict=True):
        (diffusers / name / "scheduler_config.json").write_text(json.dumps({"shift": shift}))
    words = shlex.split(quantize(diffusers, tmp_path / "made", 0, print)["use"])
    components = dict(word.split("=", 1) for word in words if word.startswith("transformer"))
    assert tuple(components) == slots
    spec, theirs = read_spec(locate(words[3], components)), read_spec(locate(diffusers))
    assert replace(spec, dit=replace(spec.dit, fp8_edge=None)) == theirs and spec.world.shifts == shifts


@pytest.mark.parametrize("when", ["before the end", "between"])
def test_of_two_runs_of_one_target_one_is_refused(tiny_original: Path, tmp_path: Path, when: str) -> None:
    """Each has a folder of its own, and one that was killed has left another."""
    (tmp_path / "made.part").mkdir()
    first: list[dict[str, Any]] = []

    def tell(file: str) -> None:
        if not first and ("Ref2VA" in file) == (when == "between"):
            first.append({})
            first[0] = quantize(tiny_original, tmp_path / "made", 0, lambda file: None)

    with pytest.raises(RequestError, match="made was made by another run meanwhile"):
        quantize(tiny_original, tmp_path / "made", 0, tell)
    assert first[0]["path"] == str(tmp_path / "made")
    verify(tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.part"]


def test_fewer_blocks_in_bf16_than_the_checkpoint_keeps(tmp_path: Path) -> None:
    spec = tiny_of_five_layers()
    plain = write_tiny(tmp_path / "plain", spec=spec)
    quantize(plain, tmp_path / "made", 2, print)
    for precision in ("fp8:blocks=2", "fp8:blocks=1", ALL):
        assert same_weights(*(dit_of(engine(path, precision)) for path in (plain, tmp_path / "made"))), precision


def tiny_of_five_layers() -> Spec:
    from twinreel.demo.tiny import tiny_spec

    spec = tiny_spec()
    return replace(spec, dit=replace(spec.dit, layers=5))


DIT = "FL2VA/transformer"
SCALE = "blocks.0.mlp.fc1.weight_scale"


def damage_weights(path: Path, change: Any) -> None:
    file = next((path / DIT).glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def damage_config(path: Path, change: Any) -> None:
    file = path / DIT / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "change", "words"),
    [
        (damage_weights, lambda t: t.pop(SCALE), f"{SCALE}: missing"),
        (damage_weights, lambda t: t.update({"blocks.0.norm1.weight_scale": torch.ones(64, 1)}), "left over"),
        (
            damage_weights,
            lambda t: t.update({"blocks.0.mlp.fc1.weight": t["blocks.0.mlp.fc1.weight"].bfloat16()}),
            "dtype bfloat16, float8_e4m3fn is needed",
        ),
        (damage_config, lambda c: c.pop("_twinreel_fp8"), "differ from"),
        (damage_config, lambda c: c["_twinreel_fp8"].update(schema_version=2), "schema_version"),
        (damage_config, lambda c: c["_twinreel_fp8"].update(blocks=1), "blocks: an integer from 0 to 0"),
        (damage_config, lambda c: c["_twinreel_fp8"].pop("blocks"), "blocks"),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_is_read_strictly(
    tiny_narrow: Path, tmp_path: Path, damage: Any, change: Any, words: str
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(tiny_narrow, path)
    (path / "twinreel-manifest.json").unlink(missing_ok=True)
    damage(path, change)
    with pytest.raises(CheckpointError, match=words):
        verify(path)


def test_no_number_among_e4m3_values_is_found(tiny_narrow: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(tiny_narrow, path)
    (path / "twinreel-manifest.json").unlink(missing_ok=True)

    def change(tensors: Any) -> None:
        tensors["blocks.1.mlp.fc2.weight"].view(torch.uint8)[3, 4] = 0xFF

    damage_weights(path, change)
    with pytest.raises(CheckpointError, match="fc2.weight: 1 values are not finite"):
        verify(path)


def test_what_is_not_written(tiny_original: Path, tiny_narrow: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize(tiny_narrow, tmp_path / "made", 0, print)
    with pytest.raises(ConfigError, match="leaves none of 2"):
        quantize(tiny_original, tmp_path / "made", 1, print)
    with pytest.raises(RequestError, match="exists; name a new folder"):
        quantize(tiny_original, tmp_path, 0, print)
    with pytest.raises(RequestError, match="make it first"):
        quantize(tiny_original, tmp_path / "a" / "b", 0, print)
    (tmp_path / "nowhere").symlink_to("none")
    with pytest.raises(RequestError, match="exists; name a new folder"):
        quantize(tiny_original, tmp_path / "nowhere", 0, print)
    (tmp_path / "nowhere").unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1.weight", "blocks.0.norm1.weight", "rope.inv_freq"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite(original: Path, tmp_path: Path, name: str, bad: float) -> None:
    """In linears that become e4m3 and elsewhere."""
    for file in (original / DIT).glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[0] = bad
            save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"{name}: holds values that are not finite"):
        quantize(original, tmp_path / "made", 0, print)
    assert [path.name for path in tmp_path.iterdir()] == ["original"], "whole or not at all"


def test_shared_files_are_copies_that_may_be_edited(tiny_original: Path, tmp_path: Path) -> None:
    facts = quantize(tiny_original, tmp_path / "it's made", 0, print)
    theirs = {path.relative_to(tmp_path / "it's made") for path in (tmp_path / "it's made").rglob("*")}
    assert {path.relative_to(tiny_original) for path in tiny_original.glob("FL2VA/[!t]*/**/*")} <= theirs
    for path in (tmp_path / "it's made").rglob("*.json"):
        assert path.stat().st_nlink == 1, path
    assert shlex.split(facts["use"])[3] == str(tmp_path / "it's made")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: (root / "FL2VA/tokenizer/merges.txt").unlink(), "merges.txt: cannot be read"),
        (
            lambda root: (root / "FL2VA/processor/preprocessor_config.json").unlink(),
            "preprocessor_config.json is needed",
        ),
        (lambda root: os.truncate(root / "FL2VA/audio_vae/model.safetensors", 99), "truncated or damaged"),
        (lambda root: os.mkfifo(root / "FL2VA/text_encoder/notes.txt"), "notes.txt: is no regular file"),
        (lambda root: (root / "FL2VA/video_vae/more").symlink_to("nowhere"), "more: is a link that leads nowhere"),
    ],
)
def test_a_source_that_is_not_whole(tiny_original: Path, tmp_path: Path, damage: Any, words: str) -> None:
    source = shutil.copytree(tiny_original, tmp_path / "source")
    damage(source)
    with pytest.raises(CheckpointError, match=words):
        quantize(source, tmp_path / "made", 0, print)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
