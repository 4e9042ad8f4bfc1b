"""Media files: starts far in, limits, covers, damage; what a file is not asked for is not read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from media_files import clicked, flat, id3, onset, picture_frame, tone, write_mp4, write_sound
from test_pictures import bombs
from twinreel.errors import RequestError
from twinreel.media import containers
from twinreel.media.read import prepare, read_source
from twinreel.output.write import write_media
from twinreel.plan import make_plan
from twinreel.request import Reference, Request
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))
FINE = {"crf": "4", "preset": "medium", "bf": "2", "g": "12"}
OLD = {"qscale": "1", "flags": "+qscale", "bf": "2", "g": "12", "b": "8M"}


def read(path: Path, kind: str = "video", start: float | None = None, end: float | None = None, most: int = 362) -> Any:
    return read_source(Reference(kind, path, start, end), SPEC, most, "references[0]")


# --- start and end ----------------------------------------------------------------------------------------------------

LONG = {
    "a.mp4": ("libx264", FINE, "aac", 90_000),
    "a.mkv": ("libx264", FINE, "flac", 90_000),
    "a.webm": ("libvpx", {"crf": "10", "b": "500k", "deadline": "realtime"}, "libopus", 1000),
    "a.ts": ("libx264", FINE, "aac", 90_000),
    "b.ts": ("mpeg2video", OLD, "mp2", 24),
    "a.mpg": ("mpeg2video", OLD, "mp2", 24),
    "a.flv": ("libx264", FINE, "aac", 1000),
    "a.avi": ("mpeg4", OLD | {"bf": "0"}, "ac3", 24),
    "b.avi": ("libx264", FINE, "ac3", 24),
}


MILLISECOND = 48  # in samples


def song(seconds: float, rate: int) -> np.ndarray:
    """Rising tones: no two moments are alike, and no encoder takes them for noise, which each decoding draws anew."""
    time = np.arange(int(seconds * rate)) / rate
    return np.stack([0.4 * np.sin(2 * np.pi * (f * time + 20 * time**2)) for f in (200, 330)]).astype(np.float32)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The greatest difference where they agree best: some containers count in whole milliseconds."""
    a, b = a[:, MILLISECOND:-MILLISECOND], b[:, : a.shape[1]]
    shifts = range(2 * MILLISECOND + 1)
    best = min(shifts, key=lambda i: np.abs(a[0, :2000] - b[0, i : i + 2000]).max())
    count = min(a.shape[1], b.shape[1] - best)
    return float(np.abs(a[:, :count] - b[:, best : best + count]).max())


@pytest.fixture
def seeks(monkeypatch: pytest.MonkeyPatch) -> list[Fraction]:
    """The places that were sought, in seconds."""
    places: list[Fraction] = []
    seek = containers._Reading._seek
    monkeypatch.setattr(containers._Reading, "_seek", lambda self, to: places.append(to) or seek(self, to))
    return places


