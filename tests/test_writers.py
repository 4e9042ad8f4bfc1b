"""Every format: the same bytes twice, sound with its picture, sound kept whole, and memory that does not grow."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from media_files import clicked, flat, onset, tone
from twinreel.errors import RequestError
from twinreel.output import FORMATS, OutputOptions
from twinreel.output.report import hash_frames, hash_waveform
from twinreel.output.write import Media, write_media
from twinreel.output.writers import Content, container, read_back
from twinreel.output.writers.container import whole_24

CONTAINERS = (".mp4", ".mkv", ".webm")
RNG = np.random.default_rng(0)
FRAMES = RNG.integers(0, 256, (22, 4, 6, 3), dtype=np.uint8).repeat(16, axis=1).repeat(16, axis=2)
SOUND = (0.3 * RNG.standard_normal((2, 37 * 800))).clip(-1, 1).astype(np.float32)


def in_clips(frames: np.ndarray) -> list[np.ndarray]:
    return [frames[i : i + 17] for i in range(0, len(frames), 17)]


def digest(path: Path) -> str:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def heard(path: Path) -> tuple[np.ndarray, int]:
    """Samples [c, n] on the container's clock from 0 on, as a player that honours edit lists and skipped samples."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        end = None if stream.duration is None else round(stream.duration * stream.time_base * stream.rate)
        parts, first = [], None
        for frame in container.decode(stream):
            first = frame.time if first is None else first
            part = frame.to_ndarray()
            parts.append(part if frame.format.is_planar else part.reshape(-1, 2).T)
        samples = np.concatenate(parts, axis=1)
        lead = np.zeros((2, max(0, round(first * stream.rate))), samples.dtype)
        return np.concatenate([lead, samples], axis=1)[:, :end], stream.rate


