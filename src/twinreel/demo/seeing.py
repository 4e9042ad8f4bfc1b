"""What pixels show: colour, shape, path, motion and contacts of each thing, read off decoded frames alone.

Backgrounds of the demo's world are neutral, so chroma separates things from them and, blended with grey, keeps its hue:
coverage is the chroma relative to the thing's own. A path is the centroid of that coverage around its median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from .world import COLORS, FPS, PLACE_BOUNDS, PLACES

FAINT = 0.16  # chroma of 1 below which a pixel is background
SMALL = 0.009  # of the short edge squared: a smaller patch is no thing
MOVES = 0.15  # of the short edge: a smaller range is standing still
SPREAD = math.sqrt(3) / 2


@dataclass(frozen=True)
class Seen:
    """One thing as measured: paths `x`, `y` float64 [F] in px, `visible` bool [F], `contacts` in seconds.

    `place` is the word of its middle position; for a slide the side it starts from. `appears`: seconds, 0 if there
    from the first frame. `share`: its part of all coloured pixels.
    """

    color: str
    shape: str
    motion: str
    place: str
    x: np.ndarray
    y: np.ndarray
    visible: np.ndarray
    contacts: tuple[float, ...]
    appears: float
    share: float


class _Points(NamedTuple):
    """Coloured pixels: frame, index of the nearest colour, column, row, and chroma relative to that colour's own."""

    frame: np.ndarray
    color: np.ndarray
    x: np.ndarray
    y: np.ndarray
    value: np.ndarray


class _Patch(NamedTuple):
    """A thing's hues and its coverage summed over columns, [F, W], and over rows, [F, H], in units of a pixel."""

    hues: list[int]
    columns: np.ndarray
    rows: np.ndarray


def look(video: Tensor | np.ndarray) -> tuple[Seen, ...]:
    """The things in frames uint8 [F, H, W, 3] at 24 frames a second, the largest patch of colour first."""
    frames = torch.as_tensor(video).cpu()
    short = min(frames.shape[1:3])
    points = _collect(frames)
    patches = _patches(points, tuple(frames.shape[:3]), SMALL * short * short)
    total = sum(float(patch.rows.sum()) for patch in patches) or 1.0
    found = [_describe(patch, points, short, total) for patch in patches]
    return tuple(sorted(found, key=lambda seen: -seen.share))


def _hue_axes() -> Tensor:
    """Unit vectors [8, 2] of the colours' hues."""
    rgb = torch.tensor(list(COLORS.values()), dtype=torch.float32)
    axes = torch.stack([rgb[:, 0] - (rgb[:, 1] + rgb[:, 2]) / 2, SPREAD * (rgb[:, 1] - rgb[:, 2])], 1)
    return axes / axes.norm(dim=1, keepdim=True)


def _collect(frames: Tensor) -> _Points:
    """The coloured pixels of frames uint8 [F, H, W, 3], each frame smoothed over 3 x 3 pixels against noise."""
    axes = _hue_axes()
    parts = []
    for i, frame in enumerate(frames):
        rgb = avg_pool2d(frame.permute(2, 0, 1).float() / 255, 3, 1, 1, count_include_pad=False)
        chroma = rgb.amax(0) - rgb.amin(0)
        y, x = torch.nonzero(chroma > FAINT, as_tuple=True)
        r, g, b = rgb[:, y, x]
        hue = torch.stack([r - (g + b) / 2, SPREAD * (g - b)], 1)
        parts.append([torch.full_like(x, i), (hue @ axes.T).argmax(1), x, y, chroma[y, x].double()])
    frame_, color, x_, y_, value = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    for c in np.unique(color):
        mine = color == c
        value[mine] = np.minimum(value[mine] / np.percentile(value[mine], 95), 1.0)
    return _Points(frame_, color, x_, y_, value)


def _patches(points: _Points, size: tuple[int, ...], least: float) -> list[_Patch]:
    """The things' patches, the largest first; a hue that travels with a larger one belongs to it."""
    count, height, width = size
    columns = np.zeros((len(COLORS), count, width))
    rows = np.zeros((len(COLORS), count, height))
    np.add.at(columns, (points.color, points.frame, points.x), points.value)
    np.add.at(rows, (points.color, points.frame, points.y), points.value)
    found: list[_Patch] = []
    for c in np.argsort(-columns.sum((1, 2))).tolist():
        patch = _Patch([c], columns[c], rows[c])
        main = next((p for p in found if _together(patch, p, 0.5 * math.sqrt(least))), None)
        if main is not None:
            main.hues.append(c)
            main.columns[:] += patch.columns
            main.rows[:] += patch.rows
        elif (patch.columns.sum(1) > least).mean() > 0.15:
            found.append(patch)
    return found


def _together(patch: _Patch, main: _Patch, few: float) -> bool:
    """Whether a patch lies on a larger one, within that one's own extent, in most frames that show both."""
    both = (patch.columns.sum(1) > few) & (main.columns.sum(1) > few)
    if not both.any():
        return False
    near = np.ones(int(both.sum()), dtype=bool)
    for part, whole in ((patch.columns, main.columns), (patch.rows, main.rows)):
        apart = np.abs(_median(part[both]) - _median(whole[both]))
        near &= apart < 0.75 * np.maximum(_extent(whole[both]), 1)
    return bool(near.mean() > 0.5)


