"""Tile geometry and stitching: a canvas cut into equal, overlapping tiles, dealt out over ranks and blended back
(SPEC 8.2).

Shapes: tiles and canvases are `[B, C, F, H, W]` or anything whose last two dims are rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.parallel.axis import Axis, Exchange

MOST_DIMS = 8


@dataclass(frozen=True)
class TileAxis:
    """Tiles along one axis: where each starts, how long every one is, and by how much neighbours overlap."""

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    @property
    def length(self) -> int:
        """What the tiles cover together."""
        return self.starts[-1] + self.size

    def divided(self, unit: int) -> TileAxis:
        """The same tiles measured in units of `unit` (pixels to latents)."""
        assert not any(value % unit for value in (*self.starts, self.size, *self.overlaps)), (self, unit)
        return TileAxis(
            tuple(start // unit for start in self.starts),
            self.size // unit,
            tuple(overlap // unit for overlap in self.overlaps),
        )


@dataclass(frozen=True)
class TileGrid:
    """Tiles over a canvas, in row-major order."""

    rows: TileAxis
    columns: TileAxis

    @property
    def boxes(self) -> tuple[tuple[slice, slice], ...]:
        """Row and column slice of each tile."""
        rows, columns = self.rows, self.columns
        return tuple((slice(y, y + rows.size), slice(x, x + columns.size)) for y in rows.starts for x in columns.starts)

    def divided(self, unit: int) -> TileGrid:
        """The same grid measured in units of `unit`."""
        return TileGrid(self.rows.divided(unit), self.columns.divided(unit))


def split_axis(length: int, tile: int, min_overlap: int, unit: int) -> TileAxis:
    """Cover `length` with the fewest tiles whose overlaps reach `min_overlap`; all in pixels, `unit` pixels a latent.

    What the tiles cover too much widens the overlaps, one unit at a time, from the first overlap round and round.
    """
    assert length > 0 and length % unit == 0 and tile % unit == 0, (length, tile, unit)
    if length <= tile:
        return TileAxis((0,), length, ())
    # ceil((length - overlap) / (tile - overlap)): each tile after the first adds tile - overlap.
    count = -(-(length - min_overlap) // (tile - min_overlap))
    units, gaps = (tile * count - min_overlap * (count - 1) - length) // unit, count - 1
    overlaps = tuple(min_overlap + unit * (units // gaps + (gap < units % gaps)) for gap in range(gaps))
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + tile - overlap)
    return TileAxis(tuple(starts), tile, overlaps)


def split_canvas(height: int, width: int, tile: int, min_overlap: int, unit: int) -> TileGrid:
    """The tile grid of a `height` x `width` pixel canvas; both edges are multiples of `unit`."""
    return TileGrid(split_axis(height, tile, min_overlap, unit), split_axis(width, tile, min_overlap, unit))


def cross_fade(before: Tensor, after: Tensor, extent: int, dim: int) -> Tensor:
    """`after`, whose first `extent` entries along `dim` fade in from the last `extent` of `before`; a new tensor."""
    ramp = torch.arange(extent, device=after.device, dtype=after.dtype) / extent
    ramp = ramp.view(-1, *[1] * (after.ndim - 1 - dim % after.ndim))
    faded = after.clone(memory_format=torch.contiguous_format)
    head = faded.narrow(dim, 0, extent)
    # Two products and one sum, each rounded: torch.lerp is one multiply less and other bits.
    head.mul_(ramp).add_(before.narrow(dim, before.shape[dim] - extent, extent) * (1 - ramp))
    return faded


def stitch(tiles: Iterable[Tensor], grid: TileGrid) -> Tensor:
    """Blend tiles that arrive in row-major order into one canvas `[..., grid.rows.length, grid.columns.length]`.

    Each tile fades in from the tile above and then from the tile to the left, both as they came, not as blended
    (where four tiles meet, the result depends on it). Two rows of tiles are held at a time.
    """
    rows, columns = grid.rows, grid.columns
    arriving = iter(tiles)
    if len(rows.starts) == len(columns.starts) == 1:
        return next(arriving)
    canvas: Tensor | None = None
    above: list[Tensor] = []
    for i, y in enumerate(rows.starts):
        row: list[Tensor] = []
        for j, x in enumerate(columns.starts):
            tile = next(arriving)
            row.append(tile)
            if i:
                tile = cross_fade(above[j], tile, rows.overlaps[i - 1], -2)
            if j:
                tile = cross_fade(row[j - 1], tile, columns.overlaps[j - 1], -1)
            if canvas is None:
                canvas = tile.new_empty(*tile.shape[:-2], rows.length, columns.length)
            # The overlap with the next tile is written too; that tile overwrites it.
            canvas[..., y : y + rows.size, x : x + columns.size] = tile
        above = row
    assert canvas is not None
    return canvas


def map_tiles(
    function: Callable[[Tensor], Tensor],
    source: Callable[[int], Tensor],
    count: int,
    grid: TileGrid,
    tile_batch: int,
    axis: Axis,
) -> Iterator[Tensor]:
    """`function` of each tile of the sources 0 to `count - 1` (equal shapes), in row-major order, source by source.

    `tile_batch` tiles of one source are a call, stacked along dim 0. A batched call may round unlike a single one, so
    `tile_batch` is a constant of the plan and never follows free memory. Calls are dealt out over `axis`, and every
    rank gets all results: the same calls, whoever makes them.
    """
    batches = [grid.boxes[i : i + tile_batch] for i in range(0, len(grid.boxes), tile_batch)]
    held: tuple[int, Tensor] = 0, source(0)
    size, device = held[1].shape[0], held[1].device

    def make(job: int) -> Tensor:
        nonlocal held
        number, batch = divmod(job, len(batches))
        if held[0] != number:
            held = number, source(number)
        cut = [held[1][..., y, x] for y, x in batches[batch]]
        return function(cut[0] if len(cut) == 1 else torch.cat(cut))

    sizes = [size * len(batch) for batch in batches] * count
    for made in deal(make, sizes, axis, device):
        yield from made.split(size)


def deal(make: Callable[[int], Tensor], sizes: Sequence[int], axis: Axis, device: torch.device) -> Iterator[Tensor]:
    """`make(job)` for every job in order, each made by one rank of `axis` and given to all.

    Job j is rank j mod ranks'. Results are alike but for dim 0, which is `sizes[job]` long; over several ranks they are
    float32 on `device`, and travel while each rank makes its next one: it is at most two jobs ahead of what is asked for.
    """
    if axis.size == 1:
        yield from map(make, range(len(sizes)))
        return
    shape: list[int] = []
    arriving: Exchange | None = None
    for first in range(0, len(sizes) + axis.size, axis.size):
        before, arriving = arriving, None
        if first < len(sizes):
            job = first + axis.rank
            made = make(job) if job < len(sizes) else None
            assert made is None or made.dtype == torch.float32, made
            shape = list(made.shape[1:]) if made is not None else shape
            if not first:
                axis.meet()
                if len(sizes) < axis.size:  # some ranks have nothing to tell its shape by
                    shape = _told(shape, axis, device)
            padded = torch.zeros(max(sizes), *shape, device=device)
            if made is not None:
                padded[: len(made)] = made
            arriving = axis.gather(padded)
            del made, padded
        if before is not None:
            sent = sizes[first - axis.size : first]
            yield from (part[:size] for part, size in zip(before.wait(), sent, strict=False))


def _told(shape: Sequence[int], axis: Axis, device: torch.device) -> list[int]:
    ballot = torch.zeros(MOST_DIMS, dtype=torch.int64, device=device)
    ballot[: len(shape)] = torch.tensor(shape, dtype=torch.int64)
    return [size for size in axis.vote(ballot).tolist() if size]
