"""Bytes to pixel space and back, against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinreel.media.pixels import normalise, quantise
from twinreel.spec import PIXEL_MEAN, PIXEL_STD


def test_normalise_is_the_plain_formula():
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
    out = normalise(frames)
    assert out.shape == (1, 3, 3, 8, 6) and out.dtype == torch.float32
    mean, std = np.float32(PIXEL_MEAN), np.float32(PIXEL_STD)
    expected = (frames.astype(np.float32) / np.float32(255) - mean) / std
    assert torch.equal(out, torch.from_numpy(expected.transpose(3, 0, 1, 2)[None]))
    # the strides of the bytes, which choose the convolution's kernel
    assert out.stride()[1:] == torch.from_numpy(frames).permute(3, 0, 1, 2).stride()


def test_quantise_truncates_or_rounds():
    values = torch.linspace(-0.2, 1.2, 4001)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    pixels = (values.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1) - mean) / std
    shown = (pixels * std + mean).clamp(0, 1)[0].permute(1, 2, 3, 0).numpy()
    for rounding, function in (("truncate", np.floor), ("nearest", np.round)):
        out = quantise(pixels, rounding)
        assert out.shape == (1, 1, 4001, 3) and out.dtype == torch.uint8 and out.is_contiguous()
        assert np.array_equal(out.numpy(), function(shown * np.float32(255)).astype(np.uint8))
    with pytest.raises(ValueError, match="rounding"):
        quantise(pixels, "up")


def test_every_byte_survives_the_round_trip_by_nearest():
    frames = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    assert np.array_equal(quantise(normalise(frames), "nearest").numpy(), frames)