@pytest.mark.parametrize("suffix", FORMATS)
def test_two_writes_are_equal_and_say_what_they_hold(tmp_path: Path, suffix: str):
    first, second = (write_media(tmp_path / f"{n}{suffix}", in_clips(FRAMES), SOUND, frames=22) for n in "ab")
    assert digest(first.path) == digest(second.path) and first.sha256 == second.sha256
    assert first.sha256["waveform"] == hash_waveform(SOUND)
    if suffix == ".wav":
        assert first.frames == 0 and "frames" not in first.sha256
    else:
        assert (first.frames, first.sha256["frames"]) == (22, hash_frames(FRAMES))
    assert first.samples == SOUND.shape[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_a_click_lands_on_its_white_frame(tmp_path: Path, suffix: str):
    frames = np.stack([flat((255,) * 3 if i == 24 else (20, 20, 20), 128, 96) for i in range(56)])
    sound = clicked(1.0, 56 / 24, 32_000, 2)
    path = write_media(tmp_path / f"a{suffix}", in_clips(frames), sound).path
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        assert [stream.start_time for stream in container.streams] == [0, 0]
        shown = [(float(frame.to_ndarray(format="gray").mean()), frame) for frame in container.decode(video)]
    assert len(shown) == 56
    white = max(shown, key=lambda pair: pair[0])[1]
    assert white.time == pytest.approx(1.0, abs=0.001)
    tags = (white.color_primaries, white.color_trc, white.colorspace, white.color_range)
    assert tuple(map(int, tags)) == (1, 1, 1, 1)  # BT.709, limited range
    samples, rate = heard(path)
    assert onset(samples.astype(np.float64), rate) == pytest.approx(float(white.time), abs=0.005)
    assert abs(samples.shape[1] - sound.shape[1] * rate / 32_000) <= rate / 1000  # whole: no frame of padding, no cut


@pytest.mark.parametrize("suffix", CONTAINERS)
@pytest.mark.parametrize("samples", [164_960, 165_600])
def test_sound_beside_a_shorter_or_longer_picture_is_whole(tmp_path: Path, suffix: str, samples: int):
    frames = np.broadcast_to(flat((9, 90, 200)), (124, 48, 64, 3))
    written = write_media(tmp_path / f"a{suffix}", [frames], tone(440, samples / 32_000, 32_000, 2)[:, :samples])
    found, rate = heard(written.path)
    assert abs(found.shape[1] / rate - written.samples / 32_000) <= 0.001
    assert abs(written.samples / 32_000 - 124 / 24) <= 1 / 80 + 1e-9


def test_flac_keeps_24_bits(tmp_path: Path):
    samples, rate = heard(write_media(tmp_path / "a.mkv", [FRAMES], SOUND).path)
    assert rate == 32_000 and np.array_equal(samples >> 8, whole_24(SOUND))
    assert np.abs((samples >> 8) / 2**23 - SOUND).max() <= 2**-23  # full scale is one step lower
    edge = np.array([[1.0, -1.0, 0.0]] * 2, np.float32)
    assert whole_24(edge)[0].tolist() == [2**23 - 1, -(2**23), 0]


def test_raw_formats_come_back_bit_for_bit(tmp_path: Path):
    folder = write_media(tmp_path / "shots", in_clips(FRAMES), SOUND).path
    pictures = [np.asarray(Image.open(folder / f"frame-{i:05d}.png")) for i in range(22)]
    assert np.array_equal(np.stack(pictures), FRAMES)
    for path in (folder / "sound.wav", write_media(tmp_path / "a.wav", [], SOUND).path):
        samples, rate = heard(path)
        assert rate == 32_000 and np.array_equal(samples, SOUND)
    with np.load(write_media(tmp_path / "a.npz", in_clips(FRAMES), SOUND, frames=22).path) as arrays:
        assert np.array_equal(arrays["frames"], FRAMES) and np.array_equal(arrays["audio"], SOUND)
        assert (int(arrays["fps"]), int(arrays["rate"])) == (24, 32_000)
    with pytest.raises(ValueError, match="announced"):
        write_media(tmp_path / "b.npz", in_clips(FRAMES), SOUND, frames=23)
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize("suffix", [suffix for suffix in FORMATS if suffix != ".wav"])
def test_no_audio(tmp_path: Path, suffix: str):
    output = OutputOptions(audio=False)
    written = write_media(tmp_path / f"a{suffix}", [FRAMES], SOUND, output, frames=22)
    assert written.samples == 0 and "waveform" not in written.sha256
    if suffix in CONTAINERS:
        with av.open(str(written.path)) as container:
            assert [stream.type for stream in container.streams] == ["video"]
    elif suffix == ".npz":
        assert zipfile.ZipFile(written.path).namelist() == ["frames.npy", "fps.npy"]
    else:
        assert not (written.path / "sound.wav").exists()


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".npz", ".wav", ""])
def test_exact_seconds_trims_both_and_takes_no_more_clips(tmp_path: Path, suffix: str):
    taken = []

    def clips():
        for i in range(3):
            taken.append(i)
            yield np.broadcast_to(flat((9, 90, 200)), (17, 48, 64, 3))

    sound = tone(440, 2.125, 32_000, 2)
    written = write_media(tmp_path / f"a{suffix}", clips(), sound, frames=51, seconds=1.0)
    assert written.samples == 32_000 and written.frames == (0 if suffix == ".wav" else 24)
    assert taken == ([] if suffix == ".wav" else [0, 1])
    if suffix in CONTAINERS:
        assert heard(written.path)[0].shape[1] == pytest.approx(heard(written.path)[1], abs=48)


def test_exact_seconds_of_a_saved_medium_follow_its_report(tmp_path: Path):
    media = Media(FRAMES, SOUND, {"plan": {"asked_seconds": 0.5}})
    path = media.save(tmp_path / "a.npz", exact_seconds=True)
    with np.load(path) as arrays:
        assert arrays["frames"].shape[0] == 12 and arrays["audio"].shape[1] == 16_000
    with pytest.raises(RequestError, match="how many seconds"):
        Media(FRAMES, SOUND).save(tmp_path / "b.npz", exact_seconds=True)
    for seconds in (-1, 0, 0.02):
        with pytest.raises(RequestError, match="no frame"):
            Media(FRAMES, SOUND, {"plan": {"asked_seconds": seconds}}).save(tmp_path / "b.npz", exact_seconds=True)


