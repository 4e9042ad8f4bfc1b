"""The audio VAE's decoder: transposed convolutions with alias-free activations (SPEC 1.6, 9). float32.

Shapes: `B` channels of the sound as a batch (the model is mono), `C` channels of the network, `n` samples.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinreel.models.convolution import NormedConv, NormedConvTransposed, fold_norms
from twinreel.spec import AudioVAESpec

TAPS = 12
# Kaiser-windowed sinc, cutoff 1/4, half-width 0.3, sum 1. A new model starts from it; a checkpoint stores its own.
HALF_FILTER = (0.0020289646927, 0.0093894656748, -0.0255434587598, -0.0576573833823, 0.1285725831985, 0.4432097971439)


def lowpass_filter() -> Tensor:
    """The low-pass filter `[1, 1, 12]`, float32."""
    return torch.tensor(HALF_FILTER + HALF_FILTER[::-1], dtype=torch.float32).view(1, 1, TAPS)


class Upsample(nn.Module):
    """Twice the samples: zeros between them, low-passed; edges are repeated."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", lowpass_filter())

    def forward(self, x_BCn: Tensor) -> Tensor:
        channels = x_BCn.shape[1]
        x = F.pad(x_BCn, (5, 5), mode="replicate")
        x = F.conv_transpose1d(x, self.filter.expand(channels, -1, -1), stride=2, groups=channels)
        return x[..., 15:-15].mul_(2)


class LowPass(nn.Module):
    """Half the samples: low-passed, every second one kept; edges are repeated."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", lowpass_filter())

    def forward(self, x_BCn: Tensor) -> Tensor:
        channels = x_BCn.shape[1]
        x = F.pad(x_BCn, (5, 6), mode="replicate")
        return F.conv1d(x, self.filter.expand(channels, -1, -1), stride=2, groups=channels)


class Downsample(nn.Module):
    """Holds the low-pass under its stored name."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = LowPass()

    def forward(self, x_BCn: Tensor) -> Tensor:
        return self.lowpass(x_BCn)


class SnakeBeta(nn.Module):
    """`x + sin(a x)^2 / (b + 1e-9)` with a and b a channel, stored as logarithms. Overwrites nothing it is given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCn: Tensor) -> Tensor:
        # Multiplying by the rounded reciprocal, not dividing, is what the weights were trained with.
        factor = (self.beta.exp() + 1e-9).reciprocal().unsqueeze(-1)
        return (self.alpha.exp().unsqueeze(-1) * x_BCn).sin_().pow_(2).mul_(factor).add_(x_BCn)


class Activation(nn.Module):
    """SnakeBeta at twice the sample rate, so that the harmonics it makes do not fold back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        self.upsample = Upsample()
        self.downsample = Downsample()

    def forward(self, x_BCn: Tensor) -> Tensor:
        return self.downsample(self.act(self.upsample(x_BCn)))


class ResBlock(nn.Module):
    """For each dilation: activation, dilated convolution, activation, convolution, added to the input."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(NormedConv(channels, channels, kernel, dilation=d) for d in dilations)
        self.convs2 = nn.ModuleList(NormedConv(channels, channels, kernel) for _ in dilations)
        self.activations = nn.ModuleList(Activation(channels) for _ in range(2 * len(dilations)))

    def forward(self, x_BCn: Tensor) -> Tensor:
        for i, (conv1, conv2) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            h = conv1(self.activations[2 * i](x_BCn))
            x_BCn = conv2(self.activations[2 * i + 1](h)).add_(x_BCn)
        return x_BCn


class WaveformDecoder(nn.Module):
    """Features `[B, D, A]` to waveforms `[B, 1, 800 A]`, clamped to [-1, 1]."""

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        widths = [spec.decoder_dim >> i for i in range(len(spec.decoder_rates) + 1)]
        self.conv_pre = NormedConv(spec.latent_dim, widths[0], 7)
        self.ups = nn.ModuleList(
            # Each alone in a list: the stored names are `ups.i.0`.
            nn.Sequential(NormedConvTransposed(inputs, outputs, kernel, stride=rate, padding=(kernel - rate) // 2))
            for (inputs, outputs), rate, kernel in zip(
                pairwise(widths), spec.decoder_rates, spec.decoder_kernels, strict=True
            )
        )
        shapes = tuple(zip(spec.resblock_kernels, spec.resblock_dilations, strict=True))
        self.branches = len(shapes)
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations) for width in widths[1:] for kernel, dilations in shapes
        )
        self.activation_post = Activation(widths[-1])
        self.conv_post = NormedConv(widths[-1], 1, 7, bias=False)

    def forward(self, x_BCn: Tensor) -> Tensor:
        x_BCn = self.conv_pre(x_BCn)
        for i, up in enumerate(self.ups):
            x_BCn = up(x_BCn)
            blocks = self.resblocks[i * self.branches : (i + 1) * self.branches]
            total = blocks[0](x_BCn)
            for block in blocks[1:]:
                total = total.add_(block(x_BCn))
            # The sum in the kernels' order, then one division: a mean over a stack rounds unlike it.
            x_BCn = total.div_(self.branches)
        return self.conv_post(self.activation_post(x_BCn)).clamp_(-1.0, 1.0)


class AudioDecoder(nn.Module):
    """Latents to waveforms."""

    def __init__(self, spec: AudioVAESpec) -> None:
        super().__init__()
        self.dec_in_proj = nn.Conv1d(spec.latent_channels, spec.latent_dim, 1)
        self.decoder = WaveformDecoder(spec)

    def freeze(self) -> None:
        """Compute the effective weights once; for after the stored tensors are assigned."""
        fold_norms(self)

    @torch.no_grad()
    def decode(self, latents_BCA: Tensor) -> Tensor:
        """Waveforms float32 `[B, 800 A]` at 32 kHz in [-1, 1], from de-normalised latents `[B, 32, A]`.

        B is the channel count of the sound, 2 for stereo.
        """
        latents_BCA = latents_BCA.to(self.dec_in_proj.weight.device, torch.float32)
        return self.decoder(self.dec_in_proj(latents_BCA)).squeeze(1)
