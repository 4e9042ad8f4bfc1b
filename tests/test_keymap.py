"""The key map against the released index files, against our own modules, and against SPEC 1.3's formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from tiny import BUILD, tiny_spec, tiny_tensors
from twinreel.spec import Spec
from twinreel.weights import locate, read_spec, stored_bytes
from twinreel.weights.keymap import COMPONENTS, MODULES, canonical, stored_tensors, total_bytes


@pytest.fixture(scope="session")
def released(release: Path) -> Spec:
    """The sizes that the released original-layout config files give."""
    parts = {name: release / "FL2VA" / name for name in COMPONENTS}
    checkpoint = locate(None, {**parts, "tokenizer": release / "tokenizer"}, weights=False)
    return read_spec(checkpoint)


@pytest.mark.parametrize(
    ("component", "layout", "index", "count", "total"),
    [
        ("transformer", "original", "FL2VA/transformer/model", 535, 66_280_430_144),
        ("transformer", "diffusers", "transformer/diffusion_pytorch_model", 638, 66_280_430_080),
        ("text_encoder", "original", "FL2VA/text_encoder/model", 1058, 66_714_780_128),
        ("text_encoder", "diffusers", "FL2VA/text_encoder/model", 1058, 66_714_780_128),
        ("video_vae", "diffusers", "vae/diffusion_pytorch_model", 703, 10_415_475_936),
        ("audio_vae", "original", None, 1087, 605_306_340),
        ("audio_vae", "diffusers", None, 1087, 605_306_340),
    ],
)
def test_released_key_sets_and_byte_totals(
    release: Path, released: Spec, component: str, layout: str, index: str | None, count: int, total: int
) -> None:
    rows = stored_tensors(component, layout, released)
    assert (len(rows), total_bytes(rows)) == (count, total)
    if index is not None:
        file = json.loads((release / f"{index}.safetensors.index.json").read_text())
        assert rows.keys() == file["weight_map"].keys()
        assert total == file["metadata"]["total_size"]


def test_released_counts_of_spec_1(released: Spec) -> None:
    dit = stored_tensors("transformer", "diffusers", released).values()
    assert sum(prod(row.shape) for row in dit) == 33_122_992_896
    assert sum(prod(row.shape) for row in dit if row.island) == 17_222_144
    assert {row.dtype for row in dit if row.island} == {"float32"}
    assert sum(prod(row.shape) for row in dit if "adaln" in row.parameter) == 13_039_369_728
    video = stored_tensors("video_vae", "diffusers", released).values()
    by_module = {name: sum(prod(row.shape) for row in video if row.module == name) for name in BUILD}
    quant = 48 * 48 + 48, 24 * 24 + 24
    assert by_module["video_encoder"] - quant[0] == 180_335_536
    assert by_module["video_decoder"] - quant[1] == 2_423_530_496
    buffers = ("filter", "zero_k_bias")
    audio = stored_tensors("audio_vae", "original", released).values()
    assert sum(prod(row.shape) for row in audio if not row.name.endswith(buffers)) == 151_321_489


def test_counts_of_spec_13_7() -> None:
    spec = tiny_spec()
    for component, count in (("transformer", 267_936), ("video_vae", 1_989_208)):
        assert sum(prod(row.shape) for row in stored_tensors(component, "diffusers", spec).values()) == count


@pytest.mark.parametrize("part", MODULES)
@pytest.mark.parametrize("size", ["tiny", "released"])
def test_the_key_map_is_the_modules_state(request: pytest.FixtureRequest, part: str, size: str) -> None:
    spec = tiny_spec() if size == "tiny" else request.getfixturevalue("released")
    with torch.device("meta"):
        module = BUILD[part](spec)
    state = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    for layout in ("original", "diffusers"):
        rows = [row for row in stored_tensors(MODULES[part], layout, spec).values() if row.module == part]
        assert {row.parameter: row.target_shape for row in rows} == state
    islands = {row.parameter for row in rows if row.island}
    assert {name for name, value in module.state_dict().items() if value.dtype == torch.float32} == islands
    assert stored_bytes(spec, part) == sum(prod(row.shape) * (4 if row.dtype == "float32" else 2) for row in rows)


def test_diffusers_tensors_by_the_formulas() -> None:
    """SPEC 1.3 and 1.5, written out anew: per-head query, key and value rows; gate and value halves exchanged."""
    spec = tiny_spec()
    for component, heads, qkv, out, fc in (
        ("transformer", 2, "blocks.1.attn.qkv_proj.weight", "transformer_blocks.1", "blocks.1.mlp.fc1.weight"),
        ("video_vae", 4, "decoder.transformer_blocks.1.attn.to_qkv.bias", "decoder.transformer_blocks.1",
         "decoder.transformer_blocks.1.ff.w1.bias"),
    ):  # fmt: skip
        ours, theirs = (tiny_tensors(component, layout, spec) for layout in ("original", "diffusers"))
        leaf = qkv.rpartition(".")[2]
        grouped = ours[qkv].reshape(heads, 3, 32, *ours[qkv].shape[1:])
        for index, letter in enumerate("qkv"):
            want = grouped[:, index].reshape(heads * 32, *ours[qkv].shape[1:])
            assert torch.equal(theirs[f"{out}.attn.to_{letter}.{leaf}"], want)
        first, second = ours[fc].chunk(2)
        assert not torch.equal(first, second)
        assert torch.equal(theirs[f"{out}.ff.net.0.proj.{leaf}"], torch.cat([second, first]))
        assert "rope.inv_freq" not in theirs and "decoder.mask_token" not in theirs


def test_weight_norm_spellings() -> None:
    name = "decoder.conv_pre.parametrizations.weight.original"
    assert canonical("audio_vae", f"{name}0") == "decoder.conv_pre.weight_g"
    assert canonical("audio_vae", f"{name}1") == "decoder.conv_pre.weight_v"
    assert canonical("video_vae", f"{name}1") == f"{name}1"


def test_tied_embeddings_need_no_head() -> None:
    spec = tiny_spec()
    tied = replace(spec, text=replace(spec.text, tied_embeddings=True))
    for sizes, optional in ((spec, False), (tied, True)):
        rows = stored_tensors("text_encoder", "original", sizes)
        assert [name for name, row in rows.items() if row.optional] == ["lm_head.weight"] * optional
