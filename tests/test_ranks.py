"""2, 4, 7 and 8 gloo ranks against one: rows, heads, both; tiles; the conditioner; whole requests; the relayout.

One pool of processes for each number of ranks, a thread each. Sequence parallelism is bit-equal in fp32; where sums are
over parts (tensor parallelism) the bound is 1e-6 relative L2, video and audio apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rank_dit
import rank_parts
from ranks import Place, Pool
from relayout_cases import check_contract
from tiny import write_tiny
from twinreel.parallel.mesh import Mesh
from twinreel.parallel.ulysses import PLAIN, Relayout

WORLDS = (2, 4, 7, 8)
# text, condition, audio and video rows: odd everywhere; a last rank of padding alone; ranks without audio rows
ROWS = {"odd": (37, 20, 74, 301), "short": (3, 0, 14, 40), "long": (129, 0, 62, 517)}
BOUND = 1e-6
# tiles: frames (two clips, or a picture), height, width
TILED = {1: (22, 64, 64), 2: (22, 64, 112), 3: (22, 64, 160), 28: (1, 208, 352)}


@pytest.fixture(scope="module", params=WORLDS)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """All tests of one number of ranks run before the next."""
    made = Pool(request.param, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The miniature with 56 heads."""
    return str(write_tiny(tmp_path_factory.mktemp("wide") / "model", "original", rank_parts.wide_spec()))


@pytest.mark.parametrize("rows", ROWS)
def test_rows_over_ranks_are_bit_equal(pool: Pool, rows: str) -> None:
    for chunks in (1, 2, 3, 4):
        for pushed in (False, True) if chunks in (2, 3) else (False,):
            for found in pool.run(rank_dit.distances, Mesh(sp=pool.world), ROWS[rows], chunks, False, pushed):
                assert found == [0.0, 0.0], (chunks, pushed, found)


def board_that_grows(place: Place) -> None:
    """What is on it after each growth is right, and it grows only where it must; a rank that cannot stops all."""
    parallel = rank_dit.joined(place, Mesh(sp=place.world), pushed=True)
    board = parallel.board
    assert board is not None
    values = torch.arange(place.world * 512, dtype=torch.int32).view(place.world, 512) + 10_000 * place.rank
    for slots, size in ((2, 64), (3, 512), (1, 8)):
        board.reserve([size * place.world * 4] * slots)
        before = board.size
        assert before >= slots * size * place.world * 4
        sent = [board.exchange(values[:, : size - slot].contiguous(), slot) for slot in range(slots)]
        for slot, pushed in enumerate(sent):
            arrived = pushed.wait()
            for rank in (each for each in range(place.world) if each != place.rank):  # our own part nobody carries
                first = 10_000 * rank + 512 * place.rank
                assert arrived[rank].tolist() == list(range(first, first + size - slot))
        board.reserve([64])
        assert board.size == before
        parallel.control.tell_all(None)  # everybody has read: a block makes sure of that by what it sends
    allocate, board._allocate = board._allocate, lambda size: 1 // place.rank and allocate(size)
    with pytest.raises(ZeroDivisionError):
        board.reserve([board.size * 2])
    board._allocate = allocate
    assert board.probe() is None


def test_a_board_grows_together(pool: Pool) -> None:
    pool.run(board_that_grows)


def test_packed_and_overlapped_rows_over_ranks_are_bit_equal(pool: Pool) -> None:
    if pool.world != 2:
        pytest.skip("the interpreter is slow; other numbers of ranks differ in sizes only, which test_ulysses covers")
    pytest.importorskip("triton")
    for chunks in (1, 2):
        for found in pool.run(rank_dit.distances, Mesh(sp=2), ROWS["short"], chunks, True, chunks == 2):
            assert found == [0.0, 0.0], (chunks, found)


def test_heads_over_ranks_are_close(pool: Pool) -> None:
    world = pool.world
    meshes = [Mesh(tp=world), *(Mesh(sp, world // sp) for sp in (2, 4) if world % sp == 0 and sp < world)]
    for mesh in meshes:
        for rows in ROWS.values():
            results = pool.run(rank_dit.distances, mesh, rows)
            for video, audio in results:
                assert 0 < video <= BOUND and 0 < audio <= BOUND, (mesh, video, audio)
            assert len({tuple(result) for result in results}) == 1, "ranks disagree"


def test_tiles_over_ranks_are_bit_equal(pool: Pool) -> None:
    sizes = list(TILED.values()) if pool.world in (2, 7) else [TILED[1], TILED[3]]
    results = pool.run(rank_parts.tiles, sizes, 4 if pool.world == 7 else 1)
    alone = results[0][1]
    assert len(alone) == len(set(alone)) == 3 * len(sizes)
    assert all(made == alone for made, _ in results)


def test_who_has_no_tile_waits_longer_than_a_collective_may_take(pool: Pool) -> None:
    if pool.world > 2:
        pytest.skip("alike for any number of ranks")
    assert pool.run(rank_parts.slow_first, 1.0) == [[5.0] * 3] * pool.world


def test_the_conditioner_over_ranks(pool: Pool, wide: str) -> None:
    if pool.world in (4, 7):
        pytest.skip("2 and 8 ranks stand for the others")
    for text in {2, pool.world}:
        results = pool.run(rank_parts.conditioner, wide, text)
        assert all(torch.equal(out, results[0][1]) for _, out in results), "ranks disagree"
        assert all(0 < distance < BOUND for distance, _ in results)


def test_the_conditioner_stored_over_ranks_has_the_bits_of_one(pool: Pool, wide: str) -> None:
    if pool.world > 4:
        pytest.skip("2 and 4 ranks stand for the others")
    for same, kept, whole in pool.run(rank_parts.stored_conditioner, wide):
        assert same and kept < whole / pool.world * 1.5


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_whole_requests_over_ranks(pool: Pool, wide: str, task: str) -> None:
    if pool.world > 4 or (pool.world == 4 and task != "ref2va"):
        pytest.skip("2 ranks run all tasks, 4 the longest")
    for options in ({}, {"adaln": "precompute"}, {"attend": "overlapped", "conditioner": "fsdp"}):
        for same, _, _ in pool.run(rank_parts.request, wide, task, {"conditioner": "whole", **options}):
            assert all(same.values()), (options, same)
    for options in ({"tp": pool.world}, {"tp": 2, "adaln": "precompute"}):
        for _, video, audio in pool.run(rank_parts.request, wide, task, options):
            assert video <= 2 and audio < 1e-5, (video, audio)


def relayout(place: Place, name: str) -> None:
    """The contract on one rank, over the axis' own exchange and over a board."""
    table, made = "reference", PLAIN
    if name == "packed":
        from twinreel.ops import relayout as kernels

        table, made = "triton", Relayout("packed", kernels.pack, kernels.merge)
    parallel = rank_dit.joined(place, Mesh(sp=4), pushed=True)
    for dtype in (torch.float32, torch.bfloat16) if name == "plain" else (torch.bfloat16,):
        check_contract(parallel.sp, made, table, "cpu", dtype)
        check_contract(parallel.sp, made, table, "cpu", dtype, parallel.board)


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_the_contract_of_a_relayout_over_four_ranks(pool: Pool, name: str) -> None:
    if pool.world != 4:
        pytest.skip("the contract is for four ranks")
    if name == "packed":
        pytest.importorskip("triton")
    print("relayout contract: gloo, CPU tensors" + (", Triton's interpreter" if name == "packed" else ""))
    pool.run(relayout, name)
