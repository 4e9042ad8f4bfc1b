"""What is refused before anything is made: names, folders, options, room on the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from twinreel.errors import RequestError
from twinreel.output import OutputOptions, check_output, check_space, estimate_bytes, latents_path, sidecar_path
from twinreel.output.report import replacing
from twinreel.output.write import Media

MEDIA = Media(np.zeros((22, 64, 96, 3), np.uint8), np.zeros((2, 29_600), np.float32))


def refused(field: str, words: str, path: Path, **options: object) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_output(path, OutputOptions(**options))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_names_beside_each_other():
    assert sidecar_path("x/out.mp4") == Path("x/out.json") and sidecar_path("a.json") == Path("a.json.json")
    assert latents_path(Path("x/out.mp4")) == Path("x/out.latents.safetensors")


def test_nothing_that_exists_is_replaced_unless_asked(tmp_path: Path):
    target = tmp_path / "a.mp4"
    assert check_output(target, OutputOptions()) == target
    for taken in (target, tmp_path / "a.json", tmp_path / "a.latents.safetensors"):
        taken.write_bytes(b"mine")
        refused("output", taken.name, target)
        check_output(target, OutputOptions(overwrite=True))
        taken.unlink()
    MEDIA.save(target)
    with pytest.raises(RequestError, match="--overwrite .in Python overwrite=True"):
        MEDIA.save(target)
    assert MEDIA.save(target, overwrite=True) == target
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_latents_that_are_being_decoded_are_no_obstacle(tmp_path: Path):
    source = tmp_path / "a.latents.safetensors"
    source.write_bytes(b"latents")
    assert check_output(tmp_path / "a.mp4", OutputOptions(), source) == tmp_path / "a.mp4"
    refused("output", "twinreel decode", tmp_path / "a.mkv")


def test_a_folder_of_frames_is_replaced_and_any_other_is_safe(tmp_path: Path):
    shots = tmp_path / "shots"
    shots.mkdir()
    check_output(shots, OutputOptions())  # an empty folder is no loss
    MEDIA.save(shots)
    assert len(os.listdir(shots)) == 23
    refused("output", "exists", shots)
    Media(MEDIA.video[:5], MEDIA.audio).save(shots, overwrite=True)
    assert len(os.listdir(shots)) == 6 and sorted(os.listdir(tmp_path)) == ["shots", "shots.json"]
    (shots / "diary.txt").write_text("mine")
    refused("output", "other files", shots, overwrite=True)
    (tmp_path / "plain").write_text("mine")
    refused("output", "is a file", tmp_path / "plain", overwrite=True)
    refused("output", "is a folder", (tmp_path / "b.mp4") if (tmp_path / "b.mp4").mkdir() is None else shots)


@pytest.mark.parametrize(
    ("name", "options", "field", "words"),
    [
        ("a.avi", {}, "output", r"\.mp4, \.mkv, \.webm, \.wav, \.npz"),
        ("none/a.mp4", {}, "output", "does not exist"),
        ("a.mp4", {"crf": 52}, "crf", "0 to 51"),
        ("a.mp4", {"crf": True}, "crf", "0 to 51"),
        ("a.mp4", {"preset": "best"}, "preset", "ultrafast"),
        ("a.wav", {"audio": False}, "audio", "sound alone"),
        ("a.npz", {"crf": 20}, "crf", "means nothing"),
        ("shots", {"preset": "slow"}, "preset", "means nothing"),
    ],
)
def test_what_cannot_be(tmp_path: Path, name: str, options: dict[str, object], field: str, words: str):
    refused(field, words, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody, root included, can write to."""
    folder = tmp_path / "locked"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("root here may write everywhere and may not mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder(read_only: Path):
    refused("output", "cannot be written to", read_only / "a.mp4")


def test_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size, frames, samples = (1344, 768), 124, 165_600
    need = {s: estimate_bytes(tmp_path / f"a{s}", OutputOptions(), size, frames, samples) for s in (".mp4", ".npz")}
    assert 20e6 < need[".mp4"] < 60e6 and need[".npz"] > 1344 * 768 * 124 * 3
    assert estimate_bytes(tmp_path / "a.mp4", OutputOptions(crf=30), size, frames, samples) < need[".mp4"] / 1.5
    check_space(tmp_path / "a.mp4", OutputOptions(), size, frames, samples)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=need[".mp4"] - 1))
    with pytest.raises(RequestError, match="MB are free"):
        check_space(tmp_path / "a.mp4", OutputOptions(), size, frames, samples)


def test_a_folder_survives_a_failure(tmp_path: Path):
    shots = MEDIA.save(tmp_path / "shots")
    before = sorted(os.listdir(shots))
    with pytest.raises(KeyboardInterrupt), replacing(shots) as temporary:
        temporary.mkdir()
        (temporary / "frame-00000.png").write_bytes(b"half")
        raise KeyboardInterrupt
    assert sorted(os.listdir(shots)) == before and sorted(os.listdir(tmp_path)) == ["shots", "shots.json"]


def test_overwrite_is_a_truth_value_and_not_a_word(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="^overwrite: got 'no'"):
        check_output(tmp_path / "a.mp4", OutputOptions(overwrite="no"))  # type: ignore[arg-type]
