"""What the conditioner is shown (SPEC 3.1 to 3.3): token ids, row tags, and the pixels behind the vision pads.

Every text piece is tokenised on its own and the ids are joined; there is no chat template and no start or end token.
Shapes: `L` prompt tokens, `n` frames, `P` patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .errors import RequestError
from .plan import condition_labels
from .sources import Prepared
from .spec import FPS, TAG_TEXT, TAG_VIDEO, ProcessorSpec, Spec
from .weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from .plan import Condition, Plan

SAMPLED_FPS = 2  # the rate at which the conditioner sees a video
TEXT_TYPE, PAD_TYPES = 0, {"image": 1, "video": 2}


@dataclass(frozen=True)
class Vision:
    """One image or video as the conditioner sees it, before its processor.

    `frames` uint8 [n, H, W, 3] RGB (n = 1 for an image); `grid` (t, h, w) in patches after the processor's resize;
    `timestamps` seconds, one a temporal slice, empty for an image.
    """

    kind: Literal["image", "video"]
    frames: np.ndarray
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One tokenised request, all int64 [L] on the CPU: `ids`; `tags`, the DiT's tag of every row (1 text, 0 a vision
    block); `token_types`, the conditioner's own (0 text and fences, 1 image pad, 2 video pad). `visions` in order."""

    ids: Tensor
    tags: Tensor
    token_types: Tensor
    visions: tuple[Vision, ...]


def present(plan: Plan, inputs: Sequence[Prepared], tokenizer: Tokenizer, spec: Spec) -> Prompt:
    """Lay out one request for the conditioner: labels and vision blocks in packed order, then the prompt.

    `inputs` are the prepared sources, one a condition. Pixels are chosen here and changed by `vision_patches`. Raises
    RequestError (`references[i]`) for a video too short to be seen.
    """
    page, visions = _lay_out(plan, inputs, tokenizer, spec)
    return page.prompt(visions)


def count_tokens(plan: Plan, tokenizer: Tokenizer, spec: Spec) -> int:
    """How many tokens `present` makes of `plan`, without its media and without torch."""
    inputs = []
    for condition in plan.conditions:
        shape = (condition.frames, condition.height, condition.width, 3)
        # a view of one byte: only the shape is looked at
        inputs.append(Prepared(np.broadcast_to(np.uint8(0), shape) if condition.frames else None, None))
    return len(_lay_out(plan, inputs, tokenizer, spec)[0].ids)


def _lay_out(plan: Plan, inputs: Sequence[Prepared], tokenizer: Tokenizer, spec: Spec) -> tuple[_Page, list[Vision]]:
    assert len(inputs) == len(plan.conditions), "one prepared input a condition"
    page = _Page(tokenizer, spec)
    visions = []
    labels = condition_labels(plan.conditions)
    for condition, (_, names), prepared in zip(plan.conditions, labels, inputs, strict=True):
        for name in names:  # a sound's before its video's; no waveform enters the conditioner
            page.text(f"<{name}>: ")
        if condition.kind == "audio":
            continue
        assert prepared.frames is not None, "an image or a video has frames"
        vision = see(condition, prepared.frames, spec.processor)
        visions.append(vision)
        if vision.kind == "image":
            page.block(vision)
        for timestamp in vision.timestamps:
            # Half to even on the exact binary value: the first pair of a video, 0.25 s, reads "<0.2 seconds>".
            page.text(f"<{timestamp:.1f} seconds>")
            page.block(vision)
    page.text(plan.prompt)
    return page, visions


class _Page:
    """The growing token lists of one presentation."""

    def __init__(self, tokenizer: Tokenizer, spec: Spec) -> None:
        self.tokenizer, self.spec = tokenizer, spec
        self.ids: list[int] = []
        self.tags: list[int] = []
        self.types: list[int] = []

    def text(self, words: str) -> None:
        ids = self.tokenizer.encode(words)
        self.ids += ids
        self.tags += [TAG_TEXT] * len(ids)
        self.types += [TEXT_TYPE] * len(ids)

    def block(self, vision: Vision) -> None:
        """One fenced run of pads: an image, or one temporal slice of a video. The fences are tagged as vision too."""
        text = self.spec.text
        pads = vision.grid[1] * vision.grid[2] // self.spec.processor.merge**2
        pad = text.image_token if vision.kind == "image" else text.video_token
        self.ids += [text.vision_start_token] + [pad] * pads + [text.vision_end_token]
        self.tags += [TAG_VIDEO] * (pads + 2)
        self.types += [TEXT_TYPE] + [PAD_TYPES[vision.kind]] * pads + [TEXT_TYPE]

    def prompt(self, visions: Sequence[Vision]) -> Prompt:
        import torch

        ids, tags, types = (torch.tensor(values, dtype=torch.int64) for values in (self.ids, self.tags, self.types))
        return Prompt(ids, tags, types, tuple(visions))


