"""What is refused before anything is made: names, folders, options, room on the disk."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from twinreel.errors import RequestError
from twinreel.limits import apart
from twinreel.media.addresses import files_of
from twinreel.output import (
    OutputOptions,
    check_kind,
    check_output,
    check_space,
    estimate_bytes,
    latents_path,
    sidecar_path,
)
from twinreel.output.placing import replacing
from twinreel.output.write import Media
from twinreel.request import Keyframe, Reference, Request

MEDIA = Media(np.zeros((22, 64, 96, 3), np.uint8), np.zeros((2, 29_600), np.float32))


def refused(field: str, words: str, path: object, output: object = None, **options: object) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_output(path, OutputOptions(**options) if output is None else output)  # type: ignore[arg-type]
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
    other = tmp_path / "other.latents.safetensors"  # a decode leaves all latents but its own
    assert check_output(tmp_path / "a.mkv", OutputOptions(), other) == tmp_path / "a.mkv"


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
        ("a.mp4", {"overwrite": "no"}, "overwrite", "True or False"),
        ("a.mp4", {"audio": 0}, "audio", "True or False"),
        ("a.mp4", {"preset": []}, "preset", "ultrafast"),
        (".mp4", {}, "output", "ends in"),
        ("a.mp4/", {}, "output", "like a folder and like a file"),
        ("a\0.mp4", {}, "output", "a null byte"),
        ("\udcff.mp4", {}, "output", "a lone surrogate"),
        ("x" * 300 + ".mp4", {}, "output", "255 are possible; shorten it"),
        ("x" * 240 + ".mp4", {}, "output", "255 are possible; shorten it"),  # its latents have a longer name
        ("x" * 300 + "/a.mp4", {}, "output", "too long"),
        ("x/" * 3000 + "a.mp4", {}, "output", "too long"),
    ],
)
def test_what_cannot_be(tmp_path: Path, name: str, options: dict[str, object], field: str, words: str):
    refused(field, words, f"{tmp_path}/{name}", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", ".", "./", Path(), 5, None, b"a.mp4", "-", Path("-")])
def test_what_is_no_path_of_a_file(path: object):
    refused("output", "output: ", path)


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused("output", "current folder is gone", "a.mp4")
    assert check_output(tmp_path / "a.mp4", OutputOptions()) == tmp_path / "a.mp4"


def test_the_longest_name_is_written(tmp_path: Path):
    target = tmp_path / ("é" * 117 + "x.mp4")  # with its latents' ending 255 bytes
    assert MEDIA.save(target) == target and len(list(tmp_path.iterdir())) == 2
    refused("output", "shorten it", target.with_name(f"x{target.name}"))


@pytest.mark.parametrize("name", ["a.mp4", "a.json", "a.latents.safetensors", "shots"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("elsewhere"), "is a link to elsewhere"),
        (lambda path: os.mkfifo(path), "is a pipe"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
)
def test_only_plain_files_are_replaced(tmp_path: Path, name: str, make: Callable[[Path], None], words: str):
    make(tmp_path / name)
    if (name, words) != ("shots", "is a folder"):
        refused("output", words, tmp_path / ("shots" if name == "shots" else "a.mp4"), overwrite=True)


@pytest.mark.parametrize(
    ("needed", "target"),
    [
        ("a.mp4", "a.mp4"),
        ("a.json", "a.mp4"),
        ("a.latents.safetensors", "a.mp4"),
        ("link.png", "a.mp4"),
        ("hard.png", "a.mp4"),
        ("shots/frame-00000.png", "shots"),
        ("shots.json", "shots"),
        ("trace", "trace"),
        ("trace", "trace/a.mp4"),
        ("trace/more", "trace"),
    ],
)
def test_what_a_run_needs_is_never_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: str, target: str
):
    monkeypatch.chdir(tmp_path)
    for folder in ("shots", "trace"):
        (tmp_path / folder).mkdir()
    for name in ("a.mp4", "a.json", "a.latents.safetensors", "shots/frame-00000.png", "shots.json"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "link.png").symlink_to("a.mp4")
    os.link(tmp_path / "a.mp4", tmp_path / "hard.png")
    with pytest.raises(RequestError, match="which this run needs; name another output") as caught:
        check_output(target, OutputOptions(overwrite=True), needed=[Path(needed)])
    assert caught.value.field == "output"
    check_output("b.mp4", OutputOptions(), needed=[Path(needed), Path("x" * 300)])


def test_a_request_names_its_files(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    address = (tmp_path / "c d.png").as_uri()
    sources = [str(tmp_path / "a.png"), Image.open(tmp_path / "b.png"), address, "data:image/png;base64,", "http://x/y",
               np.zeros((2, 2, 3), np.uint8), "ftp://x/y", "a\0b"]  # fmt: skip
    request = Request(
        "A cat.",
        keyframes=(Keyframe(Path("k.png")),),
        references=tuple(Reference("image", source) for source in sources),
        policy="adaptive:profile=p.json",
    )
    assert files_of(request) == [
        Path("k.png"),
        *(tmp_path / name for name in ("a.png", "b.png", "c d.png")),
        Path("p.json"),
    ]


@pytest.mark.parametrize(
    ("media", "name", "field"),
    [
        (replace(MEDIA, video=MEDIA.video[:, 1:]), "a.mp4", "video"),
        (replace(MEDIA, video=MEDIA.video[:, :, :95]), "a.webm", "video"),
        (replace(MEDIA, video=MEDIA.video[:0]), "a.mp4", "video"),
        (replace(MEDIA, video=MEDIA.video[0]), "a.npz", "video"),
        (replace(MEDIA, video=MEDIA.video.astype(np.float32)), "shots", "video"),
        (replace(MEDIA, video=5), "a.mp4", "video"),
        (replace(MEDIA, audio=MEDIA.audio.astype(np.float64)), "a.mp4", "audio"),
        (replace(MEDIA, audio=MEDIA.audio[0]), "a.wav", "audio"),
        (replace(MEDIA, audio=None), "a.mkv", "audio"),
        (replace(MEDIA, audio=MEDIA.audio[:, :0]), "a.mp4", "audio"),
        (replace(MEDIA, audio=MEDIA.audio[:, :431]), "a.webm", "audio"),
        (replace(MEDIA, video=np.zeros((1, 16_386, 2, 3), np.uint8)), "a.mp4", "video"),
        (replace(MEDIA, video=np.zeros((1, 2, 16_386, 3), np.uint8)), "a.mkv", "video"),
        (replace(MEDIA, video=np.zeros((1, 65_538, 2, 3), np.uint8)), "a.webm", "video"),
        (replace(MEDIA, video=np.broadcast_to(np.uint8(0), (1, 16_384, 16_384, 3))), "a.webm", "video"),
        *(
            (replace(MEDIA, report=report), "a.mp4", "report")
            for report in (None, [], {"a": np.int64(1)}, {"a": math.nan})
        ),
    ],
)
def test_values_that_are_no_media(tmp_path: Path, media: Media, name: str, field: str):
    with pytest.raises(RequestError) as caught:
        media.save(tmp_path / name)
    assert caught.value.field == field and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "sides", "samples"), [("a.mp4", (2, 16_384), 1), ("a.mkv", (16_384, 2), 1), ("a.webm", (65_536, 2), 432)]
)
def test_the_most_and_least_that_a_format_takes(tmp_path: Path, name: str, sides: tuple[int, int], samples: int):
    media = Media(np.zeros((1, *sides, 3), np.uint8), MEDIA.audio[:, :samples])
    assert media.save(tmp_path / name).exists()


def test_only_what_goes_into_a_file_is_looked_at(tmp_path: Path):
    odd = replace(MEDIA, video=MEDIA.video[:2, :3, :5])
    broken = np.full_like(MEDIA.audio, np.nan)
    assert (
        odd.save(tmp_path / "odd.npz").exists()
        and replace(odd, video=MEDIA.video[:0]).save(tmp_path / "a.wav").exists()
    )
    assert replace(odd, video=None).save(tmp_path / "b.wav").exists()
    assert replace(odd, audio=None).save(tmp_path / "c.npz", audio=False).exists()
    for audio, faults in ((True, 1), (False, 0)):
        path = replace(MEDIA, audio=broken).save(tmp_path / f"{audio}.mp4", audio=audio)
        assert len(json.loads(path.with_suffix(".json").read_text())["faults"]) == faults


@pytest.mark.parametrize("output", [{}, 0, "", [], "fast"])
def test_options_of_another_type(tmp_path: Path, output: object):
    refused("output", "give OutputOptions", tmp_path / "a.mp4", output)
    with pytest.raises(RequestError, match="give OutputOptions"):
        MEDIA.save(tmp_path / "a.mp4", output)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("need", "free", "told"),
    [
        (31_000_000, 2_000_000, ("31", "2")),
        (6_300_000, 5_700_000, ("6.3", "5.7")),
        (6_000_001, 6_000_000, ("6.000001", "6.000000")),
    ],
)
def test_what_is_needed_and_what_is_free_look_different(need: int, free: int, told: tuple[str, str]):
    assert apart(need, free, 1e6) == told


@pytest.mark.parametrize("name", ["x" * 300, "file/a.mp4"])
def test_a_name_that_no_file_can_have_is_no_kind(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="too long|Not a directory"):
        check_kind("output", tmp_path / name)


def test_a_folder_survives_a_failure(tmp_path: Path):
    shots = MEDIA.save(tmp_path / "shots")
    before = sorted(os.listdir(shots))
    with pytest.raises(KeyboardInterrupt), replacing(shots) as temporary:
        temporary.mkdir()
        (temporary / "frame-00000.png").write_bytes(b"half")
        raise KeyboardInterrupt
    assert sorted(os.listdir(shots)) == before and sorted(os.listdir(tmp_path)) == ["shots", "shots.json"]
