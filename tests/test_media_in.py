"""Reading: files, addresses and values in memory; time, orientation, colour; refusals by name."""

from __future__ import annotations

import base64
import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from media_files import barred, clicked, flat, onset, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.read import prepare, read_source
from twinreel.output.write import write_media
from twinreel.plan import make_plan
from twinreel.request import Keyframe, Reference, Request
from twinreel.sources import Clip, Picture, Sound
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))
MOST = 362


def read(kind: str, source: Any, start: float | None = None, end: float | None = None, most: int = MOST) -> Any:
    return read_source(Reference(kind, source, start, end), SPEC, most, "references[2]")


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_picture_is_the_same_by_every_way_in(tmp_path: Path):
    pixels = barred()
    path = tmp_path / "a picture.png"
    Image.fromarray(pixels).save(path)
    address = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    ways = (path, str(path), path.as_uri(), address, Image.fromarray(pixels), pixels, Picture(pixels), pixels / 255.0)
    for source in ways:
        for item in (Keyframe(source), Reference("image", source)):
            assert np.array_equal(read_source(item, SPEC, 1).pixels, pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_puts_the_red_bar_on_top(tmp_path: Path, orientation: int):
    # how a camera held that way stores an upright scene: flipped, upside down, lying on a side
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = Image.fromarray(barred())
    if orientation > 1:
        image = image.transpose(stored[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    picture = read("image", tmp_path / "a.png")
    assert np.array_equal(picture.pixels, barred())
    assert bool(picture.notes) == (orientation > 1)


def test_transparency_grey_and_sixteen_bits(tmp_path: Path):
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(tmp_path / "deep.png")
    Image.new("L", (8, 8), 77).save(tmp_path / "grey.jpg", quality=100)
    assert (read("image", tmp_path / "clear.png").pixels == 255).all()
    assert (read("image", tmp_path / "deep.png").pixels == 100).all()
    assert (read("image", tmp_path / "grey.jpg").pixels == 77).all()


# --- sounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "sample_format", "tolerance"),
    [("pcm_u8", "u8", 1 / 100), ("pcm_s16le", "s16", 1 / 16000), ("pcm_s24le", "s32", 1e-6), ("pcm_f32le", "flt", 0)],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_keeps_its_samples(tmp_path: Path, codec: str, sample_format: str, tolerance: float, channels: int):
    samples = tone(440, 0.3, 44_100, channels) * np.linspace(0.5, 1, channels, dtype=np.float32)[:, None]
    sound = read("audio", write_sound(tmp_path / "a.wav", samples, 44_100, codec, sample_format))
    assert sound.rate == 44_100 and sound.samples.dtype == np.float32 and sound.samples.shape == samples.shape
    assert np.abs(sound.samples - samples).max() <= tolerance


def test_mp3_starts_where_it_was_recorded(tmp_path: Path):
    path = write_sound(tmp_path / "a.mp3", clicked(0.5, 1.5, 44_100), 44_100, "libmp3lame", "fltp")
    assert onset(read("audio", path).samples, 44_100) == pytest.approx(0.5, abs=0.005)
    part = read("audio", path, start=0.25, end=1.0)
    assert onset(part.samples, 44_100) == pytest.approx(0.25, abs=0.005)
    assert part.samples.shape[1] == round(0.75 * 44_100)


def test_a_long_sound_is_cut_at_the_limit_and_says_so(tmp_path: Path):
    path = write_sound(tmp_path / "a.wav", tone(440, 3, 16_000), 16_000, "pcm_s16le", "s16")
    for source in (path, Sound(tone(440, 3, 16_000), 16_000)):
        sound = read("audio", source, most=24)
        assert sound.samples.shape == (1, 16_000) and sound.cut and "longer than the limit" in sound.notes[-1]
        whole = read("audio", source, end=9.0)
        assert whole.samples.shape == (1, 48_000) and not whole.cut and "ends before" in whole.notes[-1]


# --- clips ------------------------------------------------------------------------------------------------------------


def levels(clip: Clip) -> list[int]:
    return [round(float(v)) for v in clip.frames.mean(axis=(1, 2, 3))]


def greys(count: int) -> list[np.ndarray]:
    return [flat((30 + 4 * i,) * 3) for i in range(count)]


def grey_index(clip: Clip) -> list[int]:
    return [round((level - 30) / 4) for level in levels(clip)]


@pytest.mark.parametrize("fps", [12, 24, 25, 30, 30000 / 1001, 60])
def test_frames_are_held_until_the_slot_of_the_next(tmp_path: Path, fps: float):
    count = 40
    clip = read("video", write_mp4(tmp_path / "a.mp4", greys(count), fps=fps))
    slots = [math.floor(i * 24 / fps + 0.5) for i in range(count + 1)]
    expected = [i for i in range(count) for _ in range(slots[i + 1] - slots[i])]
    assert clip.fps == 24.0 and clip.sound is None and clip.frames.shape[1:] == (96, 128, 3)
    assert grey_index(clip) == expected


def test_variable_rate_goes_by_presentation_time(tmp_path: Path):
    times = [0, 0.1, 0.5, 0.52, 0.53, 1.0]
    clip = read("video", write_mp4(tmp_path / "a.mp4", greys(6), times))
    shown = grey_index(clip)
    for slot, index in enumerate(shown):
        assert index == max(i for i, t in enumerate(times) if math.floor(t * 24 + 0.5) <= slot)


def test_start_and_end_in_seconds(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mp4", greys(48), sound=clicked(1.0, 2.0, 48_000))
    clip = read("video", path, start=0.5, end=1.5)
    assert grey_index(clip) == list(range(12, 36))
    assert clip.sound.samples.shape == (1, 48_000)
    assert onset(clip.sound.samples, 48_000) == pytest.approx(0.5, abs=0.005)


def test_decoding_stops_at_the_limit_and_says_so(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mp4", greys(40), sound=tone(440, 2, 48_000))
    clip = read("video", path, most=30)
    assert grey_index(clip) == list(range(30)) and clip.cut and "longer than the limit" in clip.notes[0]
    assert clip.sound.samples.shape[1] == int(30 / 24 * 48_000) and clip.sound.cut
    exact = read("video", path, most=40)
    assert len(exact.frames) == 40 and not exact.cut and not exact.notes


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_rotation_puts_the_red_bar_on_top(tmp_path: Path, turn: int):
    # stored turned clockwise, so that the display matrix, which turns anticlockwise, brings it upright
    stored = np.rot90(barred(96, 128), k=-(turn // 90))
    clip = read("video", write_mp4(tmp_path / "a.mp4", [stored] * 3, turn=turn))
    assert clip.frames.shape[1:] == (128, 96, 3)
    for place, color in (((10, 48), (255, 0, 0)), ((80, 4), (0, 255, 0)), ((80, 80), (0, 0, 255))):
        assert np.abs(clip.frames[(1, *place)].astype(int) - color).max() < 40


def test_pixel_aspect_widens_the_canvas(tmp_path: Path):
    clip = read("video", write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), 96, 96)] * 2, aspect=Fraction(4, 3)))
    assert clip.frames.shape[1:] == (96, 128, 3)


@pytest.mark.parametrize("rate", [44_100, 48_000, 22_050])
@pytest.mark.parametrize(("picture_at", "sound_at"), [(0.0, 0.0), (0.0, 0.4), (0.4, 0.0)])
def test_a_click_stays_with_its_white_frame(tmp_path: Path, rate: int, picture_at: float, sound_at: float):
    times = [picture_at + t for t in (0, 0.1, 0.3, 0.35, 0.8, 1.0, 1.5, 1.6)]
    frames = [flat((255,) * 3 if i == 5 else (20, 20, 20)) for i in range(8)]
    sound = clicked(picture_at + 1.0 - sound_at, 2.0, rate, 2)
    path = write_mp4(tmp_path / "a.mkv", frames, times, sound, rate=rate, sound_at=sound_at)
    clip = read("video_audio", path)
    white = int(np.argmax(clip.frames.mean(axis=(1, 2, 3)) > 128)) / 24
    assert white == pytest.approx(1.0, abs=1 / 48)
    assert onset(clip.sound.samples, rate) == pytest.approx(1.0, abs=0.005)


@settings(max_examples=60, deadline=None)
@given(st.floats(2, 120), st.integers(1, 60))
def test_clips_in_memory_follow_the_slot_rule(fps: float, count: int):
    frames = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 96, 96, 3), np.uint8)
    slots = np.floor(np.arange(count) * (24 / fps) + 0.5).astype(int)
    held = np.repeat(np.arange(count), np.diff(slots, append=math.floor(count * (24 / fps) + 0.5)))
    if held.size == 0:
        with pytest.raises(RequestError):
            read("video", Clip(frames, fps))
        return
    clip = read("video", Clip(frames, fps))
    assert clip.frames[:, 0, 0, 0].tolist() == held[:MOST].tolist() and clip.cut == (held.size > MOST)


# --- refusals ---------------------------------------------------------------------------------------------------------


def broken_files(folder: Path) -> dict[str, Path]:
    """Files that cannot be read, by what is wrong with them."""
    (folder / "text.mp4").write_text("#EXTM3U\nhttp://example.com/a.ts\n")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "noise.mp4").write_bytes(bytes(range(200, 256)) * 20)
    rng = np.random.default_rng(0)
    frames = list(rng.integers(0, 256, (30, 48, 64, 3), dtype=np.uint8))
    whole = write_mp4(folder / "whole.mp4", frames, sound=tone(440, 1, 48_000)).read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    ours = write_media(folder / "ours.mp4", [np.stack(frames)], tone(440, 1, 32_000, 2)).path.read_bytes()
    assert ours.index(b"moov") < ours.index(b"mdat")
    (folder / "index first.mp4").write_bytes(ours[: len(ours) // 2])
    wav = write_sound(folder / "whole.wav", tone(440, 1, 16_000), 16_000, "pcm_s16le", "s16").read_bytes()
    (folder / "cut.wav").write_bytes(wav[: len(wav) // 2])
    mp3 = write_sound(folder / "whole.mp3", tone(440, 3, 44_100), 44_100, "libmp3lame", "fltp").read_bytes()
    (folder / "cut.mp3").write_bytes(mp3[: len(mp3) // 2])
    mkv = write_mp4(folder / "whole.mkv", frames, sound=tone(440, 1, 48_000)).read_bytes()
    (folder / "cut.mkv").write_bytes(mkv[: len(mkv) // 2])
    stream = io.BytesIO()
    Image.fromarray(frames[0]).save(stream, "PNG")
    (folder / "cut.png").write_bytes(stream.getvalue()[:2000])
    stream = io.BytesIO()
    Image.fromarray(frames[0]).save(stream, "JPEG")
    (folder / "cut.jpg").write_bytes(stream.getvalue()[:1000])
    Image.fromarray(frames[0]).save(folder / "picture.mp4", "PNG")
    write_mp4(folder / "silent.mp4", frames)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("video", "missing.mp4", "no file"),
        ("video", "text.mp4", "is text"),
        ("video", "empty.mp4", "empty"),
        ("video", "noise.mp4", "no known kind"),
        ("video", "cut.mp4", "copy it again"),
        ("video", "index first.mp4", "truncated"),
        ("video", "whole.wav", "without pictures"),
        ("video", "picture.mp4", "PNG picture"),
        ("video_audio", "silent.mp4", "no soundtrack"),
        ("audio", "silent.mp4", "without sound"),
        ("audio", "cut.wav", "truncated"),
        ("audio", "cut.mp3", "truncated"),
        ("video", "cut.mkv", "truncated"),
        ("audio", "cut.png", "PNG picture"),
        ("image", "cut.png", "copy it again"),
        ("image", "cut.jpg", "copy it again"),
        ("image", "whole.mp4", "MP4"),
        ("image", "text.mp4", "is text"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, kind: str, name: str, words: str):
    files = broken_files(tmp_path)
    with pytest.raises(RequestError) as caught:
        read(kind, files.get(name, tmp_path / name))
    assert caught.value.field == "references[2].source" and words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("image", 7, "got int"),
        ("image", np.zeros((4, 4)), r"shape \[4, 4\]"),
        ("image", np.full((4, 4, 3), 2.0), "outside"),
        ("image", "https://example.com/a.png", "not read"),
        ("image", "data:image/png,abc", "base64"),
        ("image", "data:image/png;base64,%%%", "base64"),
        ("image", "file://elsewhere/a.png", "host"),
        ("video", np.zeros((4, 4, 4, 3), np.uint8), "frame rate"),
        ("video", Clip(np.zeros((4, 96, 96, 3), np.uint8), 0), "frame rate"),
        ("video", Clip(np.zeros((4, 32, 320, 3), np.uint8), 24), "4:1"),
        ("audio", np.zeros((1, 4), np.float32), "sample rate"),
        ("video", Clip(np.zeros((4, 96, 96, 3), np.uint8), math.nan), "frame rate"),
        ("video", Clip(np.zeros((4, 96, 96, 3), np.uint8), True), "frame rate"),
        *(("video", Clip(np.zeros((4, 96, 96, 3), np.uint8), fps), "from 0.01 to") for fps in (1e-308, 1e308, 10**400)),
        ("image", "~nobody-of-this-name/x.png", "no user 'nobody-of-this-name'"),
        ("image", "x" * 300, "File name too long"),
        ("video", Clip(np.zeros((4, 96, 96, 3), np.uint8), "24"), "frame rate"),
        ("video", Clip(np.zeros((4, 96, 96, 3), np.int16), 24), "dtype int16"),
        ("video", Clip(np.zeros((4, 96, 96, 4), np.uint8), 24), r"shape \[4, 96, 96, 4\]"),
        ("video", Clip(np.zeros((0, 96, 96, 3), np.uint8), 24), "shape"),
        ("video", Clip([[1, 2], [3]], 24), "got list"),
        ("video", Clip(np.full((4, 96, 96, 3), np.nan), 24), "outside"),
        ("video", Clip(np.zeros((48, 96, 96, 3), np.uint8), 24, np.zeros((1, 9))), "for a sound"),
        ("video", Picture(np.zeros((96, 96, 3), np.uint8)), "got Picture"),
        ("image", Picture(np.zeros((96, 96), np.uint8)), "shape"),
        ("image", np.zeros((4, 4, 3), np.int64), "dtype int64"),
        ("image", np.full((4, 4, 3), -0.1), "outside"),
        ("image", None, "got NoneType"),
        ("image", b"a.png", "got bytes"),
        ("audio", Sound(np.zeros((6, 4), np.float32), 8000), "stereo"),
        ("audio", Sound(np.zeros(4, np.float32), 8000), r"shape \[4\]"),
        ("audio", Sound([0.0, 1.0], 8000), "got list"),
        ("audio", Sound(np.zeros((1, 4), np.int16), 8000), "dtype int16"),
        ("audio", Sound(np.full((1, 4), 9.0), 8000), "far beyond 1"),
        ("audio", Sound(np.full((1, 4), -np.inf), 8000), "finite"),
        ("audio", Sound(np.zeros((1, 4)), 0), "positive whole"),
        ("audio", Sound(np.zeros((1, 4)), True), "positive whole"),
        ("audio", Sound(np.zeros((1, 4)), 8000.0), "positive whole"),
        ("audio", Sound(np.zeros((1, 4)), 10**9), "192,000"),
        ("audio", Sound(np.full((1, 4), np.nan, np.float32), 8000), "finite"),
        ("audio", Sound(np.zeros((1, 0), np.float32), 8000), "nothing to read"),
    ],
)
def test_bad_values_are_refused_by_name(kind: str, source: Any, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        read(kind, source)
    assert caught.value.field == "references[2].source"


def test_numbers_of_numpy_are_numbers():
    samples, frames = tone(440, 1, 8000), np.zeros((24, 96, 96, 3), np.uint8)
    assert read("audio", Sound(samples, np.int64(8000))).rate == 8000
    clip = read("video", Clip(frames, np.float32(24), Sound(samples.astype(np.float64), 8000)))
    assert clip.fps == 24.0 and clip.sound.samples.dtype == np.float32


def test_floats_are_rounded_half_to_even_as_they_are_shown():
    frames = np.linspace(0, 1, 511).astype(np.float64).reshape(1, 511, 1, 1)[:, :96] * np.ones((2, 1, 96, 3))
    clip = read("video", Clip(frames, 24))
    assert np.array_equal(clip.frames, np.round(frames * 255).astype(np.uint8))


def test_a_start_past_the_end_names_the_start(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mp4", greys(24))
    wav = write_sound(tmp_path / "a.wav", tone(440, 1, 16_000), 16_000, "pcm_s16le", "s16")
    for kind, source in (("video", path), ("audio", wav), ("audio", Sound(tone(440, 1, 16_000), 16_000))):
        with pytest.raises(RequestError, match="ends at 1.00 s") as caught:
            read(kind, source, start=3.0)
        assert caught.value.field == "references[2].start"


# --- prepared conditions ----------------------------------------------------------------------------------------------


def test_keyframes_are_stretched_then_cropped_to_cover():
    rng = np.random.default_rng(1)
    first, last = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((70, 90, 3), (200, 100, 3)))
    request = Request("a", keyframes=(Keyframe(first), Keyframe(last, -1)), size=(160, 96))
    sources = [read_source(keyframe, SPEC, MOST) for keyframe in request.keyframes]
    plan = make_plan(request, SPEC, sources)
    one, two = prepare(plan, sources)
    lanczos = Image.Resampling.LANCZOS
    assert np.array_equal(one.frames[0], np.asarray(Image.fromarray(first).resize((160, 96), lanczos)))
    scaled = Image.fromarray(last).resize((160, 320), lanczos).crop((0, 112, 160, 208))
    assert np.array_equal(two.frames[0], np.asarray(scaled)) and two.waveform is None


def test_references_keep_their_own_shape_and_length():
    rng = np.random.default_rng(2)
    picture = rng.integers(0, 256, (64, 100, 3), dtype=np.uint8)
    frames = rng.integers(0, 256, (120, 96, 96, 3), dtype=np.uint8)
    clip = Clip(frames, 24.0, Sound(tone(440, 5, 32_000, 1), 32_000))
    sound = Sound(tone(440, 6, 48_000, 2), 48_000)
    references = (Reference("image", picture), Reference("video", clip), Reference("audio", sound))
    request = Request("a", references=references, duration=4.0)
    sources = [read_source(reference, SPEC, MOST) for reference in references]
    plan = make_plan(request, SPEC, sources)
    one, two, three = prepare(plan, sources)
    expected = Image.fromarray(picture).resize((192, 128), Image.Resampling.LANCZOS)
    assert np.array_equal(one.frames[0], np.asarray(expected))
    assert np.array_equal(two.frames, frames[:107])
    samples = int(107 / 24 * 32_000)
    assert np.array_equal(two.waveform, np.repeat(clip.sound.samples[:, :samples], 2, axis=0))
    assert three.frames is None and three.waveform.shape == (2, math.ceil(int(107 / 24 * 48_000) * 2 / 3))
