"""A look at media, which plans are made from, tells what reading them gives, and refuses what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from media_files import flat, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.request import Keyframe, Reference
from twinreel.sources import Clip, Picture, Sound, Source
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=64, area_cap=64 * 112))


def facts(source: Source) -> tuple[object, ...]:
    """Everything but pixels and samples."""
    if isinstance(source, Clip):
        sound = None if source.sound is None else facts(source.sound)
        return source.frames.shape, source.cut, source.notes, sound
    if isinstance(source, Picture):
        return source.pixels.shape, source.notes
    return source.samples.shape, source.rate, source.cut, source.notes


def told(item: Keyframe | Reference, most: int, look: bool) -> object:
    try:
        return facts(read_source(item, SPEC, most, "references[0]", look=look))
    except RequestError as error:
        return str(error)


RED = [flat((i, 0, 0), 96, 64) for i in range(72)]


def _truncated(path: Path) -> Path:
    whole = write_mp4(path.with_name("whole.mkv"), RED).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return path


def _variable(path: Path) -> Path:
    # frames ever further apart: a limit on frames is met long before the file ends
    times = [i * 0.04 if i < 36 else 1.44 + (i - 35) * 0.2 for i in range(72)]
    return write_mp4(path, RED, times, tone(440, 3, 48_000, 2), ticks=1000)


UNEVEN = np.cumsum(np.random.default_rng(1).uniform(0.02, 0.07, 72)).tolist()
MADE: dict[str, Callable[[Path], Path]] = {
    "plain.mp4": lambda path: write_mp4(path, RED, sound=tone(440, 3, 48_000)),
    "turned.mp4": lambda path: write_mp4(path, RED, sound=tone(440, 3, 48_000), turn=90),
    "uneven.mp4": lambda path: write_mp4(path, RED, UNEVEN, tone(440, 2, 44_100), rate=44_100),
    "variable.mkv": _variable,
    "thirty.mkv": lambda path: write_mp4(path, RED, fps=30),
    "long.mp4": lambda path: write_mp4(path, [flat((i % 250, 0, 0), 64, 64) for i in range(400)]),
    "late.mkv": lambda path: write_mp4(path, RED, [5 + i / 24 for i in range(72)], tone(440, 9, 48_000)),
    "gap.mkv": lambda path: write_mp4(path, RED, [i / 24 + 2 * (i > 30) for i in range(72)]),
    "interlaced.mp4": lambda path: write_mp4(path, RED, options={"x264-params": "tff=1", "preset": "ultrafast"}),
    "cut off.mkv": _truncated,
    "long sound.mkv": lambda path: write_mp4(path, RED, sound=tone(440, 20, 8_000), rate=8_000),
    "surround.mkv": lambda path: write_mp4(path, RED, sound=tone(440, 3, 48_000, 6), audio="ac3"),
    "sound.flac": lambda path: write_sound(path, tone(440, 3, 48_000, 2), 48_000, "flac", "s16"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("read")
    return {name: make(folder / name) for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("kind", ["video", "audio", "video_audio"])
@pytest.mark.parametrize("most", [107, 362])
def test_a_look_tells_what_reading_does(files: dict[str, Path], name: str, kind: str, most: int) -> None:
    for start, end in ((None, None), (0.5, None), (0.25, 1.5), (0.0, 100.0), (50.0, None)):
        item = Reference(kind, str(files[name]), start, end)
        assert told(item, most, look=True) == told(item, most, look=False)


@pytest.mark.parametrize("name", ["plain.mp4", "variable.mkv", "sound.flac"])
def test_an_end_past_the_source_is_told(files: dict[str, Path], name: str) -> None:
    kind = "audio" if name.endswith("flac") else "video"
    source = read_source(Reference(kind, str(files[name]), 0.0, 100.0), SPEC, 362, "references[0]", look=True)
    assert any("ends before end=100 s" in note for note in source.notes), source.notes


@pytest.mark.parametrize("most", [107, 150, 362])
def test_a_whole_file_of_variable_rate_is_not_truncated(files: dict[str, Path], most: int) -> None:
    clip = read_source(Reference("video", files["variable.mkv"]), SPEC, most, "references[0]")
    assert isinstance(clip, Clip)
    # the last frame lasts as long as those of its average rate
    assert (len(clip.frames), clip.cut) == (min(most, 208), most < 208)


def test_a_look_converts_no_frame_and_keeps_no_pixel(files: dict[str, Path], tmp_path: Path) -> None:
    clip = read_source(Reference("video", files["plain.mp4"]), SPEC, 362, look=True)
    Image.fromarray(RED[0]).save(tmp_path / "a.png")
    picture = read_source(Keyframe(tmp_path / "a.png"), SPEC, 362, look=True)
    assert isinstance(clip, Clip) and isinstance(picture, Picture)
    assert not any(clip.frames.strides) and not any(picture.pixels.strides)


def test_values_in_memory_are_checked_by_a_look(files: dict[str, Path]) -> None:
    frames = np.full((60, 64, 64, 3), 0.5, np.float32)
    frames[30] = 7
    for source in (Clip(frames, 24.0), dataclasses.replace(Clip(frames[:30], 24.0), sound=Sound(np.ones((3, 9)), 9))):
        item = Reference("video", source)
        assert told(item, 362, look=True) == told(item, 362, look=False) != ()
        with pytest.raises(RequestError):
            read_source(item, SPEC, 362, look=True)


def test_frames_side_by_side_are_the_frames_one_by_one(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    item = Reference("video", files["turned.mp4"])
    many = read_source(item, SPEC, 362)
    monkeypatch.setattr("twinreel.media.slots.FRAMES_AT_ONCE", 1)
    one = read_source(item, SPEC, 362)
    assert isinstance(many, Clip) and isinstance(one, Clip)
    assert (many.frames == one.frames).all() and many.frames.std() > 1
