"""Plan + prompt rows -> PackedLayout: which row is what, and where it stands on the rotary clock (SPEC 5).

Positions are float64 and every sum is in the order the checkpoint was trained with; see `docs/numerics.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .plan import Plan
from .spec import AUDIO_CHANNELS, TAG_AUDIO, TAG_VIDEO, Spec

_SCALE = 32  # spatial coordinates of a square canvas span [0, 32)
_FRAME = 5.0 / 3.0  # rotary time of one frame: 40 audio latents a second over 24 frames a second
_LATENT_FRAMES = (1, 4, 4, 4, 4)  # frames behind each latent of a clip

SHARD_ROWS = 64  # what kernels like: a rank's rows are a multiple of it
PADDING_TAG = -1

CLOCK_VIDEO, CLOCK_AUDIO, CLOCK_CONDITION, CLOCK_AUDIO_CONDITION = range(4)


@dataclass(frozen=True)
class Segment:
    """A run of rows of one kind (`text`, `video`, `audio`) and role (`text`, `condition`, `target`)."""

    kind: str
    role: str
    start: int
    rows: int
    label: str


@dataclass(frozen=True)
class PackedLayout:
    """The packed sequence, on CPU. S rows in all.

    `positions_S3` fp64 (t, h, w); `tags_S` int64 in {0 video, 1 text, 2 audio}; `clock_S` int64, which timestep a row
    has (`CLOCK_*`); the three index tensors are int64, conditions before targets. `condition_video` and
    `condition_audio` count the leading rows of the video and audio rows that are conditions.
    """

    segments: tuple[Segment, ...]
    positions_S3: Tensor
    tags_S: Tensor
    clock_S: Tensor
    text_indices: Tensor
    video_indices: Tensor
    audio_indices: Tensor
    condition_video: int
    condition_audio: int

    @property
    def rows(self) -> int:
        """S."""
        return len(self.tags_S)


@dataclass(frozen=True)
class Shard:
    """The rows of one of several ranks: a run of the packed sequence, filled up to whole `SHARD_ROWS` at its end.

    `layout` has this rank's rows (no segments): indices count from its first row, conditions are those among its own;
    padding rows have tag -1, position 0 and the clock of the target video (SPEC 2.7). `used`: rows of all ranks before
    the padding. `text`, `video`, `audio`: which of a modality's rows, in their own order, are this rank's.
    """

    layout: PackedLayout
    first: int
    used: int
    text: slice
    video: slice
    audio: slice

    def take(self, values_S: Tensor, padding: int) -> Tensor:
        """This rank's part of one value for each packed row; padding rows get `padding`."""
        own = values_S[self.first : self.first + self.layout.rows]
        missing = self.layout.rows - len(own)
        return torch.cat((own, own.new_full((missing, *own.shape[1:]), padding))) if missing else own


@dataclass(frozen=True)
class _Block:
    kind: str
    role: str
    label: str
    positions: np.ndarray


