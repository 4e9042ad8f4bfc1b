"""The audio VAE: no posterior, means only; waveform first, spectra with it, loud stretches, level watched."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...models.audio_decoder import AudioDecoder
from ...models.audio_encoder import AudioEncoder
from ...models.convolution import NormedConv
from ...spec import AudioVAESpec
from ..data import EVALUATION_SEED, SoundPool
from ..recipe import AudioRecipe, Recipe
from .loop import Piece, Run, Weights

STEM = "audio"
LEAST_LEVEL = 3e-3
NOISE = 0.03  # added to the means while training, against spreads of about one
SPECTRA = ((2048, 512), (1024, 256), (512, 128), (128, 32), (64, 16))


class AudioVAE(nn.Module):
    """Mono encoder and decoder."""

    def __init__(self, spec: AudioVAESpec, device: torch.device) -> None:
        super().__init__()
        self.hop = spec.hop
        self.encoder, self.decoder = AudioEncoder(spec), AudioDecoder(spec)
        start(self)
        self.to(device)

    def encode(self, waveform_Bn: Tensor) -> Tensor:
        """Means [B, 32, A] with gradients; n is a multiple of 800."""
        x = self.encoder.encoder(waveform_Bn.unsqueeze(1))
        return self.encoder.mean_proj(self.encoder.pre_block(x.transpose(1, 2)).transpose(1, 2))

    def decode(self, latents_BCA: Tensor) -> Tensor:
        """Waveforms [B, 800 A]."""
        return self.decoder.decoder(self.decoder.dec_in_proj(latents_BCA)).squeeze(1)


@torch.no_grad()
def start(vae: AudioVAE) -> None:
    """First values: every convolution keeps the level of its input (gain = length of its own weight, so scaled), the
    branches of residual units are quiet, the Snakes nearly straight lines."""
    for name, module in vae.named_modules():
        if isinstance(module, NormedConv):
            fan = (
                module.weight_v[0].numel()
                if not module.transposed
                else module.weight_v.shape[0] * module.weight_v.shape[2] / module.stride
            )
            nn.init.normal_(module.weight_v, std=1.0 / math.sqrt(fan))
            module.weight_g.copy_(module.weight_v.flatten(1).norm(dim=1).view(-1, 1, 1))
            if ".convs2." in name or name.endswith(".block.3"):
                module.weight_g.mul_(0.2)
    for name, p in vae.named_parameters():
        if name.endswith((".act.alpha", ".act.beta")):
            nn.init.constant_(p, math.log(0.5))
        elif name.endswith(".alpha"):
            nn.init.constant_(p, 0.5)


class Spectra:
    """Log-magnitude and linear distance of short-time spectra at several sizes."""

    def __init__(self, device: torch.device) -> None:
        self.windows = {size: torch.hann_window(size, device=device) for size, _ in SPECTRA}

    def __call__(self, out_Bn: Tensor, target_Bn: Tensor) -> Tensor:
        total = out_Bn.new_zeros(())
        for size, hop in SPECTRA:
            if size > out_Bn.shape[-1]:
                continue
            a, b = (self._magnitude(x, size, hop) for x in (out_Bn, target_Bn))
            every, least = (1, 2), b.mean((1, 2)).clamp(min=1e-2)
            total = total + (0.5 * (a - b).abs().mean(every) / least).mean()
            # Ratios where the target is loud: a short sound whose phase is uncertain must not be answered by silence.
            ratio = (torch.log(a + 1e-3) - torch.log(b + 1e-3)).abs()
            total = total + 0.3 * ((b * ratio).mean(every) / least).mean()
        return total / len(SPECTRA)

    def _magnitude(self, x_Bn: Tensor, size: int, hop: int) -> Tensor:
        z = torch.stft(x_Bn, size, hop, window=self.windows[size], return_complex=True, pad_mode="constant")
        return (torch.view_as_real(z).square().sum(-1) + 1e-8).sqrt()


def waveform_loss(out_Bn: Tensor, target_Bn: Tensor) -> Tensor:
    """L1 of each stretch relative to its own level: relative to a common one, a click is too short to be learnt."""
    level = target_Bn.abs().mean(1).clamp(min=LEAST_LEVEL)
    return ((out_Bn - target_Bn).abs().mean(1) / level).mean()


def train(recipe: Recipe, piece: Piece, device: torch.device) -> None:
    """One piece; leaves `audio.safetensors`, `audio-mean.safetensors` and `audio.jsonl`."""
    settings = recipe.audio
    vae = AudioVAE(recipe.spec.audio, device)
    weights = Weights({"vae": vae})
    run = Run(STEM, piece, settings.pace, weights)
    pool = SoundPool(settings.scenes, device, run.total * 10_000)
    samples, spectra = settings.window * vae.hop, Spectra(device)
    for progress in run:
        target = pool.draw(settings.pace.batch, samples)
        z = vae.encode(target)
        # Means keep a spread of about one, so that the noise means the same throughout the run.
        size = (z.square().mean().clamp(min=1e-8).log()).square()
        # The spectra come in gradually: at first only the waveform says which way is up.
        share = settings.spectral * min(1.0, progress / settings.spectral_from)
        out = vae.decode(z + NOISE * torch.randn_like(z))
        wave, spectral = waveform_loss(out, target), spectra(out, target)
        power, error = target.square().mean(1), (out - target).square().mean(1)
        snr = (-10 * torch.log10((error / power.clamp(min=1e-8)).clamp(min=1e-8)))[power > 1e-5].mean()
        ratio = out.square().mean().sqrt() / power.mean().sqrt()
        parts = {"wave": wave, "spectral": spectral, "snr": snr, "ratio": ratio, "spread": z.std()}
        run.learn(wave + share * spectral + 0.01 * size, **parts)
    weights.use_mean()
    run.log.write(step=run.total, **check(vae, settings, device))


@torch.no_grad()
def check(vae: AudioVAE, settings: AudioRecipe, device: torch.device) -> dict[str, float]:
    """Waveform SNR (mean over stretches, and over all energy), level ratio, and spectral distance on unseen sounds."""
    pool = SoundPool(-(-settings.unseen // 2), device, EVALUATION_SEED)
    target = pool.draw(settings.unseen, settings.window * vae.hop)
    out = vae.decode(vae.encode(target))
    error, power = (out - target).square().mean(1), target.square().mean(1)
    return {
        "snr": float((-10 * torch.log10(error / power.clamp(min=1e-8)))[power > 1e-4].mean()),
        "snr_all": float(-10 * torch.log10(error.mean() / power.mean())),
        "ratio": float((out.square().mean() / power.mean()).sqrt()),
        "spectral": float(Spectra(device)(out, target)),
    }
