"""The conditioner against transformers' Qwen3-VL: `hidden_states[hidden_layer]`, bit for bit on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from twinreel.models.text_encoder import IMAGE, VIDEO, Grid, TextEncoder  # noqa: E402
from twinreel.spec import TextSpec  # noqa: E402

IMAGE_PAD, VIDEO_PAD, START, END, VOCAB = 61, 62, 59, 60, 64
VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "model_type": "qwen3_vl",
}
SPEC = TextSpec(
    hidden=64,
    intermediate=96,
    layers=6,
    hidden_layer=5,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=VOCAB,
    mrope_section=(6, 5, 5),
    vision=VISION,
    image_token=IMAGE_PAD,
    video_token=VIDEO_PAD,
    vision_start_token=START,
    vision_end_token=END,
)

Item = tuple[int, tuple[int, int, int]]
PROMPTS: dict[str, list[Item]] = {
    "text": [],
    "large image": [(IMAGE, (1, 40, 64))],
    "image": [(IMAGE, (1, 4, 6))],
    "images": [(IMAGE, (1, 4, 6)), (IMAGE, (1, 2, 2)), (IMAGE, (1, 8, 4))],
    "video": [(VIDEO, (3, 4, 4))],
    "videos": [(VIDEO, (1, 4, 4)), (VIDEO, (5, 2, 6))],
    "mixture": [(VIDEO, (2, 4, 4)), (IMAGE, (1, 4, 6)), (VIDEO, (3, 2, 2)), (IMAGE, (1, 6, 6))],
}


def oracle(dtype: torch.dtype, spec: TextSpec = SPEC, seed: int = 3) -> torch.nn.Module:
    """A random Qwen3-VL whose norms and biases are not the identity."""
    text = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": list(spec.mrope_section), "rope_type": "default"
        },
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=dict(VISION), image_token_id=IMAGE_PAD, video_token_id=VIDEO_PAD,
        vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(seed)
    for name, value in sorted(model.named_parameters()):
        noise = torch.randn(value.shape, generator=draw)
        norm = "norm" in name and name.endswith("weight")
        value.data = (1 + 0.1 * noise if norm else 0.3 * noise).to(dtype)
    return model.eval()


def ours(model: torch.nn.Module, dtype: torch.dtype, spec: TextSpec = SPEC) -> TextEncoder:
    """Our encoder with clones of the oracle's weights, built on meta as the engine builds it."""
    with torch.device("meta"):
        encoder = TextEncoder(spec, dtype)
    names = {name for name, _ in encoder.named_parameters()}
    weights = {name: value.clone() for name, value in model.model.state_dict().items() if name in names}
    encoder.load_state_dict(weights, assign=True)
    encoder.init_buffers("cpu")
    return encoder.requires_grad_(False)


def prompt(items: list[Item], seed: int = 5) -> tuple[Tensor, Tensor, list[tuple[Tensor, Grid]]]:
    """Token ids, token types and vision inputs: a few words round every fenced run of pads."""
    draw = torch.Generator().manual_seed(seed)
    ids, types, vision = torch.randint(0, START, (4,), generator=draw).tolist(), [0] * 4, []
    for kind, (t, h, w) in items:
        for _ in range(t):
            run = h * w // 4
            ids += [7, START] + [IMAGE_PAD if kind == IMAGE else VIDEO_PAD] * run + [END]
            types += [0, 0] + [kind] * run + [0]
        patches = torch.rand(t * h * w, 1536, generator=draw) * 2 - 1
        vision.append((patches, (t, h, w)))
    ids += torch.randint(0, START, (9,), generator=draw).tolist()
    types += [0] * 9
    return torch.tensor(ids), torch.tensor(types), vision


@torch.no_grad()
def expected(model: torch.nn.Module, items: list[Item], layer: int) -> Tensor:
    """`hidden_states[layer]` as the released pipeline reads it: all images in one batch, all videos in another."""
    inputs = {}
    ids, types, vision = prompt(items)
    for kind, pixels, grids in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
        members = [pair for pair, item in zip(vision, items, strict=True) if item[0] == kind]
        if members:
            inputs[pixels] = torch.cat([patches for patches, _ in members]).to(model.dtype)
            inputs[f"{grids}_grid_thw"] = torch.tensor([grid for _, grid in members])
    out = model.model(
        input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), mm_token_type_ids=types[None],
        use_cache=False, output_hidden_states=True, **inputs,
    )  # fmt: skip
    return out.hidden_states[layer][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_the_oracles(dtype: torch.dtype) -> None:
    model = oracle(dtype)
    encoder = ours(model, dtype)
    for name, items in PROMPTS.items():
        ids, types, vision = prompt(items)
        want = expected(model, items, SPEC.hidden_layer)
        with torch.inference_mode():
            got = encoder(ids, types, iter(vision))
        assert got.dtype == dtype and want.std() > 0.5
        assert torch.equal(got, want), (name, (got - want).abs().max())


def test_a_whole_number_of_layers_less_is_another_state() -> None:
    model = oracle(torch.float32)
    items = PROMPTS["image"]
    got = ours(model, torch.float32)(*prompt(items))
    assert not torch.equal(got, expected(model, items, SPEC.hidden_layer - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loaded_from_disk_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """`from_pretrained(dtype=bfloat16)` keeps the rotary frequencies of both towers in float32, and so do we."""
    oracle(dtype).save_pretrained(tmp_path)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).eval()
    for value in model.parameters():
        value.data = value.data.clone()  # weights mapped from the file are aligned otherwise, which moves bits
    items = PROMPTS["mixture"]
    with torch.inference_mode():
        got = ours(model, dtype)(*prompt(items))
    assert torch.equal(got, expected(model, items, SPEC.hidden_layer))
    frequencies = {name: value for name, value in model.model.visual.named_buffers()}
    mine = dict(ours(model, dtype).visual.named_buffers())
    assert frequencies.keys() == mine.keys() and mine
    for name, value in frequencies.items():
        assert mine[name].dtype == torch.float32 and torch.equal(mine[name], value)
