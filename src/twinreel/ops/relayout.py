# mypy: allow-untyped-defs
"""Heads in the order of an exchange between ranks, in one kernel a way.

There: RMS norm and rotation of q and k, and q, k, v packed by destination, so that what arrives is what attention reads.
Back: the heads of all ranks in their place, rows of padding cleared. Either way the part of this very rank, which nobody
sends, may be written or read where it stays.

Legend: R ranks, S rows, H heads, h heads of one destination (H / R), d head dim.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from twinreel.ops.kernels import refusal as kernels_refusal
from twinreel.ops.qk_norm_rope import HEADS, _norm_rope, warps_for
from twinreel.ops.rounding import EXACT

MAX_HEADS = 64  # of a destination: one program merges a row of them
NOBODY = -1
Kept = tuple[int, Tensor]  # a rank, and its part
Pieces = Sequence[Sequence[Tensor]]  # of each chunk, in head order


class Norms(Protocol):
    """The norms of q and k (each with weight [d] and eps) and d."""

    @property
    def head_dim(self) -> int: ...
    @property
    def q_norm(self): ...
    @property
    def k_norm(self): ...


class Turned(Protocol):
    """Rows with cos and sin, each [S, angles], or None."""

    @property
    def rope(self) -> tuple[Tensor, Tensor] | None: ...


@triton.jit
def _pack_kernel(
    qkv_SH3d, packed_RS3hd, kept_S3hd, own, q_weight_d, k_weight_d, cos_SR, sin_SR,
    row_stride, head_stride, part_stride, cos_stride, sin_stride, q_eps, k_eps, rows, num_heads,
    DIM: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_heads, HEADS)  # of heads: those of one row are made one after the other
    row, rank = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads, dims = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS), tl.arange(0, DIMS)
    there, width = heads < num_heads, num_heads * DIM
    source = qkv_SH3d + row * row_stride + rank * num_heads * head_stride
    target = packed_RS3hd + (rank * rows + row) * 3 * width
    if rank == own:
        target = kept_S3hd + row * 3 * width
    cos_R, sin_R = cos_SR + row * cos_stride, sin_SR + row * sin_stride
    mask = there[:, None] & (dims < DIM)[None, :]
    v = tl.load(
        source + 2 * part_stride + heads[:, None] * head_stride + dims[None, :], mask=mask
    )  # on its way meanwhile
    _norm_rope(source, target, q_weight_d, cos_R, sin_R, heads, there, head_stride, q_eps, DIM, R, HALF, REST)
    _norm_rope(
        source + part_stride, target + width, k_weight_d, cos_R, sin_R, heads, there, head_stride, k_eps,
        DIM, R, HALF, REST,
    )  # fmt: skip
    tl.store(target + 2 * width + heads[:, None] * DIM + dims[None, :], v, mask=mask)


@triton.jit
def _merge_kernel(
    piece_RShd, made_RShd, own, out_SHd, rows, valid, width, out_stride, rank_stride, first, WIDTH: tl.constexpr
):  # fmt: skip
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    values = tl.arange(0, WIDTH)
    inside = values < width
    there = (rank * rows + row) * width
    source = piece_RShd + there
    if rank == own:
        source = made_RShd + there
    # padding rows are not read: nobody has written them with anything that counts
    x = tl.load(source + values, mask=inside & (row < valid), other=0.0)
    tl.store(out_SHd + row * out_stride + first + rank * rank_stride + values, x, mask=inside)


@library.custom_op("twinreel::pack_heads", mutates_args=("kept_S3hd",))
def _pack(
    qkv_SH3d: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    cos_SR: Tensor | None,
    sin_SR: Tensor | None,
    kept_S3hd: Tensor | None,
    *,
    own: int,
    q_eps: float,
    k_eps: float,
    ranks: int,
) -> Tensor:
    rows, all_heads, _, dim = qkv_SH3d.shape
    num_heads = all_heads // ranks
    packed_RS3hd = torch.empty(ranks, rows, 3, num_heads, dim, dtype=qkv_SH3d.dtype, device=qkv_SH3d.device)
    angles, cos, sin = 0, q_weight_d, q_weight_d
    if cos_SR is not None and sin_SR is not None:
        assert cos_SR.stride(1) == sin_SR.stride(1) == 1 and 2 * cos_SR.shape[1] <= dim
        angles, cos, sin = cos_SR.shape[1], cos_SR, sin_SR
    kept = packed_RS3hd if kept_S3hd is None else kept_S3hd
    assert kept_S3hd is None or (kept.is_contiguous() and kept.shape == packed_RS3hd.shape[1:]), kept.shape
    if rows:
        with torch.cuda.device_of(qkv_SH3d):
            _pack_kernel[(rows * triton.cdiv(num_heads, HEADS), ranks)](
                qkv_SH3d, packed_RS3hd, kept, own, q_weight_d, k_weight_d, cos, sin,
                qkv_SH3d.stride(0), qkv_SH3d.stride(1), qkv_SH3d.stride(2),
                cos.stride(0) if angles else 0, sin.stride(0) if angles else 0, q_eps, k_eps, rows, num_heads,
                DIM=dim, R=angles, HALF=triton.next_power_of_2(max(angles, 1)),
                REST=triton.next_power_of_2(max(dim - 2 * angles, 1)), HEADS=HEADS, DIMS=triton.next_power_of_2(dim),
                num_warps=warps_for(HEADS * dim), **EXACT,
            )  # fmt: skip
    return packed_RS3hd


@_pack.register_fake
def _(
    qkv_SH3d: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    cos_SR: Tensor | None,
    sin_SR: Tensor | None,
    kept_S3hd: Tensor | None,
    *,
    own: int,
    q_eps: float,
    k_eps: float,
    ranks: int,
) -> Tensor:
    rows, heads, _, dim = qkv_SH3d.shape
    return qkv_SH3d.new_empty(ranks, rows, 3, heads // ranks, dim)


@library.custom_op("twinreel::merge_heads", mutates_args=())
def _merge(pieces: Sequence[Tensor], counts: Sequence[int], made: Sequence[Tensor], own: int, valid: int) -> Tensor:
    ranks, rows, _, dim = pieces[0].shape
    out_SHd = pieces[0].new_empty(rows, ranks * sum(piece.shape[2] for piece in pieces), dim)
    first = number = 0
    for count in counts:
        chunk = pieces[number : number + count]
        rank_stride = sum(piece.shape[2] for piece in chunk) * dim
        start = first
        for piece, whole in zip(chunk, (made or pieces)[number : number + count], strict=True):
            assert piece.is_contiguous() and whole.is_contiguous(), (piece.stride(), whole.stride())
            width = piece.shape[2] * dim
            with torch.cuda.device_of(piece):
                _merge_kernel[(rows, ranks)](
                    piece, whole, own, out_SHd, rows, valid, width, out_SHd.stride(0), rank_stride, start,
                    WIDTH=triton.next_power_of_2(width), num_warps=warps_for(width),
                )  # fmt: skip
            start += width
        first, number = first + ranks * rank_stride, number + count
    return out_SHd


@_merge.register_fake
def _(pieces: Sequence[Tensor], counts: Sequence[int], made: Sequence[Tensor], own: int, valid: int) -> Tensor:
    ranks, rows, _, dim = pieces[0].shape
    return pieces[0].new_empty(rows, ranks * sum(piece.shape[2] for piece in pieces), dim)


def pack(qkv: Tensor, norms: Norms, at: Turned, ranks: int, kept: Kept | None = None) -> Tensor:
    """qkv [S, H*3*d] -> [R, S, 3, h, d]: q and k normalised and rotated, v as it is (SPEC 2.4), by destination.

    `kept`: a rank, and where its part goes instead, [S, 3, h, d]; what is returned has nothing there.
    """
    qkv_SH3d = qkv.unflatten(-1, (-1, 3, norms.head_dim))
    cos, sin = (None, None) if at.rope is None else at.rope
    own, part = kept or (NOBODY, None)
    return _pack(
        qkv_SH3d, norms.q_norm.weight, norms.k_norm.weight, cos, sin, part, own=own, q_eps=norms.q_norm.eps,
        k_eps=norms.k_norm.eps, ranks=ranks,
    )  # fmt: skip


def merge(chunks: Pieces, valid: int, kept: tuple[int, Pieces] | None = None) -> Tensor:
    """Each chunk's pieces [R, S, h, d], both in head order -> [S, H, d]; rows from `valid` on are zero.

    `kept`: a rank, and pieces of the same shapes of which its part is read instead.
    """
    own, made = kept or (NOBODY, ())
    counts = [len(pieces) for pieces in chunks]
    return _merge([*chain(*chunks)], counts, [*chain(*made)], own, valid)


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> str | None:
    """Why the kernels cannot run there with `heads` heads for each destination, or None."""
    if heads > MAX_HEADS:
        return f"the kernels pack at most {MAX_HEADS} heads a destination, not {heads}"
    return kernels_refusal(device, dtype, head_dim)
