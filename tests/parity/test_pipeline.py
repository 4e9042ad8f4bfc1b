"""Whole requests equal the public classes bit for bit, prompt to frames and waveform, on one tiny checkpoint.

The oracle reads the diffusers root with `from_pretrained`; the engine reads the original layout of the same values.
Vision patches are ours on both sides (`test_text_encoder.py` and `tests/golden` hold them to the processors).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import (  # noqa: E402
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition  # noqa: E402
from transformers import Qwen3VLForConditionalGeneration  # noqa: E402

from denoise_oracle import oracle_latents  # noqa: E402
from twinreel import Clip, Engine, EngineConfig, Keyframe, Picture, Reference, Request, Sound  # noqa: E402
from twinreel.media.read import prepare, read_sources  # noqa: E402
from twinreel.noise import ConditionLatents  # noqa: E402
from twinreel.plan import make_plan  # noqa: E402
from twinreel.presentation import present, vision_patches  # noqa: E402
from twinreel.spec import PIXEL_MEAN, PIXEL_STD  # noqa: E402


def own_memory(module: torch.nn.Module) -> torch.nn.Module:
    """Weights out of the mapped file: their alignment there would change the last bits."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module.eval()


class Oracle:
    """The public classes with the values of a tiny diffusers root, fp32."""

    def __init__(self, root: Path) -> None:
        def load(kind, folder):  # noqa: ANN001, ANN202
            return own_memory(kind.from_pretrained(root / folder, torch_dtype=torch.float32))

        self.dits = {name: load(MiniMaxH3Transformer3DModel, folder) for name, folder in
                     (("fl2va", "transformer"), ("ref2va", "transformer_ref"))}  # fmt: skip
        self.vae = load(AutoencoderKLMiniMaxH3, "vae")
        self.audio_vae = load(AutoencoderKLMiniMaxH3Audio, "audio_vae")
        self.conditioner = load(Qwen3VLForConditionalGeneration, "text_encoder")

    @torch.no_grad()
    def run(self, request: Request, engine: Engine) -> tuple[np.ndarray, torch.Tensor]:
        """uint8 frames [F, H, W, 3] and waveform [2, n]."""
        spec = engine.parts.spec
        sources = read_sources(request, spec)
        plan = make_plan(request, spec, sources)
        inputs = prepare(plan, sources)
        prompt = present(plan, inputs, engine.parts.tokenizer, spec)
        vision = {}
        names = (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw"))
        for kind, pixels, grid in names:
            seen = [v for v in prompt.visions if v.kind == kind]
            if seen:
                vision[pixels] = torch.cat([vision_patches(v, spec.processor) for v in seen])
                vision[grid] = torch.tensor([v.grid for v in seen])
        ids = prompt.ids[None]
        text = self.conditioner.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=prompt.token_types[None],
            use_cache=False, output_hidden_states=True, **vision,
        ).hidden_states[spec.text.hidden_layer]  # fmt: skip
        conditions = self.conditions(plan, inputs)
        video, audio = oracle_latents(plan, text, prompt.tags, conditions, self.dits[plan.partition])
        return self.decode(video, audio)

    def conditions(self, plan, inputs) -> ConditionLatents:  # noqa: ANN001
        visual, sounds = [], []
        mean, std = (torch.tensor(v) for v in (self.audio_vae.config.latents_mean, self.audio_vae.config.latents_std))
        for condition, item in zip(plan.conditions, inputs, strict=True):
            if item.waveform is not None:
                moments = self.audio_vae.encode(torch.tensor(item.waveform)[:, None]).latent_dist.mode()
                sounds.append(((moments.transpose(1, 2) - mean) / std).reshape(-1, len(mean)))
            if item.frames is not None:
                frames = np.array(item.frames[: condition.vae_frames])
                pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
                visual.append(encode_vae_condition(self.vae, pixels, PIXEL_MEAN, PIXEL_STD, 42))
        return ConditionLatents(tuple(visual), tuple(sounds))

    def decode(self, video: torch.Tensor, audio: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        def column(values, dims):  # noqa: ANN001, ANN202
            return torch.tensor(values).view(1, -1, *[1] * dims)

        config = self.vae.config
        pixels = self.vae.decode(video * column(config.latents_std, 3) + column(config.latents_mean, 3)).sample
        pixels = (pixels * column(PIXEL_STD, 3) + column(PIXEL_MEAN, 3)).clamp(0, 1)
        config = self.audio_vae.config
        sound = self.audio_vae.decode(audio * column(config.latents_std, 1) + column(config.latents_mean, 1)).sample
        return (pixels[0].permute(1, 2, 3, 0) * 255).to(torch.uint8).numpy(), sound[:, 0]


RNG = np.random.default_rng(0)


def picture(height: int, width: int) -> Picture:
    return Picture(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


SOUND = Sound((0.2 * RNG.standard_normal((2, 40_000))).astype(np.float32), 44_100)
CLIP = Clip(RNG.integers(0, 256, (30, 64, 96, 3), dtype=np.uint8), 24.0, Sound(SOUND.samples[:1], 32_000))
COMMON = {"steps": 3, "seed": 3, "noise": "sequential", "duration": 5}
REQUESTS = {
    "t2va": Request("A cat plays <d>piano</d>.", **COMMON),
    "fl2va": Request("The sea.", keyframes=(Keyframe(picture(90, 120)), Keyframe(picture(64, 64), -1)), **COMMON),
    "ref2va": Request(
        "<Picture 1> and <Audio 1> and <Video 1>.",
        references=(
            Reference("image", picture(80, 64)), Reference("audio", SOUND), Reference("video_audio", CLIP),
            Reference("video", Clip(CLIP.frames, 30.0)),
        ),
        **COMMON,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tiny_diffusers: Path) -> Oracle:
    return Oracle(tiny_diffusers)


@pytest.fixture(scope="module")
def engine(tiny_original: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_original), device="cpu", threads=2))


@pytest.mark.parametrize("task", REQUESTS)
def test_frames_and_waveform_are_bit_equal(task: str, oracle: Oracle, engine: Engine) -> None:
    request = REQUESTS[task]
    media = engine.generate(request)
    frames, waveform = oracle.run(request, engine)
    assert media.report["plan"]["task"] == task
    assert media.video.std() > 5 and np.abs(media.audio).max() > 0.01
    assert np.array_equal(media.video, frames)
    assert np.array_equal(media.audio, waveform.numpy())