@pytest.mark.parametrize(("value", "words"), [(np.nan, "2 of 59200 values are not finite"), (1.0, "100%")])
def test_a_bad_waveform_still_saves_the_picture(tmp_path: Path, value: float, words: str):
    bad = SOUND.copy() if np.isnan(value) else np.ones_like(SOUND)
    bad[:, 7] = value
    written = write_media(tmp_path / "a.mkv", [FRAMES], bad)
    assert len(written.faults) == 1 and words in written.faults[0]
    with av.open(str(written.path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 22
    assert not write_media(tmp_path / "b.mkv", [FRAMES], SOUND).faults


@pytest.mark.parametrize("suffix", FORMATS)
def test_reading_back_finds_what_is_missing(tmp_path: Path, suffix: str):
    """A file is compared with other content than it was written from: one frame more, one sample more."""
    path = write_media(tmp_path / f"a{suffix}", [FRAMES], SOUND, frames=22).path
    for frames, sound in ((FRAMES[:21], SOUND), (FRAMES, SOUND[:, :-2000]), (FRAMES[:, :, :64], SOUND)):
        content = Content([frames], sound, OutputOptions(), expected=len(frames))
        assert len(list(content.pictures())) == len(frames)
        if suffix == ".wav" and sound is SOUND:
            read_back(path, suffix, content)
            continue
        with pytest.raises(OSError, match="does not read back"):
            read_back(path, suffix, content)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_lossless_sound_of_another_kind_is_not_as_written(tmp_path: Path, dtype: type, monkeypatch: pytest.MonkeyPatch):
    path = write_media(tmp_path / "a.mkv", [FRAMES], SOUND, frames=22).path
    content = Content([FRAMES], SOUND, OutputOptions(), expected=22)
    assert len(list(content.pictures())) == 22
    read_back(path, ".mkv", content)
    decoded = container._decoded
    monkeypatch.setattr(container, "_decoded", lambda path: (part.astype(dtype) for part in decoded(path)))
    with pytest.raises(OSError, match="its lossless sound differs"):
        read_back(path, ".mkv", content)


def test_a_file_that_does_not_read_back_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from twinreel.output import writers

    write = writers.container.write

    def losing(path: Path, suffix: str, content: Content) -> None:
        write(path, suffix, content)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])

    monkeypatch.setattr(writers.container, "write", losing)
    with pytest.raises(OSError):
        write_media(tmp_path / "a.mkv", [FRAMES], SOUND)
    assert list(tmp_path.iterdir()) == []


PEAK = """
import resource, sys
import numpy as np
from pathlib import Path
from twinreel.output.write import write_media
from twinreel.output import OutputOptions
clips, suffix, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
one = np.random.default_rng(0).integers(0, 256, (17, 12, 16, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
sound = np.zeros((2, clips * 17 * 32_000 // 24), np.float32)
output = OutputOptions() if suffix == ".npz" else OutputOptions(preset="ultrafast", crf=40)
write_media(folder / f"{clips}{suffix}", (one.copy() for _ in range(clips)), sound, output, frames=17 * clips)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".npz"])
def test_memory_does_not_grow_with_length(tmp_path: Path, suffix: str):
    """Eight times the clips: their frames would be 140 MB more, of which nothing may be held."""
    peaks = []
    for clips in (3, 24):
        words = [sys.executable, "-c", PEAK, str(clips), suffix, str(tmp_path)]
        peaks.append(int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 16_000, peaks  # KiB; the sound itself is 3.6 MB longer, and read back


def test_rates_are_whole(tmp_path: Path):
    with av.open(str(write_media(tmp_path / "a.webm", [FRAMES], tone(440, 22 / 24, 32_000, 2)).path)) as container:
        assert container.streams.video[0].average_rate == Fraction(24)
    samples, rate = heard(tmp_path / "a.webm")
    level = np.abs(np.fft.rfft(samples[0, : rate // 2]))
    assert rate == 48_000 and int(level.argmax()) * 2 == 440
