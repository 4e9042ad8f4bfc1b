"""Pixels of scenes: anti-aliased shapes on plain or lightly graded grounds, vectorised over a batch, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .world import FPS, SHAPES, Scene, Thing, columns, positions

CHUNK = 1 << 26  # pixels drawn at a time: bounds the float32 working set at about 1 GiB
FLOOR_STEP = 30  # grey levels between background and floor


def render_video(
    scenes: Sequence[Scene],
    device: torch.device | str,
    frames: int | Sequence[int] | Tensor | None = None,
    window: tuple[int, int, int, int] | Tensor | None = None,
) -> Tensor:
    """Pixels of scenes of one canvas: uint8 [B, F, H, W, 3], sRGB, on `device`.

    `frames`: a count of leading frames, frame indices [F], or one row of indices a scene [B, F]; all frames if None.
    `window`: crop as (top, left, height, width), or int64 [B, 4] with one height and width for all.
    Raises ValueError for scenes of different canvases, or of different lengths when `frames` is None.
    """
    if len({(s.width, s.height) for s in scenes}) != 1:
        raise ValueError("render_video draws one canvas at a time")
    if frames is None and len({s.frames for s in scenes}) != 1:
        raise ValueError("scenes of different lengths need `frames`")
    count = scenes[0].frames if frames is None else frames
    indices = torch.arange(count) if isinstance(count, int) else torch.as_tensor(count)
    times_BF = (indices.to(torch.float64) / FPS).expand(len(scenes), -1)
    crop_B4 = (
        torch.as_tensor(window or (0, 0, scenes[0].height, scenes[0].width))
        if not isinstance(window, Tensor)
        else window
    )
    crop_B4 = crop_B4.cpu().expand(len(scenes), 4)
    height, width = (int(n) for n in crop_B4[0, 2:])
    out = torch.empty((*times_BF.shape, height, width, 3), dtype=torch.uint8, device=device)
    step = max(1, CHUNK // (times_BF.shape[1] * height * width))
    for i in range(0, len(scenes), step):
        part = slice(i, i + step)
        _draw(out[part], scenes[part], times_BF[part].to(device), crop_B4[part].to(device))
    return out


def _draw(out_BFHWC: Tensor, scenes: Sequence[Scene], times_BF: Tensor, crop_B4: Tensor) -> None:
    """Fill `out_BFHWC` with the scenes at `times_BF`."""
    _, _, height, width, _ = out_BFHWC.shape
    device = out_BFHWC.device
    y_BH = crop_B4[:, :1] + torch.arange(height, device=device) + 0.5
    x_BW = crop_B4[:, 1:2] + torch.arange(width, device=device) + 0.5
    layers = []
    for index in range(max(len(s.things) for s in scenes)):
        at = columns(scenes, index, device)
        cx_BF, cy_BF, seen_BF = positions(at, times_BF)
        # Differences in float64, then float32: every device rounds the same small number.
        dx_BFW = (x_BW[:, None, :] - cx_BF[:, :, None]).float()
        dy_BFH = (y_BH[:, None, :] - cy_BF[:, :, None]).float()
        shapes = [s.things[index].shape if index < len(s.things) else "ball" for s in scenes]
        cover = _cover(shapes, dx_BFW, dy_BFH, at["size"].float()).mul_(seen_BF[:, :, None, None])
        rgb = [s.things[index].rgb if index < len(s.things) else (0, 0, 0) for s in scenes]
        layers.append((cover, torch.tensor(rgb, dtype=torch.float32, device=device)))
    ground_BHW = _ground(scenes, y_BH, width)
    for channel in range(3):
        value = ground_BHW[:, None].expand(out_BFHWC.shape[:-1])
        for cover, rgb_B3 in layers:
            value = torch.lerp(value, rgb_B3[:, channel, None, None, None], cover)
        # Half a level and truncation: the same as rounding for values that are never negative.
        out_BFHWC[..., channel] = value + 0.5


def _ground(scenes: Sequence[Scene], y_BH: Tensor, width: int) -> Tensor:
    """Grey levels float32 [B, H, W] of background and floor."""
    rows = [[s.shade, s.grade, s.floor, s.height, FLOOR_STEP if s.shade < 128 else -FLOOR_STEP] for s in scenes]
    shade, grade, floor, height, step = torch.tensor(rows, dtype=torch.float64).to(y_BH.device).T[:, :, None]
    value = shade + grade * (y_BH / height - 0.5)
    value = torch.where(y_BH > floor, shade + step, value).clamp(0, 255)
    return value.float()[:, :, None].expand(-1, -1, width)


def _cover(shapes: Sequence[str], dx_BFW: Tensor, dy_BFH: Tensor, size_B1: Tensor) -> Tensor:
    """Anti-aliased coverage float32 [B, F, H, W]: signed distance to the outline, half a pixel soft on each side."""
    out = dx_BFW.new_empty((*dy_BFH.shape, dx_BFW.shape[-1]))
    for shape in SHAPES:
        chosen = [i for i, s in enumerate(shapes) if s == shape]
        if not chosen:
            continue
        every = len(chosen) == len(shapes)
        dx, dy = (dx_BFW, dy_BFH) if every else (dx_BFW[chosen], dy_BFH[chosen])
        size = (size_B1 if every else size_B1[chosen])[:, :, None]
        cover = _SHAPE[shape](dx, dy, size)
        if every:
            return cover
        out[chosen] = cover
    return out


def _ball(dx: Tensor, dy: Tensor, size: Tensor) -> Tensor:
    square = (dx * dx)[:, :, None, :] + (dy * dy)[:, :, :, None]
    return square.sqrt_().neg_().add_(size[..., None] + 0.5).clamp_(0, 1)


def _square(dx: Tensor, dy: Tensor, size: Tensor) -> Tensor:
    across = (size + 0.5 - dx.abs()).clamp(0, 1)
    down = (size + 0.5 - dy.abs()).clamp(0, 1)
    return across[:, :, None, :] * down[:, :, :, None]


def _triangle(dx: Tensor, dy: Tensor, size: Tensor) -> Tensor:
    """Apex up, filling its square box: base and height are both twice the size."""
    side = ((dy + size) / math.sqrt(5))[:, :, :, None] - (dx.abs() * (2 / math.sqrt(5)))[:, :, None, :]
    return side.add_(0.5).clamp_(0, 1).mul_((size + 0.5 - dy).clamp(0, 1)[:, :, :, None])


_SHAPE = {"ball": _ball, "square": _square, "triangle": _triangle}


def render_reference_images(
    things: Sequence[Thing], device: torch.device | str, edge: int = 128, shade: float = 112
) -> Tensor:
    """A still of each thing, large and centred on plain grey: uint8 [B, edge, edge, 3]."""
    middle, size = edge / 2, edge * 0.3
    stills = [
        Scene(
            0, (Thing(t.shape, t.color, size, "rest", "middle", middle, middle),), "grey", shade, 0, edge, edge, edge, 1
        )
        for t in things
    ]
    return render_video(stills, device)[:, 0]


def render_reference_image(thing: Thing, device: torch.device | str = "cpu", edge: int = 128) -> Tensor:
    """A still of the thing: uint8 [edge, edge, 3]."""
    return render_reference_images([thing], device, edge)[0]
