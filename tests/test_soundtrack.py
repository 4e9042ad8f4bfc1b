"""Sound out of files: every rate, depth and channel count; delay, gaps, silence, nonsense."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from media_files import clicked, flat, onset, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.media.resample import resample
from twinreel.request import Reference
from twinreel.sources import Sound
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))


def read(path: Path, kind: str = "audio", start: float | None = None, end: float | None = None) -> Any:
    return read_source(Reference(kind, path, start, end), SPEC, 362, "references[0]")


def pitch(sound: Sound) -> float:
    """Hertz of the loudest tone, after the resampler that every reference takes."""
    import torch

    waveform = resample(torch.from_numpy(sound.samples), sound.rate)[0].double()
    window = torch.hann_window(len(waveform), dtype=torch.float64)
    return float(torch.fft.rfft(waveform * window).abs().argmax()) * 32_000 / len(waveform)


WAYS = {
    "wav": ("pcm_s16le", "s16", (8000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000, 88_200, 96_000)),
    "flac": ("flac", "s16", (8000, 44_100, 96_000)),
    "mp3": ("libmp3lame", "fltp", (16_000, 22_050, 44_100, 48_000)),
    "m4a": ("aac", "fltp", (8000, 22_050, 44_100, 96_000)),
    "ogg": ("libopus", "flt", (8000, 48_000)),
    "webm": ("libopus", "flt", (48_000,)),
    "mkv": ("flac", "s16", (44_100,)),
    "aac": ("aac", "fltp", (44_100,)),
    "aiff": ("pcm_s16be", "s16", (44_100,)),
}


@pytest.mark.parametrize(("suffix", "rate"), [(suffix, rate) for suffix, way in WAYS.items() for rate in way[2]])
def test_a_440_hz_tone_stays_one(tmp_path: Path, suffix: str, rate: int):
    codec, sample_format, _ = WAYS[suffix]
    path = write_sound(tmp_path / f"a.{suffix}", tone(440, 1.0, rate, 2), rate, codec, sample_format)
    sound = read(path)
    assert sound.samples.shape[0] == 2 and sound.rate == (48_000 if codec == "libopus" else rate)
    assert pitch(sound) == pytest.approx(440, abs=1)
    assert np.abs(sound.samples).max() == pytest.approx(0.5, abs=0.1)
    # whole, and not longer: an ADTS stream alone cannot say what its encoder added
    assert sound.seconds == pytest.approx(1.0, abs=0.1 if suffix == "aac" else 0.002)


@pytest.mark.parametrize("suffix", ["mp3", "m4a", "ogg", "webm", "mkv", "flac", "wav"])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_encoder_delay_is_honoured(tmp_path: Path, suffix: str, channels: int):
    codec, sample_format, _ = WAYS[suffix]
    samples = clicked(0.5, 1.5, 48_000, channels)
    sound = read(write_sound(tmp_path / f"a.{suffix}", samples, 48_000, codec, sample_format))
    assert sound.samples.shape[0] == channels
    assert onset(sound.samples, sound.rate) == pytest.approx(0.5, abs=0.002)


@pytest.mark.parametrize(("suffix", "codec", "sample_format"), [("wav", "pcm_s16le", "s16"), ("flac", "flac", "s16")])
def test_six_channels_are_mixed_by_the_standard_matrix(tmp_path: Path, suffix: str, codec: str, sample_format: str):
    # left, right, centre, low, back left, back right
    scale = 1 + 2 * 0.5**0.5
    gains = [(1, 0), (0, 1), (0.5**0.5, 0.5**0.5), (0, 0), (0.5**0.5, 0), (0, 0.5**0.5)]
    for channel, (left, right) in enumerate(gains):
        samples = np.zeros((6, 9600), np.float32)
        samples[channel] = 0.8
        sound = read(write_sound(tmp_path / f"a.{suffix}", samples, 48_000, codec, sample_format))
        expected = np.array([[0.8 * left / scale], [0.8 * right / scale]])
        assert sound.samples.shape == (2, 9600) and np.abs(sound.samples - expected).max() < 1e-3
        assert "6 channels" in sound.notes[0] and "stereo" in sound.notes[0]
    loud = np.full((6, 9600), 32767 / 32768, np.float32)
    assert np.abs(read(write_sound(tmp_path / "b.wav", loud, 48_000, "pcm_s16le", "s16")).samples).max() <= 1


def test_a_soundtrack_of_six_channels(tmp_path: Path):
    samples = np.tile(clicked(0.5, 1.0, 48_000), (6, 1))
    clip = read(write_mp4(tmp_path / "a.mkv", [flat((9, 9, 9))] * 24, sound=samples, audio="ac3"), "video_audio")
    assert clip.sound.samples.shape[0] == 2 and onset(clip.sound.samples, 48_000) == pytest.approx(0.5, abs=0.006)


ROOT_HALF = 0.5**0.5
CUBE = 0x2D033


@pytest.mark.parametrize(
    ("channels", "mask", "loud", "gains", "named"),
    [
        # 7.1: left, right, centre, low, back left, back right, side left, side right
        (8, 0x63F, 0, (1, 0), "7.1"),
        (8, 0x63F, 2, (ROOT_HALF, ROOT_HALF), "7.1"),
        (8, 0x63F, 3, (0, 0), "7.1"),
        (8, 0x63F, 5, (0, ROOT_HALF), "7.1"),
        (8, 0x63F, 6, (ROOT_HALF, 0), "7.1"),
        (8, None, 6, (ROOT_HALF, 0), "without named places"),
        (8, 0x3, 6, (ROOT_HALF, 0), "without named places"),
        (6, None, 2, (ROOT_HALF, ROOT_HALF), "without named places"),
        (8, CUBE, 0, (1, 0), "cube"),
        (2, 0x9, 1, (0, 1), None),
        (9, None, 0, None, "9 channels of sound .without named places. have no known mix"),
        (64, 0x63F, 0, None, "64 channels of sound .* have no known mix"),
    ],
)
def test_every_layout_is_mixed_or_refused(
    tmp_path: Path, channels: int, mask: int | None, loud: int, gains: tuple[float, float] | None, named: str | None
):
    samples = np.zeros((channels, 9600), np.float32)
    samples[loud] = 0.5
    (tmp_path / "a.wav").write_bytes(_wav(samples, mask=mask))
    if gains is None:
        with pytest.raises(RequestError, match=named):
            read(tmp_path / "a.wav")
        return
    sound = read(tmp_path / "a.wav")
    assert sound.samples.shape == (2, 9600) and np.isfinite(sound.samples).all()
    # the scale is the layout's own; what counts is who hears it
    heard = np.abs(sound.samples).max(axis=1)
    assert heard / max(heard.max(), 1e-9) == pytest.approx(np.array(gains) / max(*gains, 1e-9), abs=2e-3)
    assert sound.notes == () if named is None else f"({named}) are mixed to stereo" in sound.notes[0]


def _wav(samples: np.ndarray, rate: int = 48_000, mask: int | None = None) -> bytes:
    """A WAV of float32 [c, n], by hand: FFmpeg writes none with 0 samples. `mask`: places of the channels."""
    data = samples.T.astype("<f4").tobytes()
    channels = len(samples)
    form = struct.pack("<HHIIHH", 3 if mask is None else 0xFFFE, channels, rate, rate * 4 * channels, 4 * channels, 32)
    if mask is not None:
        form += struct.pack("<HHIH", 22, 32, mask, 3) + bytes.fromhex("000000001000800000aa00389b71")
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("samples", "rate", "words"),
    [
        (np.zeros((2, 0)), 48_000, "nothing to read"),
        (np.full((1, 4800), np.nan), 48_000, "finite"),
        (np.full((1, 4800), np.inf), 48_000, "finite"),
        (np.full((1, 4800), 30_000.0), 48_000, "far beyond 1"),
        (np.zeros((1, 4800)), 4000, "8,000 to 192,000"),
        (np.zeros((1, 4800)), 400_000, "192,000"),
    ],
)
def test_sound_that_is_none_is_refused(tmp_path: Path, samples: np.ndarray, rate: int, words: str):
    (tmp_path / "a.wav").write_bytes(_wav(samples, rate))
    with pytest.raises(RequestError, match=words):
        read(tmp_path / "a.wav")


def test_a_soundtrack_of_no_samples_is_none_and_told(tmp_path: Path):
    path = write_mp4(tmp_path / "a.mkv", [flat((9, 9, 9))] * 24, sound=np.zeros((2, 0), np.float32), audio="flac")
    clip = read(path, "video")
    assert clip.sound is None and "no samples" in clip.notes[0]
    with pytest.raises(RequestError, match="no soundtrack"):
        read(path, "video_audio")


@pytest.mark.parametrize("suffix", ["mkv", "ts", "mov", "mp4"])
def test_sound_that_starts_late_is_silent_before(tmp_path: Path, suffix: str):
    frames = [flat((9, 9, 9))] * 48
    path = write_mp4(tmp_path / f"a.{suffix}", frames, sound=clicked(0.5, 1.0, 48_000, 2), sound_at=0.75)
    clip = read(path, "video_audio")
    assert onset(clip.sound.samples, 48_000) == pytest.approx(1.25, abs=0.005)
    assert "silence filled" in clip.sound.notes[0] and np.abs(clip.sound.samples[:, : 48_000 // 2]).max() == 0


@pytest.mark.parametrize("suffix", ["mkv", "ts", "mp4"])
def test_sound_before_the_first_picture_is_left_out_and_told(tmp_path: Path, suffix: str):
    times = [0.5 + i / 24 for i in range(48)]
    path = write_mp4(tmp_path / f"a.{suffix}", [flat((9, 9, 9))] * 48, times, clicked(1.0, 2.0, 48_000, 2))
    clip = read(path, "video_audio")
    assert onset(clip.sound.samples, 48_000) == pytest.approx(0.5, abs=0.005)
    assert any("before its first picture" in note for note in clip.sound.notes)
