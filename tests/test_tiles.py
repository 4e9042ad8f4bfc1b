from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinreel.parallel import Axis
from twinreel.parallel.tiles import TileAxis, TileGrid, cross_fade, map_tiles, split_axis, split_canvas, stitch

TILE, OVERLAP, UNIT = 256, 64, 16
TABLE = {  # SPEC 8.2: length, starts, overlaps
    256: ([0], []),
    320: ([0, 64], [192]),
    512: ([0, 128, 256], [128, 128]),
    672: ([0, 128, 272, 416], [128, 112, 112]),
    768: ([0, 160, 336, 512], [96, 80, 80]),
    1024: ([0, 192, 384, 576, 768], [64] * 4),
    1344: ([0, 176, 352, 528, 704, 896, 1088], [80] * 4 + [64] * 2),
    1536: ([0, 176, 352, 528, 704, 896, 1088, 1280], [80] * 4 + [64] * 3),
    2016: (list(range(0, 1761, 176)), [80] * 10),
    2048: ([*range(0, 1409, 176), 1600, 1792], [80] * 8 + [64] * 2),
    3648: ([*range(0, 705, 176), *range(896, 3393, 192)], [80] * 4 + [64] * 14),
}


@pytest.mark.parametrize("length", TABLE)
def test_the_tables_of_the_released_model(length: int) -> None:
    starts, overlaps = TABLE[length]
    axis = split_axis(length, TILE, OVERLAP, UNIT)
    assert (list(axis.starts), list(axis.overlaps), axis.size) == (starts, overlaps, TILE)


@given(st.integers(1, 300), st.sampled_from([(256, 64), (128, 32), (256, 128), (64, 16)]))
def test_tiles_cover_the_axis_with_the_fewest_and_evenest(units: int, sizes: tuple[int, int]) -> None:
    tile, overlap = sizes
    axis = split_axis(units * UNIT, tile, overlap, UNIT)
    assert axis.length == units * UNIT
    assert axis.size == min(tile, units * UNIT)
    assert all(b - a == axis.size - o for a, b, o in zip(axis.starts, axis.starts[1:], axis.overlaps, strict=False))
    if axis.overlaps:
        assert overlap <= min(axis.overlaps) and max(axis.overlaps) - min(axis.overlaps) <= UNIT
        assert sorted(axis.overlaps, reverse=True) == list(axis.overlaps)
        one_less = len(axis.starts) - 1
        assert tile * one_less - overlap * (one_less - 1) < units * UNIT
    assert axis.divided(UNIT).length == units


def test_a_length_that_is_no_whole_latent_is_refused() -> None:
    with pytest.raises(AssertionError):
        split_axis(300, TILE, OVERLAP, UNIT)


def test_cross_fade_weights() -> None:
    before, after = torch.full((2, 5), 8.0), torch.zeros(2, 6)
    faded = cross_fade(before, after, 4, 1)
    assert faded.tolist() == [[8.0, 6.0, 4.0, 2.0, 0.0, 0.0]] * 2
    assert after.sum() == 0  # its input stays: the neighbours need it unblended
    assert torch.equal(cross_fade(before.T, after.T, 4, -2), faded.T)


def test_where_four_tiles_meet_the_neighbours_count_unblended() -> None:
    axis = TileAxis((0, 2), 4, (2,))
    values = (1.0, 2.0, 4.0, 8.0)
    canvas = stitch((torch.full((1, 4, 4), value) for value in values), TileGrid(axis, axis))
    assert canvas.shape == (1, 6, 6)
    assert canvas[0, 0].tolist() == [1, 1, 1, 1.5, 2, 2]
    assert canvas[0, :, 0].tolist() == [1, 1, 1, 2.5, 4, 4]
    # Row 3 of the last tile: half of the tile above (2), half its own (8), then half of the left tile as it came (4).
    assert canvas[0, 3, 3] == 0.5 * 4 + 0.5 * (0.5 * 2 + 0.5 * 8)


@pytest.mark.parametrize("tile_batch", [1, 2, 4, 100])
def test_cutting_and_stitching_gives_the_canvas_back(tile_batch: int) -> None:
    grid = split_canvas(336, 512, TILE, OVERLAP, UNIT)
    source = torch.randn(2, 3, 1, 336, 512, generator=torch.Generator().manual_seed(0))
    calls: list[int] = []

    def same(tile: torch.Tensor) -> torch.Tensor:
        calls.append(tile.shape[0] // 2)
        return tile.clone()

    canvas = stitch(map_tiles(same, lambda _: source, 1, grid, tile_batch, Axis("tiles")), grid)
    torch.testing.assert_close(canvas, source)
    assert sum(calls) == 6 and calls[0] == min(tile_batch, 6)
    assert all(call == tile_batch for call in calls[:-1])


def test_stitching_holds_two_rows_of_tiles() -> None:
    import weakref

    grid = split_canvas(1024, 320, TILE, OVERLAP, UNIT)
    alive: list[weakref.ref] = []
    most = 0

    def tiles():
        nonlocal most
        for _ in grid.boxes:
            tile = torch.zeros(1, TILE, TILE)
            alive.append(weakref.ref(tile))
            most = max(most, sum(ref() is not None for ref in alive))
            yield tile
            del tile

    stitch(tiles(), grid)
    assert len(alive) == 10 and most <= 5
