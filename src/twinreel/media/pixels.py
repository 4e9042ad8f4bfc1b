"""Between bytes and the video VAE's pixel space (SPEC 4.3, 8.4, 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..spec import PIXEL_MEAN, PIXEL_STD

if TYPE_CHECKING:
    import torch


def normalise(frames: NDArray[np.uint8], device: str | torch.device = "cpu") -> torch.Tensor:
    """Bytes to ImageNet-normalised pixels.

    Args:
        frames: uint8 `[F, H, W, 3]`.
        device: where the arithmetic runs.

    Returns:
        fp32 `[1, 3, F, H, W]`, strided as the channels-last bytes were: the strides choose the convolution's kernel
        and with it the last bit of a condition latent.
    """
    import torch

    x_1CFHW = torch.from_numpy(np.require(frames, requirements=["C", "W"])).to(device).permute(3, 0, 1, 2)[None]
    mean, std = _constants(x_1CFHW.device)
    # divide, subtract, divide: three fp32 roundings that a folded scale and shift would not repeat
    return (x_1CFHW.to(torch.float32).div(255.0) - mean) / std


def quantise(pixels: torch.Tensor, rounding: str = "truncate") -> torch.Tensor:
    """Decoder output to bytes.

    Args:
        pixels: fp32 `[1, 3, f, H, W]` in ImageNet-normalised space.
        rounding: `truncate` is the released runtime's rule, `nearest` (half to even) diffusers' PIL output.

    Returns:
        uint8 `[f, H, W, 3]`, contiguous, on the same device.
    """
    import torch

    if rounding not in ("truncate", "nearest"):
        raise ValueError(f"rounding is truncate or nearest, not {rounding!r}")
    mean, std = _constants(pixels.device)
    # multiply, then add: the other spelling, (y - (-mean/std)) / (1/std), can flip a byte by one
    scaled = (pixels.to(torch.float32) * std + mean).clamp(0, 1) * 255.0
    if rounding == "nearest":
        scaled = scaled.round()
    return scaled[0].permute(1, 2, 3, 0).to(torch.uint8).contiguous()


def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    def filled(values: tuple[float, ...]) -> torch.Tensor:
        # on the device itself: a copy from the host would wait for all that is queued there
        each = [torch.full((1, 1, 1, 1, 1), value, dtype=torch.float32, device=device) for value in values]
        return torch.cat(each, dim=1)

    return filled(PIXEL_MEAN), filled(PIXEL_STD)