@pytest.mark.parametrize("name", LONG)
def test_a_late_start_gives_the_frames_and_samples_of_the_whole(tmp_path: Path, name: str, seeks: list[Fraction]):
    codec, options, audio, ticks = LONG[name]
    frames = [flat((20 + 10 * (i % 24), 10 * (i // 24), 128)) for i in range(9 * 24)]
    path = write_mp4(
        tmp_path / name, frames, None, song(9, 48_000), codec=codec, options=options, audio=audio, ticks=ticks
    )
    whole = read(path)
    assert len(whole.frames) == 216 and not seeks
    for start, end in ((4.0, None), (5.55, 7.0), (8.6, None)):
        part = read(path, "video_audio", start, end)
        first, last = round(start * 24), 216 if end is None else round(end * 24)
        assert np.array_equal(part.frames, whole.frames[first:last]), (start, end)
        expected = whole.sound.samples[:, round(start * 48_000) : None if end is None else round(end * 48_000)]
        assert abs(expected.shape[1] - part.sound.samples.shape[1]) <= MILLISECOND
        assert apart(part.sound.samples, expected) < 0.02
    assert bool(seeks) == (name not in ("a.mpg", "a.flv", "b.avi"))


SOUNDS = {
    "wav": ("pcm_s16le", "s16"),
    "flac": ("flac", "s16"),
    "mp3": ("libmp3lame", "fltp"),
    "m4a": ("aac", "fltp"),
    "ogg": ("libopus", "flt"),
    "mkv": ("flac", "s16"),
    "aac": ("aac", "fltp"),
}


@pytest.mark.parametrize("suffix", SOUNDS)
def test_a_late_start_in_a_sound(tmp_path: Path, suffix: str):
    samples = song(12, 48_000)
    path = write_sound(tmp_path / f"a.{suffix}", samples, 48_000, *SOUNDS[suffix])
    whole = read(path, "audio").samples
    for start, end in ((2.0, 3.0), (5.25, 7.0), (11.5, None)):
        part = read(path, "audio", start, end).samples
        expected = whole[:, round(start * 48_000) : None if end is None else round(end * 48_000)]
        assert part.shape == expected.shape and np.abs(part - expected).max() < 0.02


def test_a_start_past_the_end_is_named(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mkv", [flat((9, 9, 9))] * 96, sound=tone(440, 4, 48_000))
    for kind in ("video", "audio"):
        for start in (4.5, 60.0, 1e6):
            with pytest.raises(RequestError, match=r"ends at 4\.\d\d s; start earlier") as caught:
                read(path, kind, start)
            assert caught.value.field == "references[0].start"


# --- limits -----------------------------------------------------------------------------------------------------------


def two_hours(path: Path) -> Path:
    """A film of 7,200 s at 2 frames per second with sound, from the packets of its first ten seconds."""
    seconds, rate = 10, 8000
    source = io.BytesIO()
    with av.open(source, "w", format="mp4") as part:
        video: Any = part.add_stream("libx264", rate=2, options={"g": "20", "bf": "0", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio: Any = part.add_stream("aac", rate=rate, layout="mono")
        for i in range(2 * seconds):
            frame = picture_frame(flat((10 * i, 60, 60)))
            frame.pts = i
            part.mux(video.encode(frame))
        part.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(tone(440, 10.24, rate), format="fltp", layout="mono")
        frame.sample_rate = rate
        part.mux(audio.encode(frame))
        part.mux(audio.encode(None))
    source.seek(0)
    with av.open(source) as part, av.open(str(path), "w") as film:
        streams = {s.index: film.add_stream_from_template(s) for s in part.streams}
        packets = [
            (p.stream.index, bytes(p), p.pts, p.dts, p.duration, p.is_keyframe, p.time_base)
            for p in part.demux()
            if p.size
        ]
        lengths = {0: seconds, 1: Fraction(sum(p[4] for p in packets if p[0] == 1), rate)}
        for turn in range(720):
            for index, data, pts, dts, duration, key, base in packets:
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.duration, packet.is_keyframe = (
                    streams[index],
                    base,
                    duration,
                    key,
                )
                shift = int(turn * lengths[index] / base)
                packet.pts, packet.dts = pts + shift, dts + shift
                film.mux_one(packet)
    return path


# A second process, so that its peak is its own; it prints seconds and MiB of each read.
MEASURE = """
import json, sys, time
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.request import Keyframe, Reference
from twinreel.spec import Spec
import av, PIL.Image
for kind, path, start in json.loads(sys.argv[1]):
    begin = time.perf_counter()
    item = Keyframe(path) if kind == "keyframe" else Reference(kind, path, start)
    try:
        source = read_source(item, Spec(), 48)
        word = f"cut={source.cut} {source.seconds:.2f} {source.notes}"
    except RequestError as error:
        word = str(error)
    # not getrusage: its peak counts the process that this one was forked from
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps([kind, time.perf_counter() - begin, peak, word]))
"""


def measured(cases: list[tuple[str, Path, float | None]]) -> list[list[Any]]:
    words = json.dumps([(kind, str(path), start) for kind, path, start in cases])
    environment = os.environ | {"PYTHONPATH": str(Path(containers.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, words], capture_output=True, text=True, env=environment, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_giants_take_neither_time_nor_memory(tmp_path: Path):
    files = {name: tmp_path / name for name in bombs()}
    for name, path in files.items():
        path.write_bytes(bombs()[name])
    # a Matroska that declares 64 x 48 and whose pictures claim 30,000 x 30,000
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream: Any = container.add_stream("mjpeg", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        frame = picture_frame(flat((9, 9, 9))).reformat(format="yuvj420p")
        stream.encode(frame)
        for i in range(24):
            packet = av.Packet(bombs()["jpeg"])
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 24)
            container.mux_one(packet)
    film = two_hours(tmp_path / "film.mp4")
    assert film.stat().st_size < 30_000_000
    cases: list[tuple[str, Path, float | None]] = [("keyframe", path, None) for path in files.values()]
    cases += [("video", tmp_path / "a.mkv", None), ("audio", film, None), ("audio", film, 7000.0)]
    results = measured(cases)
    # a clip's own canvas takes memory by itself: 48 frames of 768 x 1024 are 108 MiB
    results += measured([("video", film, None)]) + measured([("video", film, 7000.0)])
    for kind, seconds, peak, word in results:
        assert seconds < 2 and peak < 350, (kind, seconds, peak, word)
    assert all(peak < 200 for _, _, peak, _ in results[:-2]), results
    assert all("scale it down" in word for *_, word in results[:4])
    assert "without a frame that decodes" in results[4][3], results[4]
    assert all(word.startswith("cut=True 2.00") and "longer than the limit" in word for *_, word in results[5:]), (
        results
    )


def test_frames_larger_than_any_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), 128, 128)] * 3)
    monkeypatch.setattr("twinreel.media.footage.MOST_PIXELS", 100 * 100)
    with pytest.raises(RequestError, match="128x128; at most 10,000 pixels, so scale it down"):
        read(path)


def test_no_file_is_decoded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), 96, 96)] * 60, sound=tone(440, 2.5, 48_000))
    opened: list[Any] = []
    plain = av.open
    monkeypatch.setattr(av, "open", lambda *args, **words: opened.append(args) or plain(*args, **words))
    request = Request("a", references=(Reference("video_audio", path),), duration=4.0)
    sources = [read_source(reference, SPEC, 362) for reference in request.references]
    prepare(make_plan(request, SPEC, sources), sources)
    assert len(opened) == 1


def test_memory_does_not_grow_with_what_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[Any] = []
    plain = containers._Reading._take
    monkeypatch.setattr(containers._Reading, "_take", lambda self, *args: taken.append(args) or plain(self, *args))
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9))] * 240, sound=tone(440, 10, 48_000), options=FINE)
    read(path, most=24)
    assert len(taken) < 24 + 10 + 48_000 * 1.2 / 1024 + 5