def _median(profile: np.ndarray) -> np.ndarray:
    """Median position [F] of each row of a profile [F, n]."""
    sums = profile.cumsum(1)
    return (sums < sums[:, -1:] / 2).sum(1) + 0.5


def _extent(profile: np.ndarray) -> np.ndarray:
    """Number of bins [F] above a third of the row's peak: a half-covered edge counts about half the time."""
    return (profile > profile.max(1, keepdims=True) / 3).sum(1)


def _centroid(profile: np.ndarray) -> np.ndarray:
    """Centroid [F] of a profile [F, n] within its own extent around its median, so that far specks do not pull it."""
    at = np.arange(profile.shape[1]) + 0.5
    reach = np.maximum(np.median(_extent(profile)), 4) * 1.25
    near = profile * (np.abs(at - _median(profile)[:, None]) < reach)
    return (near * at).sum(1) / np.maximum(near.sum(1), 1e-9)


def _describe(patch: _Patch, points: _Points, short: int, total: float) -> Seen:
    columns, rows = patch.columns, patch.rows
    areas = columns.sum(1)
    visible = areas > 0.3 * np.median(areas[areas > 0.2 * areas.max()])
    x, y = _centroid(columns), _centroid(rows)
    motion = _motion(x, y, visible, MOVES * short)
    contacts = contact_times(y) if motion == "bounce" else ()
    # The tip of a triangle is two thirds of its height away from its centroid.
    reach = 1.2 * np.array([np.median(_extent(part[visible])) for part in (columns, rows)])
    shape = _shape(points, patch.hues, np.stack([x, y]), reach)
    color = list(COLORS)[patch.hues[0]]
    first = float(np.flatnonzero(visible)[0]) / FPS
    share = float(areas.sum()) / total
    return Seen(
        color, shape, motion, _place(x[visible], motion, columns.shape[1]), x, y, visible, contacts, first, share
    )


def _place(x: np.ndarray, motion: str, width: int) -> str:
    if motion == "slide":
        return "left" if x[-3:].mean() > x[:3].mean() else "right"
    middle = (x.min() + x.max()) / 2 if motion == "orbit" else np.median(x)
    return PLACES[sum(middle / width > bound for bound in PLACE_BOUNDS)]


def _motion(x: np.ndarray, y: np.ndarray, visible: np.ndarray, still: float) -> str:
    """The motion of a path: what ranges far in x, in y, in both, or in none."""
    spans = [np.percentile(path[visible], 97) - np.percentile(path[visible], 3) for path in (x, y)]
    far_x, far_y = (span > still for span in spans)
    if far_x and far_y:
        # Of two large ranges one may be a drift: a circle's are alike.
        ratio = spans[0] / spans[1]
        return "orbit" if 0.4 < ratio < 2.5 else "slide" if ratio > 1 else "bounce"
    if far_x or far_y:
        return "slide" if far_x else "bounce"
    return "rest" if visible[:3].any() else "appear"


def _shape(points: _Points, hues: list[int], centre_2F: np.ndarray, reach: np.ndarray) -> str:
    """Ball, square or triangle by moments around the path: blur hardly changes them.

    A triangle's rows are skewed (-0.57, the others 0); mean x^2 y^2 over mean x^2 times mean y^2 is 1 for a square and
    2/3 for a ball.
    """
    mine = np.isin(points.color, hues)
    dx = points.x[mine] + 0.5 - centre_2F[0][points.frame[mine]]
    dy = points.y[mine] + 0.5 - centre_2F[1][points.frame[mine]]
    weight = points.value[mine] * ((np.abs(dx) < reach[0]) & (np.abs(dy) < reach[1]))
    mean = weight / max(weight.sum(), 1e-9)
    var_x, var_y = (mean * dx**2).sum(), (mean * dy**2).sum()
    if (mean * dy**3).sum() < -0.28 * var_y**1.5:
        return "triangle"
    return "square" if (mean * dx**2 * dy**2).sum() > 0.84 * var_x * var_y else "ball"


def contact_times(y: np.ndarray) -> tuple[float, ...]:
    """Seconds of the contacts in a path `y` [F] of the centre (px, downwards): kinks between falls of one gravity.

    On each side of a lowest frame the path less gravity's parabola is a line; the contact is where the two lines meet.
    """
    low, high = np.percentile(y, 2), np.percentile(y, 99)
    gravity = float(np.median(y[6:] - 2 * y[3:-3] + y[:-6])) / 9
    times: list[float] = []
    for k in range(2, len(y) - 2):
        around = y[max(k - 7, 0) : k + 8]
        if y[k] < around.max() or y[k] < high - 0.3 * (high - low):
            continue
        time = (k + _meeting(y, k, gravity)) / FPS
        if not times or time - times[-1] > 0.25:
            times.append(time)
    return tuple(times)


def _meeting(y: np.ndarray, k: int, gravity: float) -> float:
    """Frames from `k` to where the lines before and after it meet; 0 where they hardly differ or meet far away."""
    lines: list[np.ndarray] = []
    for frames in (np.arange(max(k - 4, 0), k), np.arange(k + 1, min(k + 5, len(y)))):
        since = frames - float(k)
        lines.append(np.polyfit(since, y[frames] - gravity / 2 * since**2, 1))
    (before, before_at), (after, after_at) = lines
    if before - after < 1e-3:
        return 0.0
    meeting = (after_at - before_at) / (before - after)
    return float(meeting) if abs(meeting) < 2 else 0.0
