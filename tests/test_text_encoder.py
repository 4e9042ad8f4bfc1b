"""The conditioner's own promises: positions, names, dtypes, buffers and memory. Bits are compared in parity/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinreel.models.mrope import positions, rope_tables, type_runs
from twinreel.models.text_encoder import RMSNorm, TextEncoder
from twinreel.spec import TextSpec

VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
    "model_type": "qwen3_vl",
}
SPEC = TextSpec(
    hidden=32, intermediate=48, layers=5, hidden_layer=4, heads=4, kv_heads=2, head_dim=16, vocab=40,
    mrope_section=(4, 2, 2), vision=VISION,
)  # fmt: skip


def filled(spec: TextSpec, dtype: torch.dtype) -> TextEncoder:
    """An encoder with random weights, on the CPU."""
    encoder = TextEncoder(spec, dtype)
    draw = torch.Generator().manual_seed(1)
    for _, value in sorted(encoder.named_parameters()):
        value.data = (torch.randn(value.shape, generator=draw) * 0.3).to(dtype)
    return encoder.requires_grad_(False)


def test_positions_of_the_contract() -> None:
    """SPEC 13.5: an image, two video slices as runs of their own, and one more."""
    types = [0] * 4 + [1] * 6 + [0] * 4 + [2] * 4 + [0] * 4 + [2] * 4 + [0] * 4
    table = positions(types, [(2, 3), (2, 2), (2, 2)])
    t = [0, 1, 2, 3] + [4] * 6 + [7, 8, 9, 10] + [11] * 4 + [13, 14, 15, 16] + [17] * 4 + [19, 20, 21, 22]
    assert table.dtype == torch.int64 and table[0].tolist() == t
    assert table[1, 4:10].tolist() == [4, 4, 4, 5, 5, 5] and table[2, 4:10].tolist() == [4, 5, 6, 4, 5, 6]
    text = [i for i, kind in enumerate(types) if kind == 0]
    assert torch.equal(table[1, text], table[0, text]) and torch.equal(table[2, text], table[0, text])


def test_a_run_that_is_not_its_grid_is_an_error() -> None:
    with pytest.raises(AssertionError, match="as long as its merged grid"):
        positions([0, 1, 1, 1, 0], [(2, 2)])
    with pytest.raises(AssertionError, match="every grid has its run"):
        positions([0, 0], [(2, 2)])


def test_type_runs() -> None:
    assert list(type_runs([0, 0, 2, 0])) == [(0, 0, 2), (2, 2, 1), (0, 3, 1)]
    assert list(type_runs([])) == []


def test_rope_frequencies_are_shared_out_by_three() -> None:
    """Released sizes: frequency j turns with h for j % 3 == 1 below 60, with w for j % 3 == 2 below 60, else with t."""
    ids = torch.tensor([[5], [700], [9000]])
    cos, sin = rope_tables(ids, 128, 5e6, (24, 20, 20), torch.float32)
    frequencies = 5e6 ** (-2 * torch.arange(64, dtype=torch.float64) / 128)
    axis = [ids[j % 3 if j < 60 else 0].item() for j in range(64)]
    angles = (torch.tensor(axis, dtype=torch.float64) * frequencies).repeat(2)
    assert torch.allclose(cos[0].double(), angles.cos(), atol=2e-3)
    assert torch.allclose(sin[0].double(), angles.sin(), atol=2e-3)
    narrow = rope_tables(ids, 128, 5e6, (24, 20, 20), torch.bfloat16)
    assert torch.equal(narrow[0], cos.bfloat16()) and torch.equal(narrow[1], sin.bfloat16())


def test_rms_norm_rounds_twice() -> None:
    norm = RMSNorm(64, 1e-6, torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    norm.weight.data = torch.randn(64, generator=draw).bfloat16()
    x = torch.randn(50, 64, generator=draw).bfloat16()
    plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    got = norm(x)
    assert torch.equal(got, plain.bfloat16() * norm.weight)
    assert not torch.equal(got, (plain * norm.weight.float()).bfloat16())


def test_names_and_bytes_are_the_released_index(release: Path) -> None:
    """Built at released size on the meta device: the tensors of the index, but those of SPEC 3.5 that are never run."""
    config = json.loads((release / "FL2VA/text_encoder/config.json").read_text())
    index = json.loads((release / "FL2VA/text_encoder/model.safetensors.index.json").read_text())
    spec = TextSpec(vision=config["vision_config"])
    with torch.device("meta"):
        encoder = TextEncoder(spec, torch.bfloat16)
    state = encoder.state_dict()
    assert all(value.is_meta and value.dtype == torch.bfloat16 for value in state.values())
    deeper = tuple(f"model.language_model.layers.{i}." for i in range(spec.hidden_layer, spec.layers))
    unused = ("lm_head.", "model.language_model.norm.", *deeper)
    assert {f"model.{name}" for name in state} == {name for name in index["weight_map"] if not name.startswith(unused)}
    layer = sum(value.nbytes for name, value in state.items() if name.startswith("language_model.layers.0."))
    embedding = state["language_model.embed_tokens.weight"].nbytes
    skipped = 2 * spec.hidden + embedding + (spec.layers - spec.hidden_layer) * layer
    assert sum(value.nbytes for value in state.values()) + skipped == index["metadata"]["total_size"] == 66_714_780_128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_right_however_it_was_built(dtype: torch.dtype) -> None:
    """Straight on the CPU; on meta and assigned; on meta, made empty and copied into: all the same float32 values."""
    straight = filled(SPEC, dtype)
    with torch.device("meta"):
        assigned, copied = TextEncoder(SPEC, dtype), TextEncoder(SPEC, dtype)
    assigned.load_state_dict(straight.state_dict(), assign=True)
    assigned.init_buffers("cpu")
    copied.to_empty(device="cpu").load_state_dict(straight.state_dict())
    copied.init_buffers("cpu")
    expected = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8))
    for encoder in (straight, assigned, copied):
        buffers = dict(encoder.named_buffers())
        assert buffers and not set(buffers) & set(encoder.state_dict())
        assert all(value.dtype == torch.float32 and torch.equal(value, expected) for value in buffers.values())


def test_building_draws_nothing_on_meta() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.device("meta"):
        TextEncoder(SPEC, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_images_and_videos_each_reach_their_own_pads() -> None:
    """Changing one input moves no row before its pads: attention is causal and features keep their order."""
    encoder = filled(SPEC, torch.float32)
    types = torch.tensor([0, 2, 2, 0, 1, 0, 2, 2, 0])  # a video of one slice, an image, a video of one slice
    ids = torch.arange(9)
    draw = torch.Generator().manual_seed(2)
    inputs = [
        (torch.randn(grid[1] * grid[2], 1536, generator=draw), grid) for grid in ((1, 2, 4), (1, 2, 2), (1, 4, 2))
    ]
    plain = encoder(ids, types, inputs)
    for number, first in enumerate((1, 4, 6)):
        changed = list(inputs)
        changed[number] = (inputs[number][0].flip(0), inputs[number][1])
        moved = (encoder(ids, types, changed) - plain).abs().amax(1) > 1e-4
        assert moved.nonzero().min() == first


def test_patches_are_read_one_input_at_a_time() -> None:
    """The vision argument may be a generator; nothing asks for it twice and ids keep their values."""
    encoder = filled(SPEC, torch.bfloat16)
    types, ids = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([1, 2, 3, 2, 4])
    items = [(torch.full((4, 1536), 0.1 * n), (1, 2, 2)) for n in (1, 2)]
    with torch.inference_mode():
        out = encoder(ids, types, (item for item in items))
    assert out.shape == (5, 32) and out.dtype == torch.bfloat16 and out.isfinite().all()
    assert ids.tolist() == [1, 2, 3, 2, 4]


def test_pads_without_pixels_are_an_error() -> None:
    encoder, ids = filled(SPEC, torch.float32), torch.arange(5)
    with pytest.raises(AssertionError, match="pads without a vision input"):
        encoder(ids, torch.tensor([0, 1, 0, 0, 0]))
    with pytest.raises(AssertionError, match="fills pads of one type"):
        encoder(ids, torch.tensor([0, 1, 0, 2, 0]), [(torch.ones(8, 1536), (2, 2, 2))])


def test_fewer_layers_than_deepstack_levels() -> None:
    encoder = filled(replace(SPEC, hidden_layer=2), torch.float32)
    item = (torch.ones(4, 1536), (1, 2, 2))
    assert encoder(torch.arange(3), torch.tensor([0, 1, 0]), [item]).shape == (3, 32)
