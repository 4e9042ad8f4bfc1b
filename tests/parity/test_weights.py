"""The key map and the miniature's diffusers layout against the classes of diffusers and transformers themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel  # noqa: E402
from transformers import Qwen3VLForConditionalGeneration  # noqa: E402

from tiny import tiny_spec, tiny_tensors  # noqa: E402
from twinreel.spec import Spec  # noqa: E402
from twinreel.weights.config import dit_spec  # noqa: E402
from twinreel.weights.config_vae import audio_spec, video_spec  # noqa: E402
from twinreel.weights.keymap import stored_tensors  # noqa: E402
from twinreel.weights.recognise import recognise  # noqa: E402

DIFFUSERS = {
    "transformer": ("transformer", MiniMaxH3Transformer3DModel),
    "video_vae": ("vae", AutoencoderKLMiniMaxH3),
    "audio_vae": ("audio_vae", AutoencoderKLMiniMaxH3Audio),
}


@pytest.mark.parametrize("component", DIFFUSERS)
def test_the_miniature_loads_into_diffusers(tiny_diffusers: Path, component: str) -> None:
    folder, kind = DIFFUSERS[component]
    model, info = kind.from_pretrained(str(tiny_diffusers / folder), output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    seed = "fl2va" if component == "transformer" else ""
    expected = tiny_tensors(component, "diffusers", tiny_spec(), seed)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value.float()) for name, value in expected.items())


def test_the_miniature_loads_into_transformers(tiny_original: Path) -> None:
    folder = tiny_original / "FL2VA" / "text_encoder"
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(str(folder), output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = stored_tensors("text_encoder", "original", tiny_spec())
    state = model.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: row.shape for name, row in expected.items()
    }
    assert model.config.text_config.rope_parameters["mrope_section"] == [4, 2, 2]


@pytest.mark.parametrize("component", DIFFUSERS)
def test_released_sizes_on_the_meta_device(release: Path, component: str) -> None:
    folder, kind = DIFFUSERS[component]
    found = recognise(release / folder)
    read = {"transformer": ("dit", dit_spec), "video_vae": ("video", video_spec), "audio_vae": ("audio", audio_spec)}
    field, reader = read[component]
    rows = stored_tensors(component, "diffusers", Spec(**{field: reader(found)}))
    with torch.device("meta"):
        state = kind.from_config(json.loads(found.config.read_text())).state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: row.shape for name, row in rows.items()
    }
