"""The video VAE's encoder: a causal CNN over 17-frame clips and 256-pixel tiles (SPEC 1.5, 8.1, 8.2).

Shapes: `B` batch, `C` channels, `F` frames, `H`, `W` pixels; `T`, `h`, `w` latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twinreel.ops.frames import PLAIN, Edges, FrameOps
from twinreel.parallel import Axis
from twinreel.parallel.tiles import map_tiles, split_canvas, stitch
from twinreel.spec import VideoVAESpec

PIXEL_CHANNELS = 3


class CausalConv(nn.Conv3d):
    """3x3x3 convolution of SiLU of `norm` where one is given; it reflects `edges` pixels (above and left, below and right)
    and sees only past frames, zeros before the first."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        passes: FrameOps,
        stride: tuple[int, int, int] = (1, 1, 1),
        edges: Edges = (1, 1),
    ) -> None:
        super().__init__(inputs, outputs, 3, stride=stride)
        self.passes, self.edges = passes, edges

    def forward(self, x_BCFHW: Tensor, norm: nn.GroupNorm | None = None) -> Tensor:
        return self.passes.convolve(self.passes.padded(x_BCFHW, norm, self.edges), self)


class ResBlock(nn.Module):
    """`x + conv2(silu(norm2(conv1(silu(norm1(x))))))`, with a 1x1x1 shortcut where the width changes.

    A norm takes the statistics of each frame alone, and every one is followed by SiLU and a convolution."""

    def __init__(self, inputs: int, outputs: int, spec: VideoVAESpec, passes: FrameOps) -> None:
        super().__init__()
        self.passes = passes
        self.norm1 = nn.GroupNorm(spec.norm_groups, inputs, eps=spec.norm_eps)
        self.conv1 = CausalConv(inputs, outputs, passes)
        self.norm2 = nn.GroupNorm(spec.norm_groups, outputs, eps=spec.norm_eps)
        self.conv2 = CausalConv(outputs, outputs, passes)
        self.nin_shortcut = nn.Conv3d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        h = self.conv2(self.conv1(x_BCFHW, self.norm1), self.norm2)
        return h.add_(x_BCFHW if self.nin_shortcut is None else self.passes.convolve(x_BCFHW, self.nin_shortcut))


class Downsample(nn.Module):
    """Strided causal convolution; halving in space reflects one pixel on the right and bottom only."""

    def __init__(self, channels: int, time: int, space: int, passes: FrameOps) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, passes, (time, space, space), edges=(0, int(space == 2)))

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        return self.conv(x_BCFHW)


class Level(nn.Module):
    """One resolution: its residual blocks and, if it shrinks anything, a downsampling convolution."""

    def __init__(self, index: int, spec: VideoVAESpec, passes: FrameOps) -> None:
        super().__init__()
        inputs, outputs = spec.channels[max(index - 1, 0)], spec.channels[index]
        self.block = nn.ModuleList(
            ResBlock(inputs if j == 0 else outputs, outputs, spec, passes) for j in range(spec.resnets)
        )
        time, space = spec.time_down[index], spec.space_down[index]
        self.downsample = Downsample(outputs, time, space, passes) if time * space > 1 else None

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        for block in self.block:
            x_BCFHW = block(x_BCFHW)
        return x_BCFHW if self.downsample is None else self.downsample(x_BCFHW)


class CausalCNN(nn.Module):
    """Pixels `[B, 3, F, H, W]` to the features `[B, 2 C, T, h, w]` that `quant_conv` turns into moments."""

    def __init__(self, spec: VideoVAESpec, passes: FrameOps) -> None:
        super().__init__()
        narrow = replace(passes, padded=PLAIN.padded)  # three channels are no kernel's
        self.conv_in = CausalConv(PIXEL_CHANNELS, spec.channels[0], narrow)
        self.down = nn.ModuleList(Level(index, spec, passes) for index in range(len(spec.channels)))
        self.norm_out = nn.GroupNorm(spec.norm_groups, spec.channels[-1], eps=spec.norm_eps)
        self.conv_out = CausalConv(spec.channels[-1], 2 * spec.latent_channels, passes)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        x_BCFHW = self.conv_in(x_BCFHW)
        for level in self.down:
            x_BCFHW = level(x_BCFHW)
        return self.conv_out(x_BCFHW, self.norm_out)


