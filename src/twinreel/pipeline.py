"""A request's journey, one screen: every task and every machine walks it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import set_flags
from .denoise import VelocityAt, Vote, denoise
from .errors import RequestError
from .layout import PackedLayout, build_layout, unpatchify
from .media_in import prepare, read_source
from .models.dit import DiT, make_row_state
from .models.modulation import Modulation
from .noise import ConditionLatents, Rows, initial_rows, sample_posterior
from .parts import Parts
from .pixels import normalise, quantise
from .plan import Plan, describe_plan, make_plan, max_frames
from .policy import EveryStep, StepPolicy
from .presentation import Prompt, present, vision_patches
from .request import Keyframe, Reference, Request, check_request
from .schedule import Sigmas, make_sigmas, step_timesteps
from .sources import Prepared, Source
from .spec import AUDIO_CHANNELS, Spec
from .watch import Stages


@dataclass(frozen=True)
class Latents:
    """What sampling ends with and decoding starts from: normalised latents, CPU fp32.

    `video` [1, C, T, h, w], `audio` [2, 32, A]; `facts` is what the report says of the sampling.
    """

    plan: Plan
    video: Tensor
    audio: Tensor
    facts: dict[str, Any]


@torch.inference_mode()
def sample(request: Request, parts: Parts, stages: Stages, vote: Vote) -> Latents:
    """Everything up to the latents. Raises RequestError before any weight is loaded."""
    spec = parts.spec
    check_request(request, spec)
    with stages.stage("read"):
        sources = read_sources(request, spec)
        plan = make_plan(request, spec, sources)
        inputs = prepare(plan, sources)
        prompt = present(plan, inputs, parts.tokenizer, spec)
        layout = build_layout(plan, prompt.tags, spec)
        sigmas = plan_sigmas(plan)
    text, conditions, encode_flags = encode(plan, prompt, inputs, parts, stages)
    rows = initial_rows(plan, conditions, spec)
    policy = EveryStep()
    rows, denoise_flags = run_steps(rows, text, layout, plan, sigmas, parts, stages, vote, policy=policy)
    video, audio = split_latents(rows, layout, plan, spec)
    facts = {
        "plan": describe_plan(plan),
        "sigmas": {"video": sigmas.video.sigmas.tolist(), "audio": sigmas.audio.sigmas.tolist()},
        "rows": [vars(segment) for segment in layout.segments],
        "policy": policy.report(),
        "flags": {"encode": encode_flags, "denoise": denoise_flags},
    }
    return Latents(plan, video, audio, facts)


def read_sources(request: Request, spec: Spec) -> tuple[Source, ...]:
    """The request's media in order, keyframes before references. Raises RequestError naming the field."""
    items: list[tuple[str, Keyframe | Reference]] = [(f"keyframes[{i}]", k) for i, k in enumerate(request.keyframes)]
    items += [(f"references[{i}]", item) for i, item in enumerate(request.references)]
    return tuple(read_source(item, spec, max_frames(spec), where) for where, item in items)


def plan_sigmas(plan: Plan) -> Sigmas:
    """The plan's two sigma grids; shifts that leave the streams different numbers of calls are a RequestError."""
    try:
        return make_sigmas(plan.steps, plan.shifts)
    except ValueError as error:
        raise RequestError("shifts", str(error)) from None


def encode(
    plan: Plan, prompt: Prompt, inputs: tuple[Prepared, ...], parts: Parts, stages: Stages
) -> tuple[Tensor, ConditionLatents, dict[str, Any]]:
    """Prompt embeddings [L, text_dim] on the device, condition latents on CPU (SPEC 3.5, 6), and the flags set."""
    flags = set_flags("encode", parts.choices)
    spec = parts.spec
    pixels = [item.frames for item in inputs if item.frames is not None]
    sounds = [item.waveform for item in inputs if item.waveform is not None]
    names = ["text_encoder"] + ["video_encoder"] * bool(pixels) + ["audio_encoder"] * bool(sounds)
    with parts.resident(stages, *names), stages.stage("encode", 1 + len(inputs)):
        # a generator: the encoder asks for one medium's pixels at a time
        visions = ((vision_patches(vision, spec.processor), vision.grid) for vision in prompt.visions)
        text = parts["text_encoder"](prompt.ids, prompt.token_types, visions)
        stages.tell(1, 1 + len(inputs), "prompt")
        visual, rows = [], []
        for i, (condition, item) in enumerate(zip(plan.conditions, inputs, strict=True)):
            if item.waveform is not None:
                rows.append(encode_sound(item.waveform, parts))
            if item.frames is not None:
                visual.append(encode_pixels(item.frames[: condition.vae_frames], parts))
            stages.tell(2 + i, 1 + len(inputs), f"{condition.role} {i}: {condition.kind}")
    return text, ConditionLatents(tuple(visual), tuple(rows)), flags