def see(condition: Condition, frames: np.ndarray, processor: ProcessorSpec) -> Vision:
    """The frames of an image or video condition that the conditioner looks at, uint8 [n, H, W, 3] at 24 fps in."""
    kind: Literal["image", "video"] = "image" if condition.kind == "image" else "video"
    timestamps: tuple[float, ...] = ()
    if kind == "video":
        stride, total = FPS // SAMPLED_FPS, len(frames)
        frames = frames[::stride]
        if len(frames) < processor.temporal_patch:
            least = stride * (processor.temporal_patch - 1) + 1
            raise RequestError(
                f"references[{condition.source}]",
                f"the video has {total} frames at {FPS} fps; it needs at least {least} ({least / FPS:.2g} s), because "
                f"{processor.temporal_patch} frames taken at {SAMPLED_FPS} fps are read together. Use a longer clip.",
            )
        timestamps = pair_times(len(frames), processor.temporal_patch)
    height, width = fitted_size(kind, len(frames), frames.shape[1], frames.shape[2], processor)
    slices = -(-len(frames) // processor.temporal_patch)
    return Vision(kind, frames, (slices, height // processor.patch, width // processor.patch), timestamps)


def pair_times(num_frames: int, group: int = 2) -> tuple[float, ...]:
    """Seconds of each merged group of sampled frames: the mean of its first and last, the last frame repeated."""
    times = [index / SAMPLED_FPS for index in range(num_frames)]
    times += [times[-1]] * (-num_frames % group)
    return tuple((times[i] + times[i + group - 1]) / 2 for i in range(0, len(times), group))


def fitted_size(kind: str, num_frames: int, height: int, width: int, processor: ProcessorSpec) -> tuple[int, int]:
    """(height, width) in pixels that the conditioner's processor brings frames to (SPEC 3.3), multiples of 32.

    Rounding is Python's half to even. A video's budget counts its frames: rounded to whole pairs in the comparison,
    the true number in the scale.
    """
    factor = processor.patch * processor.merge
    frames, rounded = 1, 1
    least, most = processor.image_min_pixels, processor.image_max_pixels
    if kind == "video":
        frames = num_frames
        rounded = round(num_frames / processor.temporal_patch) * processor.temporal_patch
        least, most = processor.video_min_pixels, processor.video_max_pixels
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rounded * rows * columns > most:
        shrink = math.sqrt((frames * height * width) / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rounded * rows * columns < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def vision_patches(vision: Vision, processor: ProcessorSpec) -> Tensor:
    """Pixels of one image or video as rows of the vision tower: float32 [P, 3 x 2 x 16 x 16] on the CPU (SPEC 3.3).

    P = t x h x w of `vision.grid`; rows run over temporal slices, then 2x2 merge blocks, then the four of a block.
    """
    import torch

    patch, merge, group = processor.patch, processor.merge, processor.temporal_patch
    slices, rows, columns = vision.grid
    pixels = torch.tensor(vision.frames).permute(0, 3, 1, 2)
    size = (rows * patch, columns * patch)
    if pixels.shape[-2:] != size:
        # On uint8, as the released processor does: the kernel works in fixed point and rounds each pass to 8 bits, so
        # a float resize rounded afterwards is not the same.
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    missing = slices * group - len(pixels)  # an image fills a pair with itself, an odd video repeats its last frame
    pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    blocks = pixels.reshape(slices, group, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3, group * patch * patch)
    # Rescale and normalise in one: (x - 255 mean) / (255 std), a subtraction and a true division in float32.
    mean, std = (torch.tensor(values).mul(255.0)[:, None] for values in (processor.mean, processor.std))
    return blocks.to(torch.float32).sub_(mean).div_(std).flatten(1)
