"""Figures of two videos, frame by frame as they come: PSNR, SSIM, worst frame, curves, spikes, seams, lag.

Frames are uint8 RGB `[H, W, 3]`. PSNR is pooled: 10 log10(255^2 / mean squared error over all values), None where
nothing differs. Only sums, thumbnails and the worst pair are kept, so length costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel.tiles import TileAxis, split_axis
from ..spec import FPS, VideoVAESpec

SSIM_SETTINGS = {
    "gaussian_weights": True,
    "sigma": 1.5,
    "use_sample_covariance": False,
    "data_range": 255,
    "channel_axis": -1,
}
THUMB = 16  # pixels of a thumbnail's sides: enough to find a shift in time
MOST_LAG = 12  # frames
LUMA = np.array([0.2126, 0.7152, 0.0722], dtype=np.float64)  # BT.709
Frame = NDArray[np.uint8]


def psnr(squared: float, count: float) -> float | None:
    """Decibels of a sum of squared errors over `count` values; None (infinite) when the sum is 0."""
    return None if squared == 0 or count == 0 else 10 * math.log10(255.0**2 * count / squared)


def ssim(a: Frame, b: Frame) -> float | None:
    """scikit-image's structural similarity under `SSIM_SETTINGS`; None where it is not installed or the picture is
    smaller than its window of 11 pixels."""
    try:
        from skimage.metrics import structural_similarity
    except ImportError:
        return None
    return None if min(a.shape[:2]) < 11 else float(structural_similarity(a, b, **SSIM_SETTINGS))


@dataclass
class Traits:
    """What one video alone shows: brightness over time, brightness steps over rows and columns, thumbnails."""

    luma: list[float] = field(default_factory=list)
    thumbs: list[NDArray[np.float64]] = field(default_factory=list)
    across: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    down: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, frame: Frame) -> None:
        """Take the next frame."""
        gray = frame @ LUMA
        self.luma.append(float(gray.mean()))
        rows, columns = (np.linspace(0, size, THUMB + 1).astype(int)[:-1] for size in gray.shape)
        self.thumbs.append(np.add.reduceat(np.add.reduceat(gray, rows, 0), columns, 1) / gray.size * THUMB**2)
        across, down = np.abs(np.diff(gray, axis=1)).mean(0), np.abs(np.diff(gray, axis=0)).mean(1)
        self.across = across if len(self.luma) == 1 else self.across + across
        self.down = down if len(self.luma) == 1 else self.down + down

    def spikes(self, clip: int) -> dict[str, Any]:
        """Change of mean brightness at the largest clip border (every `clip` frames), and how it compares with the
        median change from frame to frame inside clips."""
        steps = np.abs(np.diff(np.array(self.luma)))
        borders = np.arange(clip - 1, len(steps), clip)
        inside = np.delete(steps, borders)
        if not len(borders) or not len(inside):
            return {"borders": len(borders)}
        worst = int(borders[np.argmax(steps[borders])])
        usual = max(float(np.median(inside)), 1e-3)
        largest = float(steps[worst])
        return {"borders": len(borders), "frame": worst + 1, "step": largest, "times_median": largest / usual}

    def seams(self, video: VideoVAESpec) -> dict[str, Any]:
        """Brightness step across the lines where tiles begin and overlaps end, over that of their neighbours; the
        largest. 1 is no seam."""
        found = []
        for name, profile in (("column", self.across), ("row", self.down)):
            if (len(profile) + 1) % video.space:
                continue  # no canvas of ours: nobody cut it into tiles
            for line in _lines(split_axis(len(profile) + 1, video.tile, video.tile_overlap, video.space)):
                near = [profile[i] for i in range(line - 5, line + 4) if i != line - 1 and 0 <= i < len(profile)]
                found.append((float(profile[line - 1] / max(float(np.median(near)), 1e-9)), f"{name} {line}"))
        if not found:
            return {"lines": 0}
        ratio, where = max(found)
        return {"lines": len(found), "ratio": ratio, "at": where}


def _lines(axis: TileAxis) -> list[int]:
    starts = axis.starts[1:]
    return sorted({*starts, *(start + overlap for start, overlap in zip(starts, axis.overlaps, strict=True))})


class VideoPair:
    """Two videos of one size and of `fps` frames a second, `add`ed frame by frame."""

    def __init__(self, video: VideoVAESpec | None = None, with_ssim: bool = True, fps: float = FPS) -> None:
        self.video, self.with_ssim, self.fps = video or VideoVAESpec(), with_ssim, fps
        self.a, self.b = Traits(), Traits()
        self.squared: list[float] = []
        self.similar: list[float | None] = []
        self.values = 0
        self.worst: tuple[Frame, Frame] | None = None

    def add(self, a: Frame, b: Frame) -> None:
        """Take the next frame of both. ValueError when their sizes differ."""
        if a.shape != b.shape:
            raise ValueError(f"frames of {a.shape[1]}x{a.shape[0]} and {b.shape[1]}x{b.shape[0]} pixels")
        difference = a.astype(np.int32) - b
        self.squared.append(float((difference * difference).sum(dtype=np.int64)))
        self.values = a.size
        self.similar.append((1.0 if not self.squared[-1] else ssim(a, b)) if self.with_ssim else None)
        if self.worst is None or self.squared[-1] > max(self.squared[:-1]):
            self.worst = a.copy(), b.copy()
        self.a.add(a)
        self.b.add(b)

    @property
    def worst_index(self) -> int:
        """Number of the frame that differs most."""
        return int(np.argmax(self.squared))

    def curve(self, length: int = 1) -> list[float | None]:
        """PSNR pooled over runs of `length` frames."""
        runs = [self.squared[i : i + length] for i in range(0, len(self.squared), length)]
        return [psnr(sum(run), len(run) * self.values) for run in runs]

    def per_second(self) -> list[float | None]:
        """PSNR pooled over each second."""
        return self.curve(max(1, round(self.fps)))

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        frames = len(self.squared)
        if not frames:
            return {"frames": 0}
        similar = [value for value in self.similar if value is not None]
        clip = self.video.clip
        settings = ", ".join(f"{name}={value}" for name, value in SSIM_SETTINGS.items())
        how = f"scikit-image, {settings}, mean over frames" if any(self.squared) else "definition: equal frames have 1"
        return {
            "frames": frames,
            "fps": self.fps,
            "identical": not any(self.squared),
            "psnr": psnr(sum(self.squared), frames * self.values),
            "ssim": float(np.mean(similar)) if len(similar) == frames else None,
            "ssim_settings": how,
            "worst_frame": {
                "index": self.worst_index,
                "psnr": psnr(max(self.squared), self.values),
                "ssim_lowest": min(similar) if similar else None,
            },
            "psnr_per_second": self.per_second(),
            "lag_frames": lag(self.a.thumbs, self.b.thumbs),
            "brightness_spikes": {"a": self.a.spikes(clip), "b": self.b.spikes(clip)},
            "tile_seams": {"a": self.a.seams(self.video), "b": self.b.seams(self.video)},
        }


def lag(a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]) -> int:
    """Frames by which `b` shows later what `a` shows: the shift with the least mean squared difference, 0 if tied."""
    first, second = np.array(a), np.array(b)
    most = min(MOST_LAG, len(first) - 1)
    errors = {}
    for shift in sorted(range(-most, most + 1), key=abs):
        length = len(first) - abs(shift)
        x = first[max(0, -shift) :][:length]
        y = second[max(0, shift) :][:length]
        errors[shift] = float(((x - y) ** 2).mean())
    return min(errors, key=lambda shift: errors[shift])