def encode_pixels(frames: np.ndarray, parts: Parts) -> Tensor:
    """uint8 frames [f, H, W, 3] -> normalised latents, CPU fp32 [1, C, T, h, w] (SPEC 6, 8)."""
    mean, std = parts["video_encoder"].encode(normalise(frames, parts.choices.device))
    sampled = sample_posterior(mean, std)
    spec = parts.spec.video
    return (sampled - _column(spec.mean, 5)) / _column(spec.std, 5)


def encode_sound(waveform: np.ndarray, parts: Parts) -> Tensor:
    """32 kHz stereo fp32 [2, n] -> normalised rows, CPU fp32 [2A, 32], left channel first (SPEC 9)."""
    means = parts["audio_encoder"].encode(torch.from_numpy(waveform).to(parts.choices.device)).cpu()
    spec = parts.spec.audio
    rows = means.transpose(1, 2)
    rows = (rows - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    return rows.reshape(-1, spec.latent_channels)


def _column(values: tuple[float, ...], dims: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, *[1] * (dims - 2))


def run_steps(
    rows: Rows,
    text: Tensor,
    layout: PackedLayout,
    plan: Plan,
    sigmas: Sigmas,
    parts: Parts,
    stages: Stages,
    vote: Vote,
    *,
    policy: StepPolicy,
) -> tuple[Rows, dict[str, Any]]:
    """Denoise on the device; rows come back to the CPU."""
    flags = set_flags("denoise", parts.choices)
    device = parts.choices.device
    dit_name, modulation_name = f"dit:{plan.partition}", f"modulation:{plan.partition}"
    with parts.resident(stages, dit_name, modulation_name), stages.stage("denoise", sigmas.calls):
        velocity_at = predictor(parts[dit_name], parts[modulation_name], text, layout, sigmas)
        def watched_vote(step: int, velocity: Rows) -> None:
            vote(step, velocity)
            stages.tell(step + 1, sigmas.calls)

        rows = denoise(rows.to(device), layout, sigmas, velocity_at, policy, watched_vote).to("cpu")
    return rows, flags


def predictor(dit: DiT, modulation: Modulation, text: Tensor, layout: PackedLayout, sigmas: Sigmas) -> VelocityAt:
    """The model as a function of step and rows: what does not change over steps is computed here, once a request."""
    device = text.device
    indices = layout.text_indices, layout.video_indices, layout.audio_indices
    at = make_row_state(layout.positions_S3, layout.tags_S, indices, dit.spec, dit.dtype, device)
    refined = dit.refine(text)
    times = [[t.to(device) for t in step_timesteps(layout, sigmas, step)] for step in range(sigmas.calls)]

    def velocity_at(step: int, rows: Rows) -> Rows:
        timesteps, indices = times[step]
        return Rows(*dit(rows.video, rows.audio, refined, at, modulation.at(timesteps, indices, at)))

    return velocity_at


def split_latents(rows: Rows, layout: PackedLayout, plan: Plan, spec: Spec) -> tuple[Tensor, Tensor]:
    """Target rows -> normalised latents: video [1, C, T, h, w], audio [2, 32, A]."""
    shape = (plan.latents, plan.height // spec.video.space, plan.width // spec.video.space)
    video = unpatchify(rows.video[layout.condition_video :], shape, spec.dit.patch)
    audio = rows.audio[layout.condition_audio :].reshape(AUDIO_CHANNELS, plan.audio_latents, -1).permute(0, 2, 1)
    return video, audio.contiguous()


@torch.inference_mode()
def decode(latents: Latents, parts: Parts, stages: Stages, *, rounding: str = "truncate") -> Generator[np.ndarray, None, None]:
    """First the waveform, float32 [2, samples] at 32 kHz, then clips uint8 [f, H, W, 3] in order (SPEC 8.3, 9, 10)."""
    latents.facts["flags"]["decode"] = set_flags("decode", parts.choices)
    device, spec, plan = parts.choices.device, parts.spec, latents.plan
    with parts.resident(stages, "video_decoder", "audio_decoder"), stages.stage("decode", plan.frames):
        audio = latents.audio.to(device) * _sound_column(spec.audio.std, device) + _sound_column(spec.audio.mean, device)
        yield parts["audio_decoder"].decode(audio).cpu().numpy()
        video = latents.video.to(device)
        video = video * _column(spec.video.std, 5).to(device) + _column(spec.video.mean, 5).to(device)
        done = 0
        with closing(parts["video_decoder"].clips(video)) as clips:
            for clip in clips:
                pixels = quantise(clip, rounding).cpu().numpy()
                done += len(pixels)
                stages.tell(done, plan.frames, "frames")
                yield pixels


def _sound_column(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1)
