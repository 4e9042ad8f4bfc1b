"""Figures of two videos and sounds against values worked out by hand; files, latents, reports, and the page."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from media_files import write_mp4
from twinreel import Media, cli
from twinreel.errors import RequestError
from twinreel.spec import VideoVAESpec
from twinreel.tools.compare import compare, compare_media, summary
from twinreel.tools.pictures import Traits, VideoPair, lag, ssim
from twinreel.tools.plots import Frame, Point, draw_lines, draw_points
from twinreel.tools.sounds import envelope_lag
from twinreel.tools.targets import json_text

RNG = np.random.default_rng(5)
RATE = 32_000


def moving(frames: int = 40, height: int = 48, width: int = 64, late: int = 0) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    made = []
    for i in range(frames):
        t = i - late
        ball = np.hypot(x - 10 - t, y - 24) < 8
        made.append(np.where(ball[..., None], (220, 60, 40), (90, 100, 120)))
    return np.stack(made).astype(np.uint8)


def clicks(seconds: float = 1.7, late: int = 0) -> np.ndarray:
    samples = np.zeros((2, int(seconds * RATE)), np.float32)
    for start in (6_000, 21_000, 40_000):
        samples[:, start + late : start + late + 800] = 0.5 * np.sin(np.arange(800) / 5)
    return samples


def test_psnr_is_pooled_over_frames_and_channels() -> None:
    a = np.full((48, 16, 16, 3), 100, np.uint8)
    b = a.copy()
    b[30, ..., 0] = 110  # one channel of one frame by 10
    report = compare_media((a, clicks()), (b, clicks()))
    assert report["video"]["psnr"] == pytest.approx(10 * math.log10(255**2 / (100 / 3 / 48)))
    assert report["video"]["worst_frame"]["index"] == 30
    assert report["video"]["worst_frame"]["psnr"] == pytest.approx(10 * math.log10(255**2 / (100 / 3)))
    first, second = report["video"]["psnr_per_second"]
    assert first is None and second == pytest.approx(10 * math.log10(255**2 / (100 / 3 / 24)))
    assert not report["identical"] and report["audio"]["identical"] and not report["video"]["identical"]


def test_identical_media_have_no_decibels() -> None:
    media = moving(), clicks()
    report = compare_media(media, media)
    assert report["identical"] and report["video"]["psnr"] is None and report["audio"]["snr"] is None
    assert report["video"]["ssim"] == 1.0 and report["audio"]["cosine"] == pytest.approx(1.0)
    json.dumps(report, allow_nan=False)


def test_ssim_is_scikit_images_with_its_settings_printed() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    a = RNG.integers(0, 256, (32, 40, 3), dtype=np.uint8)
    b = np.clip(a.astype(int) + RNG.integers(-20, 20, a.shape), 0, 255).astype(np.uint8)
    expected = metrics.structural_similarity(
        a, b, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255, channel_axis=-1
    )
    pair = VideoPair()
    pair.add(a, b)
    report = pair.report()
    assert report["ssim"] == ssim(a, b) == pytest.approx(expected) and 0 < expected < 1
    assert "scikit-image" in report["ssim_settings"] and "sigma" in report["ssim_settings"]
    assert ssim(a[:8], b[:8]) is None  # smaller than the window


def test_equal_frames_need_no_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    pair = VideoPair()
    pair.add(*moving()[[0, 0]])
    same = pair.report()
    assert same["ssim"] == 1.0 and "scikit" not in same["ssim_settings"]
    pair.add(*moving()[[0, 9]])
    assert pair.report()["ssim"] is None


def test_lag_of_pictures_and_sound() -> None:
    def thumbs(late: int) -> list[np.ndarray]:
        traits = Traits()
        for frame in moving(late=late):
            traits.add(frame)
        return traits.thumbs

    assert lag(thumbs(0), thumbs(3)) == 3 and lag(thumbs(3), thumbs(0)) == -3 and lag(thumbs(0), thumbs(0)) == 0
    x, y = clicks().astype(float), clicks(late=1600).astype(float)
    pairs = ((x, y, 10), (y, x, -10), (0 * x, 0 * x, 0), (x, 0 * x, None))
    assert [envelope_lag(a, b, RATE) for a, b, _ in pairs] == [points for *_, points in pairs]


def test_brightness_spikes_are_found_at_clip_borders() -> None:
    frames = np.full((40, 16, 16, 3), 100.0) + np.arange(40)[:, None, None, None] * 0.5
    frames[34:] += 8  # the third clip is brighter
    traits = Traits()
    for frame in frames.astype(np.uint8):
        traits.add(frame)
    spikes = traits.spikes(17)
    assert (spikes["borders"], spikes["frame"]) == (2, 34) and spikes["times_median"] > 5


def test_tile_seams_are_found_where_tiles_meet() -> None:
    spec = VideoVAESpec(tile=32, tile_overlap=16)
    smooth = np.repeat(np.arange(64)[None, :, None], 32, 0).repeat(3, 2).astype(np.uint8)
    seamed = smooth.copy()
    seamed[:, 32:] += 9
    flat, broken = Traits(), Traits()
    flat.add(smooth)
    broken.add(seamed)
    assert flat.seams(spec)["ratio"] == pytest.approx(1, rel=0.05)
    assert broken.seams(spec)["at"] == "column 32" and broken.seams(spec)["ratio"] == pytest.approx(10, rel=0.05)
    assert flat.seams(VideoVAESpec()) == {"lines": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    noisy = np.clip(moving().astype(int) + RNG.integers(-9, 9, moving().shape), 0, 255).astype(np.uint8)
    Media(moving(), clicks(), {"plan": {"seed": 1}}).save(folder / "a.mp4")
    Media(moving(), clicks(), {"plan": {"seed": 2}}).save(folder / "same.mp4")
    Media(noisy, clicks(late=1600), {}).save(folder / "b c.mp4")
    return folder


def test_files(files: Path) -> None:
    same = compare(files / "a.mp4", files / "same.mp4")
    assert same["identical"] and same["sha256"] == {"frames": True, "waveform": True, "file": True}
    assert same["video"]["psnr"] is None and same["av_offset"]["content"] == 0
    other = compare(files / "a.mp4", files / "b c.mp4")
    assert other["sha256"] == {"frames": False, "waveform": False, "file": False}
    assert 25 < other["video"]["psnr"] < 45 and other["video"]["frames"] == [40, 40]
    assert other["av_offset"]["content"] == pytest.approx(50, abs=6)
    text = summary(other)
    assert "different" in text and "PSNR" in text and "SNR" in text and "gaussian_weights" in text
    assert "{" not in text and "largest step" in text and "b's sound lags its picture" in text
    assert json.loads(json_text(other)) == json.loads(json.dumps(other))


@pytest.mark.parametrize(
    ("late", "apart"),
    [
        ({"sound_at": 0.2}, 200),  # told by the container, not by what is in the streams
        ({"frames": 6}, -200),
        ({"frames": 6, "sound_at": 0.2}, 0),
    ],
)
def test_sound_and_pictures_are_told_by_the_clock_of_the_file(
    tmp_path: Path, late: dict[str, float], apart: float
) -> None:
    for name, by in (("a.mkv", {}), ("b.mkv", late)):
        pictures, at = moving(60, late=int(by.get("frames", 0))), by.get("sound_at", 0.0)
        write_mp4(tmp_path / name, pictures, sound=clicks(), rate=RATE, fps=30, sound_at=at)
    page = tmp_path / "page.html"
    result = compare(tmp_path / "a.mkv", tmp_path / "b.mkv", page, with_ssim=False)
    assert result["av_offset"]["content"] == pytest.approx(apart, abs=12)
    assert result["video"]["fps"] == 30 and len(result["video"]["psnr_per_second"]) == 2


@pytest.mark.parametrize(("fps", "rate", "seconds"), [(24, 32_000, 1.7), (24, 48_000, 1.7), (48, 32_000, 0.8)])
def test_the_axes_of_a_page_are_seconds(
    fps: int, rate: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, float] = {}

    def keep(frame: Frame, series: Mapping[str, Sequence[float]], step: float = 1.0) -> str:
        drawn[frame.title] = step * len(next(iter(series.values())))
        return ""

    monkeypatch.setattr("twinreel.tools.page.draw_lines", keep)
    samples = np.resize(clicks(), (2, int(seconds * rate)))
    for name in ("a.mkv", "b.mkv"):
        write_mp4(tmp_path / name, moving(round(seconds * fps)), sound=samples, rate=rate, fps=fps)
    compare(tmp_path / "a.mkv", tmp_path / "b.mkv", tmp_path / "page.html", with_ssim=False)
    assert len(drawn) == 4
    for title, told in drawn.items():
        assert told == pytest.approx(math.ceil(seconds) if "each second" in title else seconds, abs=0.1), title


def test_the_page_is_one_file_with_relative_links(files: Path, tmp_path: Path) -> None:
    page = files / "pages" / "page.html"
    page.parent.mkdir()
    result = compare(files / "a.mp4", files / "b c.mp4", page=page, with_ssim=False)
    text = page.read_text()
    assert result["page"] == str(page) and 'src="../a.mp4"' in text and 'src="../b%20c.mp4"' in text
    assert text.count("<svg") == 4 and text.count("data:image/png;base64,") == 3
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "Worst frame" in text


def test_without_a_report_beside_it_raw_hashes_are_not_stated(files: Path, tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes((files / "a.mp4").read_bytes())
    same = compare(files / "a.mp4", tmp_path / "x.mp4")["sha256"]
    assert same == {"frames": None, "waveform": None, "file": True}


def test_reports_and_latents(files: Path, tmp_path: Path) -> None:
    result = compare(files / "a.json", files / "same.json")
    assert result["identical"] and result["differing"] == [{"field": "plan.seed", "a": 1, "b": 2}]
    assert "plan.seed: 1 | 2" in summary(result)
    save_file({"video": torch.ones(4), "audio": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"video": torch.tensor([1.0, 1.0, 1.0, 1.5]), "audio": torch.zeros(2)}, tmp_path / "b.safetensors")
    result = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    rows = {row["tensor"]: row for row in result["tensors"]}
    assert rows["audio"]["equal"] and rows["video"]["max"] == 0.5 and rows["video"]["relative_l1"] == 0.125
    assert "video: max 0.5, relative L1 0.125" in summary(result)


def test_raw_results(tmp_path: Path) -> None:
    frames = moving()
    np.savez(tmp_path / "a.npz", frames=frames, audio=clicks(), fps=24, rate=RATE)
    np.savez(tmp_path / "b.npz", frames=frames, audio=clicks() * np.float32(0.9), fps=24, rate=RATE)
    np.savez(tmp_path / "c.npz", pixels=frames)
    assert compare(tmp_path / "a.npz", tmp_path / "a.npz")["identical"]
    result = compare(tmp_path / "a.npz", tmp_path / "b.npz")
    assert result["video"]["identical"] and result["audio"]["snr"] == pytest.approx(20, abs=1e-4)
    assert "PSNR exact" in summary(result) and "SNR 20.00 dB" in summary(result)
    with pytest.raises(RequestError, match="no .npz of frames"):
        compare(tmp_path / "a.npz", tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("a.mp4", "a.json", "two of a kind"),
        ("nothing.mp4", "a.mp4", "does not exist"),
        (".", "a.mp4", "without a manifest"),
        ("text.mp4", "a.mp4", "is text .*compare reads videos and sounds"),
        ("text.json", "a.json", "no report"),
        ("small.mp4", "a.mp4", "one size"),
        ("quick.mp4", "a.mp4", "have 30 and 24 frames a second"),
        ("text.safetensors", "text.safetensors", "no safetensors file"),
    ],
)
def test_what_cannot_be_compared_is_refused(files: Path, a: str, b: str, reason: str) -> None:
    for name in ("text.mp4", "text.json", "text.safetensors"):
        (files / name).write_text("{}")
    if not (files / "small.mp4").exists():
        Media(moving(frames=2, height=32), clicks(), {}).save(files / "small.mp4")
        write_mp4(files / "quick.mp4", moving(30), fps=30)
    with pytest.raises(RequestError, match=reason):
        compare(files / a, files / b)


def test_plots_are_svg_that_parses() -> None:
    from xml.etree import ElementTree

    points = [Point(21, 40, "a & <b>", "s"), Point(34, 50, "c", "t")]
    frame = Frame("t", "x", "y")
    drawn = (
        draw_lines(frame, {"A": [1, None, 3.0], "B": []}),
        draw_lines(frame, {"A": [None]}),
        draw_points(frame, points),
    )
    for text in drawn:
        ElementTree.fromstring(text)


def npz(**changes: object) -> dict[str, object]:
    return {"frames": moving(3), "audio": clicks()[:, :3200]} | changes


RAW = {
    "rank.npz": npz(frames=moving(3)[0]),
    "dtype.npz": npz(frames=moving(3).astype(float)),
    "sides.npz": npz(frames=np.zeros((2, 0, 8, 3), np.uint8)),
    "mono.npz": npz(audio=clicks()[:, :3200][:1]),
    "double.npz": npz(audio=clicks()[:, :3200].astype(float)),
    "objects.npz": npz(audio=np.array([None])),
}


@pytest.mark.parametrize(
    "name",
    [*RAW, "half.npz", "empty.npz", "renamed.npz", "half.mp4", "empty.mp4", "half.safetensors", "empty.safetensors",
     "half.json", "empty.json", "concat.mp4", "picture.mp4", "pipe", "half/trace", "bare/trace"],
)  # fmt: skip
def test_a_damaged_file_is_named_in_three_lines(some: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {".npz": "whole.npz", ".safetensors": "whole.safetensors", ".json": "a.json"}.get(
        Path(name).suffix, "a.mp4"
    )
    np.savez("whole.npz", **npz())  # type: ignore[arg-type]
    save_file({"x": torch.ones(40)}, "whole.safetensors")
    if name in RAW:
        np.savez(name, **RAW[name])  # type: ignore[arg-type]
    elif name == "renamed.npz":
        np.save("x.npy", moving(3))
        Path("x.npy").rename(name)
    elif name == "concat.mp4":
        Path(name).write_text(f"ffconcat version 1.0\nfile {some / 'a.mp4'}\n")
    elif name == "picture.mp4":
        Path(name).write_bytes(b"\x89PNG\r\n\x1a\n")
    elif name == "pipe":
        os.mkfifo(name)
    elif name.endswith("/trace"):
        Path(name).mkdir(parents=True)
        whole, boundaries = name, [{"name": "x", "file": "x.safetensors"}]
        manifest = {"schema": "twinreel-trace/1"} | ({"boundaries": boundaries} if name.startswith("half") else {})
        Path(name, "manifest.json").write_text(json.dumps(manifest))
        Path(name, "x.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-50])
    else:
        data = Path(whole).read_bytes()
        Path(name).write_bytes(data[: len(data) // 2 if "half" in name else 0])
    assert cli.main(["compare", name, whole]) == 2
    err = capsys.readouterr().err
    assert err.startswith("twinreel: compare cannot be run: A, the first file") and len(err.splitlines()) == 3
    assert name in err and "does not exist" not in err and "unexpected" not in err, err


@pytest.mark.parametrize("kind", ["npz", "safetensors", "mp4"])
def test_flipped_bytes_are_compared_or_refused(some: Path, kind: str) -> None:
    np.savez("a.npz", frames=moving(2, 16, 16), audio=clicks()[:, :320])
    save_file({"x": torch.ones(4, 2), "y": torch.zeros(2, dtype=torch.float64)}, "a.safetensors")
    data, random = Path(f"a.{kind}").read_bytes(), np.random.default_rng(1)
    for _ in range(12 if kind == "mp4" else 150):
        changed = bytearray(data)
        for at in random.integers(0, len(data), 3):
            changed[at] = random.integers(256)
        Path(f"c.{kind}").write_bytes(changed)
        try:
            json.dumps(compare(f"a.{kind}", f"c.{kind}", with_ssim=False), allow_nan=False)
        except RequestError as error:
            assert f"c.{kind}" in str(error)


@pytest.mark.parametrize(
    ("hashes", "same", "word"),
    [
        (({}, {}), None, "neither states a hash"),
        (({"waveform": "1"}, {"waveform": "1"}), True, "identical"),
        (({"waveform": "1"}, {"waveform": "2"}), False, "different"),
        (({"waveform": "1", "frames": "2"}, {"waveform": "1"}), False, "different"),
        (({}, {"frames": "2"}), False, "different"),
    ],
)
def test_reports_are_as_equal_as_what_they_state(
    tmp_path: Path, hashes: tuple[dict[str, str], dict[str, str]], same: bool | None, word: str
) -> None:
    for name, stated in zip("ab", hashes, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps({"sha256": stated}))
    result = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert result["identical"] is same and word in summary(result).splitlines()[0]
