"""The miniature: the same bytes every time, sane activations, and a cache that is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import load, tiny_spec, write_tiny
from twinreel.demo import tiny
from twinreel.errors import ConfigError
from twinreel.weights import locate


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


def test_bundled_model_is_built_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.bundled_model(tmp_path / "cache")
    assert locate(folder).partitions == (tiny.ALL_TASKS,)
    assert list(folder.parent.iterdir()) == [folder], "no half-built folder is left"

    def never(*_: object, **__: object) -> Path:
        raise AssertionError("built twice")

    monkeypatch.setattr(tiny, "write_tiny", never)
    assert tiny.bundled_model(tmp_path / "cache") == folder
    with pytest.raises(AssertionError, match="built twice"):
        tiny.bundled_model(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_bundled_model_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be built there .*name a model folder"):
        tiny.bundled_model(tmp_path / "file")


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
