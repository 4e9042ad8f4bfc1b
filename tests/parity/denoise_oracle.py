"""diffusers' own chain of blocks, from prompt embeddings and encoded conditions to latents."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import before_denoise, decoders, denoise
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from torch import Tensor

from twinreel.noise import ConditionLatents
from twinreel.plan import Plan

STEPS = {
    "t2va": (
        before_denoise.MiniMaxH3NoKeyframeAnchorsStep, before_denoise.MiniMaxH3PrepareLayoutStep,
        before_denoise.MiniMaxH3PrepareLatentsStep, before_denoise.MiniMaxH3SetTimestepsStep,
        denoise.MiniMaxH3DenoiseStep, decoders.MiniMaxH3AfterDenoiseStep,
    ),
    "fl2va": (
        before_denoise.MiniMaxH3PrepareLayoutStep, before_denoise.MiniMaxH3PrepareConditionLatentsStep,
        before_denoise.MiniMaxH3PrepareLatentsStep, before_denoise.MiniMaxH3FL2VAPrepareLatentsStep,
        before_denoise.MiniMaxH3SetTimestepsStep, denoise.MiniMaxH3DenoiseStep, decoders.MiniMaxH3AfterDenoiseStep,
    ),
    "ref2va": (
        before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep, before_denoise.MiniMaxH3PrepareConditionLatentsStep,
        before_denoise.MiniMaxH3PrepareLatentsStep, before_denoise.MiniMaxH3Ref2VAPrepareLatentsStep,
        before_denoise.MiniMaxH3SetTimestepsStep, denoise.MiniMaxH3Ref2VADenoiseStep,
        decoders.MiniMaxH3AfterDenoiseStep,
    ),
}  # fmt: skip


def oracle_latents(
    plan: Plan, text: Tensor, tags: Tensor, conditions: ConditionLatents, transformer: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    """Video latents [1, C, T, h, w] and audio latents [2, 32, A] for text rows [1, L, C], normalised conditions and
    a plan with sequential noise."""
    task = plan.task

    class Chain(SequentialPipelineBlocks):
        model_name = "minimax-h3"
        block_classes = list(STEPS[task])
        block_names = [f"step_{i}" for i in range(len(STEPS[task]))]

    pipe = Chain().init_pipeline()
    pipe.update_components(
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **{"transformer_ref" if task == "ref2va" else "transformer": transformer},
    )
    inputs = {
        "prompt_embeds": text,
        "text_token_tags": tags,
        "height": plan.height,
        "width": plan.width,
        "num_frames": plan.frames,
        "num_inference_steps": plan.steps,
        "generator": torch.Generator().manual_seed(plan.seed),
    }
    if task != "t2va":
        inputs["condition_latents"] = list(conditions.visual)
    if task == "fl2va":
        inputs["keyframe_anchors"] = tuple(condition.anchor for condition in plan.conditions)
    if task == "ref2va":
        inputs["audio_condition_latents"] = list(conditions.sounds)
        inputs["normalized_references"] = [
            SimpleNamespace(kind=condition.kind, has_audio=condition.audio_latents > 0) for condition in plan.conditions
        ]
    state = pipe(**inputs)
    return state.get("latents"), state.get("audio_latents")