def num_latents(frames: int, spec: VideoVAESpec) -> int:
    """Latent frames of an encoded video: 1 for a picture, 5n + 2 for 17n + 5 frames (SPEC 4.2, 8.1)."""
    return 1 if frames == 1 else -(-frames // spec.clip) * spec.clip_latents - spec.token_drop


class VideoEncoder(nn.Module):
    """Encoder with its fixed tiling. Clips and tiles are dealt out over `ranks`.

    `compute` is the dtype of the CNN: float32 is the definition, float16 is close (its norms still sum in float32).
    `passes` are its convolutions and what stands between them.
    """

    def __init__(
        self,
        spec: VideoVAESpec,
        ranks: Axis | None = None,
        compute: torch.dtype = torch.float32,
        passes: FrameOps = PLAIN,
    ) -> None:
        super().__init__()
        self.spec, self.ranks, self.compute, self.passes = spec, ranks or Axis("tiles"), compute, passes
        self.encoder = CausalCNN(spec, passes)
        self.quant_conv = nn.Conv3d(2 * spec.latent_channels, 2 * spec.latent_channels, 1)

    def freeze(self) -> None:
        """Cast the CNN's weights to `compute` and lay them out for `passes`, once the stored ones are assigned."""
        cast: Any = self.encoder.to  # its annotations lack the order of memory
        cast(dtype=self.compute, memory_format=self.passes.order)
        for module in self.encoder.modules():
            if isinstance(module, nn.Conv3d):
                self.passes.prepare(module)

    @torch.no_grad()
    def encode(self, pixels_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float32 `[B, 24, T, h, w]`, of ImageNet-normalised pixels `[B, 3, F, H, W]`.

        H and W are multiples of 16 and at least 32. Clips go to the weights' device one at a time, so the pixels
        may stay on the host. The latents are not normalised with the checkpoint's mean and std (SPEC 8.4). Raises
        RuntimeError where float16 is too narrow for what the weights make of these pixels.
        """
        clips = self._clips(pixels_BCFHW)
        parts = list(self._moments(clips))
        moments = parts[0] if pixels_BCFHW.shape[2] == 1 else torch.cat(parts, dim=2)[:, :, : -self.spec.token_drop]
        if self.compute != torch.float32 and not bool(moments.isfinite().all()):
            raise RuntimeError(
                "vae_encode: these pixels leave fp16's range in the video VAE's encoder; use tf32 or fp32"
            )
        mean, logvar = moments.chunk(2, dim=1)
        return mean.contiguous(), torch.exp(0.5 * logvar.clamp(-30.0, 20.0))

    def _clips(self, pixels_BCFHW: Tensor) -> list[Tensor]:
        """Views of 17 frames; the last one is filled up with its last frame. One frame alone is a picture."""
        clip, frames = self.spec.clip, pixels_BCFHW.shape[2]
        parts = list(pixels_BCFHW.split(clip, dim=2))
        if frames > 1 and frames % clip:
            last = parts[-1][:, :, -1:].expand(-1, -1, clip - frames % clip, -1, -1)
            parts[-1] = torch.cat([parts[-1], last], dim=2)
        return parts

    def _moments(self, clips: list[Tensor]) -> Iterator[Tensor]:
        """Mean and log variance of each clip: tiles of pixels in, their moments blended on the latent grid."""
        spec, device = self.spec, self.quant_conv.weight.device
        height, width = clips[0].shape[-2:]
        grid = split_canvas(height, width, spec.tile, spec.tile_overlap, spec.space)
        tiles = map_tiles(
            lambda tile: self.quant_conv(self.encoder(tile.to(self.compute)).float()),
            lambda number: clips[number].to(device, torch.float32),
            len(clips),
            grid,
            1,
            self.ranks,
        )
        for _ in clips:
            yield stitch(tiles, grid.divided(spec.space))
