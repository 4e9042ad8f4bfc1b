"""Every random draw of a request, on a CPU generator, in the order a seed promises (SPEC 6). All fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layout import patchify
from .plan import Plan
from .spec import AUDIO_CHANNELS, CONDITION_TIME, POSTERIOR_SEED, Spec


@dataclass(frozen=True)
class Rows:
    """The state of the loop: video rows fp32 [Nv, 96] and audio rows fp32 [Na, 32], condition rows first."""

    video: Tensor
    audio: Tensor

    def to(self, device: torch.device | str) -> Rows:
        """Both tensors on `device`."""
        return replace(self, video=self.video.to(device), audio=self.audio.to(device))


@dataclass(frozen=True)
class ConditionLatents:
    """Encoded conditions in packed order, normalised, CPU fp32: visual [1, C, T, h, w]; sounds as rows [2n, 32]."""

    visual: tuple[Tensor, ...] = ()
    sounds: tuple[Tensor, ...] = ()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def sample_posterior(mean: Tensor, std: Tensor) -> Tensor:
    """A visual condition's latents, CPU fp32 [1, C, T, h, w]: one draw under the fixed seed, then rounded to float16.

    The seed is the release's and does not follow the request's; eleven bits of mantissa are part of the contract.
    """
    noise = _draw(tuple(mean.shape), _generator(POSTERIOR_SEED))
    # added where the moments live, as the released recipe does; equal on CPU, and on CUDA up to its own rounding
    sample = mean + std * noise.to(mean.device)
    return sample.to(torch.float16).float().cpu()


def _noised(clean: Tensor, noise: Tensor) -> Tensor:
    time = torch.tensor(CONDITION_TIME, dtype=torch.float32)
    return time * clean + (1.0 - time) * noise


def initial_rows(plan: Plan, conditions: ConditionLatents, spec: Spec) -> Rows:
    """The rows before the first step. `official` draws each stream from a fresh generator of the request's seed,
    `sequential` all of them from one, in packed order: conditions, target video, target audio."""
    space, channels = spec.video.space, spec.dit.video_channels
    shape = (1, channels, plan.latents, plan.height // space, plan.width // space)
    audio_shape = (AUDIO_CHANNELS * plan.audio_latents, spec.dit.audio_channels)
    if plan.noise == "sequential":
        generator = _generator(plan.seed)
        noises = [_draw(tuple(latents.shape), generator) for latents in conditions.visual]
        video, audio = _draw(shape, generator), _draw(audio_shape, generator)
    else:
        noises = _official_noises(plan, conditions.visual)
        video, audio = _draw(shape, _generator(plan.seed)), _draw(audio_shape, _generator(plan.seed))
    patch = spec.dit.patch
    visual = [patchify(_noised(*pair), patch) for pair in zip(conditions.visual, noises, strict=True)]
    return Rows(torch.cat([*visual, patchify(video, patch)]), torch.cat([*conditions.sounds, audio]))


def _official_noises(plan: Plan, visual: Sequence[Tensor]) -> list[Tensor]:
    """One fresh draw a condition, as long as target and conditions together, of which its own first frames are used."""
    noises = []
    for latents in visual:
        _, channels, frames, height, width = latents.shape
        # a reference may be longer than the target plus the number of conditions in latents only if it was not cut
        assert frames <= plan.latents + len(visual)
        whole = _draw((1, channels, plan.latents + len(visual), height, width), _generator(plan.seed))
        noises.append(whole[:, :, :frames])
    return noises
