"""Writing: stable bytes, both streams from 0, colours that come back, and nothing left behind by a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from media_files import clicked, flat, onset, tone
from twinreel.media.read import read_source
from twinreel.output import OutputOptions
from twinreel.output.report import hash_file, hash_frames, hash_waveform
from twinreel.output.write import Media, write_media
from twinreel.request import Reference
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168))


def noisy(count: int, height: int = 96, width: int = 160) -> np.ndarray:
    """Blocks of noise: enough work for every part of the encoder."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, height // 16, width // 16, 3), dtype=np.uint8)
    return blocks.repeat(16, axis=1).repeat(16, axis=2) // 4 + 60


def in_clips(frames: np.ndarray, size: int = 17) -> Iterator[np.ndarray]:
    for i in range(0, len(frames), size):
        yield frames[i : i + size]


def test_the_same_bytes_from_every_run_and_from_python_and_stream(tmp_path: Path):
    frames, sound = noisy(39), tone(440, 39 / 24, 32_000, 2)
    # several runs: x264's macroblock tree, which is off for this reason, differed in most of them
    written = [write_media(tmp_path / f"{i}.mp4", in_clips(frames), sound) for i in range(4)]
    assert len({one.sha256["file"] for one in written}) == 1
    saved = Media(frames, sound, {"seed": 3}).save(tmp_path / "saved.mp4")
    assert hash_file(saved) == written[0].sha256["file"]
    assert written[0].frames == 39 and written[0].sha256["frames"] == hash_frames(frames)
    report = json.loads((tmp_path / "saved.json").read_text())
    assert report["seed"] == 3 and report["encoder"]["crf"] == 18
    assert report["sha256"] == written[0].sha256 and report["sha256"]["waveform"] == hash_waveform(sound)
    assert hash_file(Media(frames, sound).save(tmp_path / "small.mp4", crf=30, preset="ultrafast")) != hash_file(saved)


def test_the_file_is_what_it_says(tmp_path: Path):
    frames, sound = noisy(22), tone(440, 1.0, 32_000, 2)
    path = write_media(tmp_path / "a.mp4", in_clips(frames), sound).path
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat")
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.start_time, audio.start_time) == (0, 0)
        assert (video.codec_context.name, video.codec_context.pix_fmt, video.average_rate) == ("h264", "yuv420p", 24)
        assert (audio.codec_context.name, audio.rate, audio.layout.name) == ("aac", 32_000, "stereo")
        frame = next(container.decode(video))
        # BT.709 primaries, transfer and matrix, limited range
        tags = (frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range)
        assert tuple(map(int, tags)) == (1, 1, 1, 1)


@pytest.mark.parametrize("color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (10, 128, 200)])
def test_colours_follow_bt709_and_come_back(tmp_path: Path, color: tuple[int, int, int]):
    path = write_media(tmp_path / "a.mp4", [np.stack([flat(color, 128, 96)] * 5)], np.zeros((2, 6000), np.float32)).path
    red, green, blue = (value / 255 for value in color)
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    expected = 16 + 219 * luma, 128 + 224 * (blue - luma) / 1.8556, 128 + 224 * (red - luma) / 1.5748
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        planes = frame.to_ndarray(format="yuv420p").reshape(-1)
    found = planes[: 96 * 128].mean(), planes[96 * 128 : 96 * 160].mean(), planes[96 * 160 :].mean()
    assert np.abs(np.array(found) - expected).max() <= 1.0
    clip = read_source(Reference("video", path), SPEC, 362)
    assert np.abs(clip.frames.astype(int) - color).max() <= 2


def test_a_click_lands_on_its_white_frame(tmp_path: Path):
    frames = np.stack([flat((255,) * 3 if i == 24 else (20, 20, 20), 128, 96) for i in range(56)])
    path = write_media(tmp_path / "a.mp4", in_clips(frames), clicked(1.0, 2.35, 32_000, 2)).path
    clip = read_source(Reference("video_audio", path), SPEC, 362)
    assert clip.frames.shape == frames.shape and int(clip.frames.mean(axis=(1, 2, 3)).argmax()) == 24
    assert onset(clip.sound.samples, 32_000) == pytest.approx(1.0, abs=0.005)
    # our own output comes back whole: no frame more or less, no padding of the encoder
    assert clip.sound.samples.shape == (2, int(2.35 * 32_000)) and not clip.notes and not clip.sound.notes


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
def test_sound_may_be_shorter_or_longer_than_the_picture(tmp_path: Path, seconds: float):
    path = write_media(tmp_path / "a.mp4", [noisy(24)], tone(440, seconds, 32_000, 2)).path
    clip = read_source(Reference("video", path), SPEC, 362)
    assert len(clip.frames) == 24 and clip.sound.samples.shape == (2, int(seconds * 32_000))


def failing(frames: np.ndarray, after: int, error: type[BaseException]) -> Iterator[np.ndarray]:
    yield from in_clips(frames[:after])
    raise error("decode failed")


@pytest.mark.parametrize("after", [0, 17, 96])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, after: int, error: type[BaseException]):
    target = tmp_path / "a.mp4"
    target.write_bytes(b"old")
    with pytest.raises(error, match="decode failed"):
        write_media(target, failing(noisy(96), after, error), tone(440, 4, 32_000, 2))
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_wrong_values_are_refused(tmp_path: Path):
    frames, sound = noisy(5), tone(440, 0.2, 32_000, 2)
    for bad in (sound[:1], sound.astype(np.float64)):
        with pytest.raises(ValueError, match="waveform"):
            write_media(tmp_path / "a.mp4", [frames], bad)
    with pytest.raises(ValueError, match="clip"):
        write_media(tmp_path / "a.mp4", [frames, frames[:, :, :64]], sound)
    with pytest.raises(ValueError, match="no frames"):
        write_media(tmp_path / "a.mp4", [], sound)
    assert not list(tmp_path.iterdir())


def test_clips_are_taken_one_at_a_time(tmp_path: Path):
    sizes: list[int] = []

    def clips() -> Iterator[np.ndarray]:
        for _ in range(10):
            yield np.random.default_rng(0).integers(0, 256, (17, 96, 160, 3), dtype=np.uint8)
            # the file grows while clips come: only the encoders' delay is held back
            sizes.append(sum(p.stat().st_size for p in tmp_path.iterdir()))

    sound, output = tone(440, 10 * 17 / 24, 32_000, 2), OutputOptions(preset="ultrafast")
    path = write_media(tmp_path / "a.mp4", clips(), sound, output).path
    assert sizes[4] > 0.2 * path.stat().st_size and sizes[-1] > 0.7 * path.stat().st_size, sizes
