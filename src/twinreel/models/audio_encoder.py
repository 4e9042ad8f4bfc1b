"""The audio VAE's encoder: a strided convolution stack and one causal attention block (SPEC 1.6, 9). float32.

Shapes: `B` waveforms (two for stereo; the model is mono), `C` channels, `n` samples or latents, `D` trunk width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinreel.models.convolution import NormedConv, fold_norms
from twinreel.spec import AudioVAESpec


class Snake(nn.Module):
    """`x + sin(alpha x)^2 / (alpha + 1e-9)`, one alpha a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x_BCn: Tensor) -> Tensor:
        # Multiplying by the rounded reciprocal, not dividing, is what the weights were trained with.
        return (self.alpha * x_BCn).sin_().pow_(2).mul_((self.alpha + 1e-9).reciprocal()).add_(x_BCn)


class ResidualUnit(nn.Module):
    """Snake, dilated convolution of 7, Snake, convolution of 1, around an identity."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            NormedConv(channels, channels, 7, dilation=dilation),
            Snake(channels),
            NormedConv(channels, channels, 1),
        )

    def forward(self, x_BCn: Tensor) -> Tensor:
        return self.block(x_BCn).add_(x_BCn)


class DownBlock(nn.Module):
    """Three residual units, then a convolution that shortens by `rate` and doubles the channels."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *(ResidualUnit(channels, dilation) for dilation in (1, 3, 9)),
            Snake(channels),
            NormedConv(channels, 2 * channels, 2 * rate, stride=rate, padding=math.ceil(rate / 2)),
        )

    def forward(self, x_BCn: Tensor) -> Tensor:
        return self.block(x_BCn)


class WaveformCNN(nn.Module):
    """Waveforms `[B, 1, n]` to features `[B, D, n / 800]`."""

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        widths = [spec.encoder_dim * 2**i for i in range(len(spec.encoder_rates) + 1)]
        self.block = nn.Sequential(
            NormedConv(1, widths[0], 7),
            *(DownBlock(width, rate) for width, rate in zip(widths, spec.encoder_rates, strict=False)),
            Snake(widths[-1]),
            NormedConv(widths[-1], spec.latent_dim, 3),
        )

    def forward(self, x_BCn: Tensor) -> Tensor:
        return self.block(x_BCn)


class CausalAttention(nn.Module):
    """Attention that averages its heads and then neighbouring channels, down from `D` to the latent width."""

    zero_k_bias: Tensor

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        self.heads, self.outputs = spec.attention_heads, spec.latent_channels
        self.qkv = nn.Linear(spec.latent_dim, 3 * spec.latent_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(spec.latent_dim))
        self.v_bias = nn.Parameter(torch.zeros(spec.latent_dim))
        self.register_buffer("zero_k_bias", torch.zeros(spec.latent_dim))
        self.proj = nn.Linear(self.outputs, self.outputs)

    def forward(self, x_BnD: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        qkv = F.linear(x_BnD, self.qkv.weight, bias).unflatten(2, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        heads_BnHd = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(F.adaptive_avg_pool1d(heads_BnHd.mean(dim=2), self.outputs))


class GatedMLP(nn.Module):
    """`w2(gelu(w0 x) * w1 x)` after a LayerNorm of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w0 = nn.Linear(width, 2 * width)
        self.w1 = nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(F.gelu(self.w0(x), approximate="tanh") * self.w1(x))


class Projection(nn.Module):
    """The block that takes features `[B, n, D]` to the latent width."""

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.latent_dim)
        self.attn = CausalAttention(spec)
        self.norm3 = nn.LayerNorm(spec.latent_dim)
        self.proj = nn.Linear(spec.latent_dim, spec.latent_channels)
        self.norm2 = nn.LayerNorm(spec.latent_channels)
        self.mlp = GatedMLP(spec.latent_channels)

    def forward(self, x_BnD: Tensor) -> Tensor:
        y = self.proj(self.norm3(x_BnD)) + self.attn(self.norm1(x_BnD))
        return y + self.mlp(self.norm2(y))


class AudioEncoder(nn.Module):
    """Waveforms to latent means. The stored `logs_proj` belongs to no module: the mean is what conditions the DiT."""

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        self.hop = spec.hop
        self.encoder = WaveformCNN(spec)
        self.pre_block = Projection(spec)
        self.mean_proj = nn.Conv1d(spec.latent_channels, spec.latent_channels, 1)

    def freeze(self) -> None:
        """Compute the effective weights once; for after the stored tensors are assigned."""
        fold_norms(self)

    @torch.no_grad()
    def encode(self, waveform_Bn: Tensor) -> Tensor:
        """Mean `[B, 32, ceil(n / 800)]`, float32, of 32 kHz waveforms `[B, n]`; zeros fill the last latent's samples.

        The result is not normalised with the checkpoint's mean and std (SPEC 9).
        """
        x = waveform_Bn.to(self.mean_proj.weight.device, torch.float32).unsqueeze(1)
        x = self.encoder(F.pad(x, (0, -x.shape[-1] % self.hop)))
        return self.mean_proj(self.pre_block(x.transpose(1, 2)).transpose(1, 2))
