"""The random miniature: the same bytes every time, sane activations; and the bundled one: whole and small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import load, tiny_spec, write_tiny
from twinreel.demo import bundled_model
from twinreel.spec import Partition
from twinreel.weights import locate, verify


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_bytes_every_time(tiny_original: Path, tiny_diffusers: Path, tmp_path: Path) -> None:
    assert contents(write_tiny(tmp_path / "again")) == contents(tiny_original)
    assert contents(write_tiny(tmp_path / "theirs", "diffusers")) == contents(tiny_diffusers)
    size = sum(len(data) for data in contents(tiny_original).values())
    assert size < 20e6, "a few megabytes"
    assert len(list((tiny_original / "FL2VA" / "transformer").glob("*.safetensors"))) >= 2


def test_unknown_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of original, diffusers, single"):
        write_tiny(tmp_path, "safetensors")


def test_the_bundled_model_is_whole_and_small() -> None:
    report = verify(bundled_model())
    assert locate(bundled_model()).partitions == (Partition("demo", ("t2va", "fl2va", "ref2va")),)
    assert report
    assert sum(path.stat().st_size for path in bundled_model().rglob("*") if path.is_file()) <= 20e6


def test_activations_stay_sane(tiny_original: Path) -> None:
    """Pictures that are not flat, sound that is neither silent nor clipped."""
    checkpoint, spec = locate(tiny_original), tiny_spec()
    noise = torch.Generator().manual_seed(0)
    pixels = load(checkpoint, "video_decoder").decode(torch.randn(1, 24, 7, 4, 4, generator=noise))
    assert pixels.shape == (1, 3, 22, 64, 64)
    assert pixels.isfinite().all() and 0.1 < pixels.std() < 2
    sound = load(checkpoint, "audio_decoder").decode(torch.randn(2, 32, 37, generator=noise))
    assert sound.shape == (2, 37 * spec.audio.hop)
    assert 0.01 < sound.std() and sound.abs().max() < 0.99
    mean, std = load(checkpoint, "video_encoder").encode(torch.randn(1, 3, 22, 64, 64, generator=noise))
    assert mean.shape == (1, 24, 7, 4, 4) and 0.1 < mean.std() < 3 and 0 < std.mean() < 10
    latents = load(checkpoint, "audio_encoder").encode(0.1 * torch.randn(2, 8000, generator=noise))
    assert latents.shape == (2, 32, 10) and 0.05 < latents.std() < 3
