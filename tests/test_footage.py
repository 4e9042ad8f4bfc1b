"""Video frames: which way up, how wide, in which colours, deinterlaced, and shown when their time says."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from media_files import barred, clicked, flat, onset, picture_frame, write_mp4, yuv_frame
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.request import Reference
from twinreel.sources import Clip
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))
FINE = {"crf": "4", "preset": "medium", "bf": "2", "g": "12"}
FINE_OLD = {"qscale": "1", "flags": "+qscale", "bf": "2", "qmin": "1", "qmax": "2", "b": "8M"}


def read(path: Path, kind: str = "video", start: float | None = None, end: float | None = None) -> Any:
    return read_source(Reference(kind, path, start, end), SPEC, 362, "references[0]")


def greys(count: int) -> list[np.ndarray]:
    return [flat((30 + 4 * i,) * 3) for i in range(count)]


def grey_index(clip: Clip) -> list[int]:
    return [round((float(level) - 30) / 4) for level in clip.frames.mean(axis=(1, 2, 3))]


# --- containers -------------------------------------------------------------------------------------------------------

CONTAINERS = {
    "a.mp4": ("libx264", FINE, "aac", 90_000),
    "b.mp4": ("libx265", {"crf": "4", "preset": "fast", "x265-params": "log-level=none"}, "aac", 90_000),
    "a.mov": ("mpeg4", FINE_OLD, "aac", 24),
    "prores.mov": ("prores_ks", {"profile": "3"}, "aac", 24),
    "a.mkv": ("libx264", FINE, "flac", 90_000),
    "a.webm": ("libvpx-vp9", {"crf": "4", "b": "0", "deadline": "realtime", "cpu-used": "8"}, "libopus", 1000),
    "a.avi": ("libx264", FINE, "ac3", 24),
    "b.avi": ("mpeg4", FINE_OLD, "ac3", 24),
    "c.avi": ("mjpeg", {"qscale": "1", "flags": "+qscale"}, "mp2", 24),
    "a.ts": ("libx264", FINE, "aac", 90_000),
    "b.ts": ("mpeg2video", FINE_OLD, "mp2", 24),
    "a.mts": ("libx264", FINE, "ac3", 90_000),
    "a.mpg": ("mpeg2video", FINE_OLD, "mp2", 24),
    "a.flv": ("libx264", {"crf": "4", "preset": "medium"}, "aac", 1000),
    "a.wmv": ("wmv2", {"qscale": "1", "flags": "+qscale", "b": "8M"}, "wmav2", 24),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_every_frame_and_its_sound(tmp_path: Path, name: str):
    codec, options, audio, ticks = CONTAINERS[name]
    pixels = {"prores_ks": "yuv422p10le", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
    rate = 44_100 if audio == "wmav2" else 48_000
    sound = clicked(1.0, 40 / 24, rate, 2)
    path = write_mp4(tmp_path / name, greys(40), None, sound, rate=rate, codec=codec, options=options, audio=audio,
                     ticks=ticks, pixels=pixels)  # fmt: skip
    clip = read(path, "video_audio")
    assert grey_index(clip) == list(range(40)) and not clip.notes
    # AVI, FLV, MPEG-PS and Windows Media cannot say what an encoder put in front
    slack = {"a.wmv": 0.1, "a.avi": 0.006, "b.avi": 0.006, "c.avi": 0.012}.get(name, 0.002)
    assert onset(clip.sound.samples, rate) == pytest.approx(1.0, abs=slack)


def test_an_avi_that_shows_a_frame_again(tmp_path: Path):
    # an empty chunk stands for "the same once more"
    path = write_mp4(tmp_path / "a.avi", greys(8), [i / 24 for i in (0, 1, 2, 5, 6, 7, 8, 9)], codec="mjpeg", ticks=24,
                     pixels="yuvj420p", options={"qscale": "1", "flags": "+qscale"})  # fmt: skip
    assert grey_index(read(path)) == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "mov"])
@pytest.mark.parametrize("first", [-0.5, 0.0, 0.7])
def test_streams_start_at_their_own_zero(tmp_path: Path, suffix: str, first: float):
    if suffix == "mkv" and first < 0:
        first = 0.3  # Matroska has no time before zero
    times = [first + i / 24 for i in range(48)]
    frames = [flat((255,) * 3 if i == 24 else (20, 20, 20)) for i in range(48)]
    sound = clicked(1.0, 2.0, 44_100, 2)
    path = write_mp4(tmp_path / f"a.{suffix}", frames, times, sound, rate=44_100, sound_at=first)
    clip = read(path, "video_audio")
    white = int(np.argmax(clip.frames.mean(axis=(1, 2, 3)) > 128)) / 24
    # an MP4 is shown from time zero on: what lies before is cut off by its edit list
    shown = 1.0 + (first if first < 0 and suffix in ("mp4", "mov") else 0)
    assert white == pytest.approx(shown, abs=1 / 48)
    assert onset(clip.sound.samples, 44_100) == pytest.approx(shown, abs=0.005)


@pytest.mark.parametrize("fps", [7, 12.5, 23.976, 29.97, 50, 59.94, 90])
def test_a_click_stays_with_its_white_frame_at_odd_rates(tmp_path: Path, fps: float):
    at = round(fps)
    frames = [flat((255,) * 3 if i >= at else (20, 20, 20)) for i in range(2 * at)]
    path = write_mp4(tmp_path / "a.mp4", frames, fps=fps, sound=clicked(at / fps, 2.0, 48_000, 1))
    clip = read(path, "video_audio")
    white = int(np.argmax(clip.frames.mean(axis=(1, 2, 3)) > 128)) / 24
    assert abs(white - onset(clip.sound.samples, 48_000)) <= 1 / 48 + 0.002


# --- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("turn", [0, 90, 180, 270, -90])
def test_the_red_bar_is_on_top(tmp_path: Path, suffix: str, turn: int):
    stored = np.rot90(barred(96, 128), k=-(turn // 90))
    clip = read(write_mp4(tmp_path / f"a.{suffix}", [stored] * 3, turn=turn))
    assert clip.frames.shape[1:] == (128, 96, 3)
    for place, color in (((10, 48), (255, 0, 0)), ((80, 4), (0, 255, 0)), ((80, 80), (0, 0, 255))):
        assert np.abs(clip.frames[(1, *place)].astype(int) - color).max() < 40


@pytest.mark.parametrize(
    ("size", "aspect", "turn", "canvas"),
    [
        ((96, 96), Fraction(4, 3), 0, (96, 128)),
        ((96, 96), Fraction(3, 4), 0, (128, 96)),
        ((96, 96), Fraction(4, 3), 90, (128, 96)),  # wide pixels of a turned picture are tall ones
        ((720, 576), Fraction(64, 45), 0, (96, 160)),  # PAL, 16:9
        ((720, 480), Fraction(8, 9), 0, (96, 128)),  # NTSC, 4:3
    ],
)
def test_pixel_aspect(tmp_path: Path, size: tuple[int, int], aspect: Fraction, turn: int, canvas: tuple[int, int]):
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), *size)] * 2, aspect=aspect, turn=turn)
    assert read(path).frames.shape[1:3] == canvas


@pytest.mark.parametrize(
    ("size", "aspect", "turn", "words"),
    [
        ((64, 48), Fraction(355, 51), 0, "64x48 with sample aspect ratio 355:51 is 9.28:1; .* nearest is 4:1"),
        ((64, 48), Fraction(355, 51), 90, "48x64 with sample aspect ratio 51:355 is 0.108:1; .* nearest is 1:4"),
        ((320, 64), None, 0, r"source: 320x64 is 5:1"),
    ],
)
def test_a_shape_is_refused_by_the_pixels_that_the_file_has(
    tmp_path: Path, size: tuple[int, int], aspect: Fraction | None, turn: int, words: str
):
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), *size)] * 2, aspect=aspect, turn=turn)
    with pytest.raises(RequestError, match=words):
        read(path)


@pytest.mark.parametrize(("turn", "told"), [(0, False), (90, False), (180, False), (45, True), (60, True)])
def test_an_odd_turn_is_told(tmp_path: Path, turn: int, told: bool):
    clip = read(write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9))] * 2, turn=turn))
    assert any("no quarter of a circle" in note for note in clip.notes) == told


def test_a_change_of_size_midway_is_told(tmp_path: Path):
    path = tmp_path / "a.ts"
    parts = []
    for width, first in ((64, 0), (96, 12)):
        frames = [flat((30 + 4 * (first + i),) * 3, width, 48) for i in range(12)]
        times = [1 + (first + i) / 24 for i in range(12)]
        parts.append(write_mp4(tmp_path / f"{width}.ts", frames, times, codec="mpeg2video", ticks=24,
                               options=FINE_OLD | {"bf": "0"}).read_bytes())  # fmt: skip
    path.write_bytes(b"".join(parts))
    try:
        clip = read(path)
    except RequestError as error:
        # joined streams restart their packet counters, which a reader may take for damage
        assert "broken" in str(error)
        return
    assert any("changes its size" in note for note in clip.notes)


# --- colour -----------------------------------------------------------------------------------------------------------

COLORS = [
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 255),
    (0, 0, 0),
    (128, 128, 128),
    (200, 100, 50),
    (17, 99, 180),
]
MATRICES = {
    "601": (0.299, 0.114, 5),
    "601-ntsc": (0.299, 0.114, 6),
    "709": (0.2126, 0.0722, 1),
    "2020": (0.2627, 0.0593, 9),
}


@pytest.mark.parametrize("pixels", ["yuv420p", "yuv422p10le", "yuv444p"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
def test_colours_come_back_as_they_went_in(tmp_path: Path, pixels: str, full: bool, matrix: str):
    kr, kb, number = MATRICES[matrix]
    frames = [yuv_frame(color, kr, kb, full, pixels, number) for color in COLORS]
    clip = read(write_mp4(tmp_path / "a.mkv", frames, codec="ffv1", pixels=pixels, ticks=1000))
    found = clip.frames[:, 40, 50].astype(int)
    assert np.abs(found - COLORS).max() <= 2, found.tolist()


@pytest.mark.parametrize(("width", "height", "kr", "kb"), [(64, 48, 0.299, 0.114), (1280, 720, 0.2126, 0.0722)])
def test_untagged_colours_follow_the_size(tmp_path: Path, width: int, height: int, kr: float, kb: float):
    small = [yuv_frame(color, kr, kb, False, "yuv420p", 2) for color in COLORS[:3]]
    frames = [frame.reformat(width, height) for frame in small]
    for frame in frames:
        frame.colorspace, frame.color_range = 2, 0
    clip = read(write_mp4(tmp_path / "a.mkv", frames, codec="ffv1", ticks=1000))
    assert np.abs(clip.frames[:, 40, 50].astype(int) - COLORS[:3]).max() <= 2


@pytest.mark.parametrize("pixels", ["bgr0", "gbrp10le", "gray"])
def test_video_that_is_rgb_or_grey_already(tmp_path: Path, pixels: str):
    colors = [(v, v, v) for v in (0, 16, 128, 235, 255)] if pixels == "gray" else COLORS
    frames = [picture_frame(flat(color)).reformat(format=pixels) for color in colors]
    clip = read(write_mp4(tmp_path / "a.mkv", frames, codec="ffv1", pixels=pixels, ticks=1000))
    assert np.abs(clip.frames[:, 40, 50].astype(int) - colors).max() <= 1


def test_hdr_and_transparency_are_told(tmp_path: Path):
    frame = yuv_frame((200, 100, 50), 0.2627, 0.0593, False, "yuv420p10le", 9)
    for number, words in ((16, "PQ"), (18, "HLG")):
        frame.color_trc = number
        clip = read(write_mp4(tmp_path / "a.mkv", [frame] * 2, codec="ffv1", pixels="yuv420p10le", ticks=1000))
        assert words in clip.notes[0] and "tone mapping" in clip.notes[0]
    clear = [picture_frame(flat((9, 9, 9))).reformat(format="yuva420p")] * 2
    clip = read(write_mp4(tmp_path / "b.mkv", clear, codec="ffv1", pixels="yuva420p", ticks=1000))
    assert "transparency" in clip.notes[0]


# --- interlaced -------------------------------------------------------------------------------------------------------


def combed(count: int) -> list[np.ndarray]:
    """A white block that moves 8 pixels a frame, 4 of them between the two fields."""
    frames = []
    for i in range(count):
        pixels = flat((16, 16, 16), 128, 96)
        for field in (0, 1):
            x = 8 * i + 4 * field
            pixels[field::2, x : x + 24] = 235
        frames.append(pixels)
    return frames


def comb(frames: np.ndarray) -> float:
    """How much more neighbouring lines differ than lines two apart."""
    grey = frames.astype(float).mean(axis=3)[:, 8:-8]
    return float(np.abs(np.diff(grey, axis=1)).mean() - np.abs(grey[:, 2:] - grey[:, :-2]).mean())


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mpg", "mpeg2video", {"flags": "+ildct+ilme", "b": "8M"}),
        ("a.ts", "mpeg2video", {"flags": "+ildct+ilme", "b": "8M", "bf": "2"}),
        ("a.mp4", "libx264", {"x264-params": "tff=1", "crf": "4"}),
        ("a.avi", "mpeg4", {"flags": "+ildct+ilme+qscale", "qscale": "2", "b": "8M"}),
    ],
)
def test_interlaced_video_is_deinterlaced_and_keeps_its_times(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
):
    frames = [picture_frame(pixels).reformat(format="yuv420p", interpolation="POINT") for pixels in combed(10)]
    for frame in frames:
        frame.color_range, frame.colorspace = 1, 5
    path = write_mp4(tmp_path / name, frames, fps=25, codec=codec, options=options, ticks=25)
    with av.open(str(path)) as container:
        assert all(frame.interlaced_frame for frame in container.decode(video=0)), "the test's file is progressive"
    clip = read(path)
    assert "interlaced" in clip.notes[0]
    slots = [math.floor(i * 24 / 25 + 0.5) for i in range(11)]
    assert len(clip.frames) == slots[10]
    plain = np.stack(combed(10))
    assert comb(plain) > 5 and comb(clip.frames) < comb(plain) / 4
    for i in range(10):
        bright = clip.frames[slots[i], 48].mean(axis=1) > 128
        assert abs(float(np.flatnonzero(bright).mean()) - (8 * i + 11.5 + 2)) < 4, i
