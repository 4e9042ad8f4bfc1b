"""Sequence parallelism in one process: the relayout's definition and kernel, spans, refusals. Ranks: `test_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from board_cases import check_threads
from relayout_cases import HEADS, ROWS, At, whole
from twinreel.models.layers import ColumnLinear
from twinreel.ops.attention import sdpa
from twinreel.parallel import Axis
from twinreel.parallel.ulysses import PLAIN, Relayout, Ulysses, piece_sizes, refusal, slot_sizes


def packed() -> Relayout:
    pytest.importorskip("triton")
    from twinreel.ops import relayout

    return Relayout("packed", relayout.pack, relayout.merge)


def test_packing_puts_each_head_where_it_belongs() -> None:
    all_rows = whole("reference", "cpu", torch.float32, 4)
    qkv, at = all_rows.part(0)
    send = PLAIN.pack(qkv, all_rows.norms, at, 4)
    parts = all_rows.norms(qkv, at)
    assert send.shape == (4, ROWS, 3, 4, 16) and send.is_contiguous()
    for rank in range(4):
        for i, part in enumerate(parts):
            assert torch.equal(send[rank, :, i], part[:, 4 * rank : 4 * rank + 4])


def test_merging_is_the_way_back_and_clears_the_tail() -> None:
    heads = torch.arange(5 * 12 * 2.0).view(5, 12, 2)
    chunks = [part.unflatten(1, (2, -1)).transpose(0, 1).contiguous() for part in heads.split((4, 8), dim=1)]
    for pieces in ([[chunk] for chunk in chunks], [chunk.split((1, chunk.shape[2] - 1), dim=2) for chunk in chunks]):
        merged = PLAIN.merge(pieces, 3)
        assert torch.equal(merged[:3], heads[:3]) and not merged[3:].any()


@pytest.mark.parametrize(("heads", "pieces"), [(1, [1]), (2, [1, 1]), (3, [1, 2]), (14, [7, 7])])
def test_every_piece_has_a_slot_of_its_size(heads: int, pieces: list[int]) -> None:
    assert piece_sizes(heads) == pieces
    sizes = slot_sizes(5, heads * 4, 16, 2, 2)  # two chunks of as many heads on each of two ranks
    assert sizes == [3 * 5 * 2 * 16 * heads] * 2 + [5 * 2 * 16 * piece for piece in pieces] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16), (8, torch.bfloat16)])
def test_the_kernels_are_the_definition_over_the_same_ops(ranks: int, dtype: torch.dtype) -> None:
    kernels, all_rows = packed(), whole("triton", "cpu", dtype, 4)
    qkv, at = all_rows.part(1)
    send = kernels.pack(qkv, all_rows.norms, at, ranks)
    assert torch.equal(send, PLAIN.pack(qkv, all_rows.norms, at, ranks))
    unturned = SimpleNamespace(rope=None, used=ROWS)
    assert torch.equal(
        kernels.pack(qkv, all_rows.norms, unturned, ranks), PLAIN.pack(qkv, all_rows.norms, unturned, ranks)
    )
    share = send.shape[3]
    pieces = [send[:, :, 0].split((share - share // 2, share // 2), dim=2), [send[:, :, 1, :1]]]
    pieces = [[piece.contiguous() for piece in chunk] for chunk in pieces]
    for valid in (0, 2, ROWS):
        assert torch.equal(kernels.merge(pieces, valid), PLAIN.merge(pieces, valid))
    kept = [torch.full_like(send[0], float("nan")) for _ in range(2)]  # the last rank's part, apart from the others
    pairs = zip((kernels, PLAIN), kept, strict=True)
    apart = [each.pack(qkv, all_rows.norms, at, ranks, (ranks - 1, place)) for each, place in pairs]
    assert torch.equal(kept[0], send[-1]) and torch.equal(kept[1], send[-1])
    assert all(torch.equal(others[:-1], send[:-1]) for others in apart)
    holed = [[torch.cat((x[:-1], torch.full_like(x[-1:], float("nan")))) for x in chunk] for chunk in pieces]
    for each in (kernels, PLAIN):
        assert torch.equal(each.merge(holed, 2, (ranks - 1, pieces)), PLAIN.merge(pieces, 2))
    narrow = qkv.unflatten(1, (HEADS, -1))[:, :8].flatten(1)  # half of the heads
    assert torch.equal(kernels.pack(narrow, all_rows.norms, at, ranks), PLAIN.pack(narrow, all_rows.norms, at, ranks))


def test_a_strided_part_of_qkv_is_packed_from_where_it_lies() -> None:
    kernels, all_rows = packed(), whole("triton", "cpu", torch.float32, 4)
    qkv, at = all_rows.part(2)
    wide = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]]
    assert not wide.is_contiguous()
    assert torch.equal(kernels.pack(wide, all_rows.norms, at, 2), kernels.pack(qkv, all_rows.norms, at, 2))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_spans_are_whole_groups_and_cover_all_heads(chunks: int) -> None:
    for size in (2, 4, 7, 8):
        attend = Ulysses(lambda q, k, v, used: q, Axis("sp", size=size), chunks=chunks)
        spans = attend._spans(56 * 24, 24)
        assert len(spans) == chunks and spans[0][0] == 0 and spans[-1][1] == 56 * 24
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert all((stop - start) % (24 * size) == 0 and stop > start for start, stop in spans)


def test_what_cannot_be_dealt_out_is_refused() -> None:
    assert refusal(56, 8, 7) is None
    assert refusal(56, 5, 1) == "56 heads cannot be dealt out evenly to 5 ranks of sequence parallelism"
    assert refusal(56, 8, 8) == "7 heads a rank cannot go in 8 chunks"
    with pytest.raises(ValueError, match="at least one chunk"):
        Ulysses(lambda q, k, v, used: q, Axis("sp"), chunks=0)


def test_it_is_for_inference_only() -> None:
    all_rows = whole("reference", "cpu", torch.float32, 4)
    linear = ColumnLinear(8, HEADS * 3 * 16, Axis("tp"), torch.float32)
    attend = Ulysses(lambda q, k, v, used: q, Axis("sp"))
    at = At(tuple(table[:5] for table in all_rows.rope), used=5)
    with pytest.raises(ValueError, match="for inference"):
        attend(torch.randn(5, 8), linear, all_rows.norms, at)
    with torch.inference_mode():
        assert attend(torch.randn(5, 8), linear, all_rows.norms, at).shape == (5, HEADS * 16)


def test_kernels_say_what_they_cannot_do() -> None:
    pytest.importorskip("triton")
    from twinreel.ops import relayout

    assert "at most 64 heads" in str(relayout.refusal(torch.device("cpu"), torch.float32, 128, 65))
    assert "not torch.float16" in str(relayout.refusal(torch.device("cpu"), torch.float16, 128, 28))


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_blocks_over_a_board_have_the_bits_of_one_rank(chunks: int) -> None:
    check_threads("cpu", sdpa, PLAIN, chunks, "reference")