def test_a_still_beside_a_long_sound_ends_the_reading(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mkv", [flat((9, 9, 9))] * 2, [0.0, 0.5], tone(440, 40, 8000), rate=8000)
    clip = read(path, most=48)
    assert len(clip.frames) <= 48 and clip.sound.seconds == pytest.approx(2.0)


# --- covers, strange streams ------------------------------------------------------------------------------------------


def test_an_album_cover_is_no_video(tmp_path: Path):
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(stream, "JPEG")
    mp3 = write_sound(tmp_path / "a.mp3", clicked(0.5, 1.0, 44_100), 44_100, "libmp3lame", "fltp")
    (tmp_path / "covered.mp3").write_bytes(id3({b"APIC": b"\0image/jpeg\0\3\0" + stream.getvalue()}) + mp3.read_bytes())
    with av.open(str(tmp_path / "covered.mp3")) as container:
        assert container.streams.video
    with av.open(str(tmp_path / "covered.m4a"), "w", format="mp4") as container, av.open(str(mp3)) as source:
        sound: Any = container.add_stream_from_template(source.streams.audio[0])
        picture: Any = container.add_stream("mjpeg", rate=1)
        picture.width, picture.height, picture.pix_fmt = 64, 64, "yuvj420p"
        picture.disposition = av.stream.Disposition.attached_pic
        packet = av.Packet(stream.getvalue())
        packet.stream, packet.pts, packet.dts, packet.time_base = picture, 0, 0, Fraction(1, 1)
        picture.encode(picture_frame(flat((9, 9, 9), 64, 64)).reformat(format="yuvj420p"))
        container.mux_one(packet)
        for data in source.demux(audio=0):
            if data.size:
                data.stream = sound
                container.mux_one(data)
    for name in ("covered.mp3", "covered.m4a"):
        assert onset(read(tmp_path / name, "audio").samples, 44_100) == pytest.approx(0.5, abs=0.03)
        with pytest.raises(RequestError, match="without pictures .*use kind audio"):
            read(tmp_path / name)


def test_our_own_longest_output_comes_back_whole(tmp_path: Path):
    frames = np.zeros((362, 96, 128, 3), np.uint8)
    frames += (np.arange(362) % 100 + 60).astype(np.uint8)[:, None, None, None]
    waveform = np.tile(clicked(10.0, 482_400 / 32_000, 32_000), (2, 1))
    path = write_media(tmp_path / "ours.mp4", [frames[:200], frames[200:]], waveform).path
    clip = read(path, "video_audio")
    assert clip.frames.shape == frames.shape and not clip.cut and not clip.notes
    found = clip.frames.mean(axis=(1, 2, 3))
    assert np.abs(found - frames.mean(axis=(1, 2, 3))).max() < 2.5
    assert clip.sound.samples.shape == (2, 482_400) and not clip.sound.cut and not clip.sound.notes
    assert onset(clip.sound.samples, 32_000) == pytest.approx(10.0, abs=0.002)
    make_plan(Request("a", references=(Reference("video_audio", path),), duration=15.0), SPEC, [clip])


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damage_midway_is_refused_with_its_time_and_may_be_left_out(tmp_path: Path):
    rng = np.random.default_rng(0)
    path = write_sound(tmp_path / "a.flac", song(6, 48_000), 48_000, "flac", "s16")
    data = bytearray(path.read_bytes())
    middle = len(data) * 2 // 3
    data[middle : middle + 20_000] = rng.integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    (tmp_path / "b.flac").write_bytes(data)
    # its frames are numbered and summed: what is lost is known, and silent
    sound = read(tmp_path / "b.flac", "audio")
    assert sound.seconds == 6.0 and "silence filled" in sound.notes[0]
    frames = [picture_frame(pixels) for pixels in rng.integers(0, 255, (96, 48, 64, 3), dtype=np.uint8)]
    for name, words in (("a.mp4", "(does not decode|broken frame).* at [12].*give an end before"), ("a.mkv", "")):
        path = write_mp4(tmp_path / name, frames, options=FINE)
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        # several frames: bytes within one may happen to decode
        data[middle : middle + 30_000] = rng.integers(0, 256, 30_000, dtype=np.uint8).tobytes()
        path.write_bytes(data)
        if words:
            with pytest.raises(RequestError, match=words):
                read(path)
        else:
            # a reader of Matroska goes on at the next cluster
            assert any("holds no frame for" in note for note in read(path).notes)
        assert len(read(path, end=1.5).frames) == 36


def test_a_recording_that_begins_between_key_frames_is_read_from_the_first(tmp_path: Path):
    frames = [flat((30 + 4 * i,) * 3) for i in range(40)]
    path = write_mp4(tmp_path / "a.ts", frames, options=FINE | {"x264-params": "scenecut=0"})
    packets = path.read_bytes()
    cut = len(packets) // 188 // 4 * 188
    (tmp_path / "b.ts").write_bytes(packets[cut:])
    try:
        clip = read(tmp_path / "b.ts")
    except RequestError as error:
        assert "broken packet" in str(error) or "without a frame" in str(error)
        return
    assert 0 < len(clip.frames) < 40
    levels = clip.frames.mean(axis=(1, 2, 3))
    assert np.abs(levels[-1] - 186) < 3


@pytest.mark.parametrize(("name", "codec"), [("a.ts", "aac"), ("a.ogg", "libopus")])
def test_an_end_that_looks_cut_is_told_where_no_size_is_declared(tmp_path: Path, name: str, codec: str):
    path = write_sound(tmp_path / name, song(3, 48_000), 48_000, codec, "flt" if codec == "libopus" else "fltp")
    assert not read(path, "audio").notes
    (tmp_path / f"cut {name}").write_bytes(path.read_bytes()[:-300])
    assert "may be truncated" in read(tmp_path / f"cut {name}", "audio").notes[0]


def test_an_unknown_codec_is_told(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9))] * 3)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzz9"))
    with pytest.raises(RequestError, match="codec|without a frame"):
        read(path)