def spatial_axis(size: int, patch: int, area_root: float) -> np.ndarray:
    """Coordinates of `size // patch` rows along an axis of `size` latents, fp64; numpy's own linspace order."""
    ratio = size / area_root
    left = (1.0 - ratio) / 2.0
    return np.linspace(left, left + ratio, size // patch, endpoint=False) * _SCALE


def _spans(latents: int) -> np.ndarray:
    return np.array([_FRAME * _LATENT_FRAMES[i % 5] for i in range(latents)], dtype=np.float64)


def sequential_span(latents: int) -> float:
    """Rotary time of `latents` latent frames, added left to right: how far a reference moves the clock."""
    total = 0.0
    for span in _spans(latents):  # a plain loop: Python's sum() compensates from 3.12 on and ends on another bit
        total += float(span)
    return total


def pairwise_span(latents: int) -> float:
    """The same sum in numpy's pairwise order: where the last keyframe is anchored."""
    return float(_spans(latents).sum())


class _Frame:
    """Spatial positions of one latent frame and the two ends of its width, where sound sits."""

    def __init__(self, height: int, width: int, patch: tuple[int, int, int]) -> None:
        root = np.sqrt(height * width)
        rows = spatial_axis(height, patch[1], root)
        columns = spatial_axis(width, patch[2], root)
        self.grid = np.stack([g.reshape(-1) for g in np.meshgrid(rows, columns, indexing="ij")], axis=-1)
        self.left, self.right = float(columns[0]), float(columns[-1])

    def still(self, time: float) -> np.ndarray:
        return np.concatenate([np.full((len(self.grid), 1), time), self.grid], axis=1)

    def video(self, latents: int, origin: float) -> np.ndarray:
        prefix = np.concatenate([np.zeros(1), np.cumsum(_spans(latents)[:-1])])  # cumsum adds left to right
        times = np.repeat(origin + prefix, len(self.grid))[:, None]
        return np.concatenate([times, np.tile(self.grid, (latents, 1))], axis=1)

    def sound(self, latents: int, origin: float) -> np.ndarray:
        positions = np.zeros((AUDIO_CHANNELS * latents, 3))
        positions[:, 0] = np.tile(origin + np.arange(latents, dtype=np.float64), AUDIO_CHANNELS)
        positions[:latents, 2], positions[latents:, 2] = self.left, self.right
        return positions


def _blocks(plan: Plan, text_rows: int, spec: Spec) -> Iterator[_Block]:
    """The media blocks in packed order; the clock starts where the text ends."""
    space, patch = spec.video.space, spec.dit.patch
    target = _Frame(plan.height // space, plan.width // space, patch)
    clock = float(text_rows)
    for i, condition in enumerate(plan.conditions):
        label = f"{condition.role} {i}"
        if condition.kind == "audio":
            yield _Block("audio", "condition", label, target.sound(condition.audio_latents, clock))
            clock += float(condition.audio_latents)
            continue
        own = _Frame(condition.height // space, condition.width // space, patch)
        if condition.role == "keyframe":
            last = clock + pairwise_span(plan.latents) - _FRAME
            yield _Block("video", "condition", label, own.still(clock if condition.anchor == "first" else last))
        elif condition.kind == "image":
            yield _Block("video", "condition", label, own.still(clock))
            clock += 1.0
        else:
            if condition.audio_latents:
                yield _Block("audio", "condition", f"{label} sound", own.sound(condition.audio_latents, clock))
            yield _Block("video", "condition", label, own.video(condition.latents, clock))
            clock += max(float(condition.audio_latents), sequential_span(condition.latents))
    yield _Block("audio", "target", "target audio", target.sound(plan.audio_latents, clock))
    yield _Block("video", "target", "target video", target.video(plan.latents, clock))


_CLOCKS = {
    ("video", "target"): CLOCK_VIDEO,
    ("audio", "target"): CLOCK_AUDIO,
    ("video", "condition"): CLOCK_CONDITION,
    ("audio", "condition"): CLOCK_AUDIO_CONDITION,
}


def build_layout(plan: Plan, text_tags: Tensor, spec: Spec) -> PackedLayout:
    """The packed sequence of `plan` behind text rows tagged `text_tags` (int64 [L], 1 or 0)."""
    text_rows = len(text_tags)
    text = np.zeros((text_rows, 3))
    text[:, 0] = np.arange(text_rows)
    segments = [Segment("text", "text", 0, text_rows, "prompt")]
    positions, tags, clocks = [text], [text_tags.to(torch.int64)], [torch.full((text_rows,), CLOCK_VIDEO)]
    indices: dict[str, list[Tensor]] = {"video": [], "audio": []}
    start = text_rows
    for block in _blocks(plan, text_rows, spec):
        rows = len(block.positions)
        segments.append(Segment(block.kind, block.role, start, rows, block.label))
        positions.append(block.positions)
        tags.append(torch.full((rows,), TAG_VIDEO if block.kind == "video" else TAG_AUDIO))
        clocks.append(torch.full((rows,), _CLOCKS[block.kind, block.role]))
        indices[block.kind].append(torch.arange(start, start + rows))
        start += rows

    def conditions(kind: str) -> int:
        return sum(segment.rows for segment in segments if (segment.kind, segment.role) == (kind, "condition"))

    return PackedLayout(
        segments=tuple(segments),
        positions_S3=torch.from_numpy(np.concatenate(positions)),
        tags_S=torch.cat(tags),
        clock_S=torch.cat(clocks),
        text_indices=torch.arange(text_rows),
        video_indices=torch.cat(indices["video"]),
        audio_indices=torch.cat(indices["audio"]),
        condition_video=conditions("video"),
        condition_audio=conditions("audio"),
    )


def shard(layout: PackedLayout, ranks: int, rank: int) -> Shard:
    """The rows of `rank`. One rank has them all as they are; several have whole `SHARD_ROWS` each, the last ones perhaps
    padding alone."""
    unit = SHARD_ROWS * ranks if ranks > 1 else 1
    rows = -(-layout.rows // unit) * unit // ranks
    first = rank * rows
    present = max(0, min(rows, layout.rows - first))
    fill = (0, rows - present)
    own: dict[str, Tensor] = {}
    slices: dict[str, slice] = {}
    for kind in ("text", "video", "audio"):
        # a modality's indices ascend: conditions come before targets in the packed order too
        indices = getattr(layout, f"{kind}_indices")
        start, stop = torch.searchsorted(indices, torch.tensor([first, first + rows])).tolist()
        slices[kind], own[f"{kind}_indices"] = slice(start, stop), indices[start:stop] - first

    def leading(count: int, part: slice) -> int:
        return max(0, min(count, part.stop) - part.start)

    here = slice(first, first + present)
    mine = PackedLayout(
        segments=(),
        positions_S3=pad(layout.positions_S3[here], (0, 0, *fill)),
        tags_S=pad(layout.tags_S[here], fill, value=PADDING_TAG),
        clock_S=pad(layout.clock_S[here], fill, value=CLOCK_VIDEO),
        condition_video=leading(layout.condition_video, slices["video"]),
        condition_audio=leading(layout.condition_audio, slices["audio"]),
        **own,
    )
    return Shard(mine, first, layout.rows, **slices)


def shard_sizes(layout: PackedLayout, ranks: int) -> tuple[list[int], list[int]]:
    """How many video and how many audio rows each rank has, in rank order."""
    parts = [shard(layout, ranks, rank) for rank in range(ranks)]
    return [len(part.layout.video_indices) for part in parts], [len(part.layout.audio_indices) for part in parts]


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Video latents [1, C, T, h, w] -> rows [T*h/2*w/2, C*4]: frame-major, features (c, pt, ph, pw) (SPEC 5.1)."""
    _, channels, frames, height, width = latents.shape
    pt, ph, pw = patch
    cut = latents.reshape(channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    return cut.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * pt * ph * pw).contiguous()


def unpatchify(rows: Tensor, shape: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """Rows -> latents [1, C, T, h, w] with `shape` = (T, h, w): the inverse of `patchify`."""
    frames, height, width = shape
    pt, ph, pw = patch
    channels = rows.shape[1] // (pt * ph * pw)
    cut = rows.reshape(frames // pt, height // ph, width // pw, channels, pt, ph, pw)
    return cut.permute(3, 0, 4, 1, 5, 2, 6).reshape(1, channels, frames, height, width).contiguous()
