"""Rotary positions of the conditioner (SPEC 3.5): three axes a token, frequencies shared out between them.

Shapes: `L` prompt tokens, `d` head width, `V` vision runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor


def type_runs(types_L: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of one token type as (type, start, length); a vision run is always fenced by its start and end tokens."""
    start = 0
    for kind, members in groupby(types_L):
        length = sum(1 for _ in members)
        yield kind, start, length
        start += length


def positions(types_L: Sequence[int], grids_V: Sequence[tuple[int, int]]) -> Tensor:
    """Position ids int64 [3, L] (t, h, w) on the CPU.

    `types_L` is 0 for text and 1 or 2 for image and video pads; `grids_V` gives every vision run's merged (height,
    width) in the order of the runs. A text run counts on with all three axes alike; a vision run stands still in t,
    spreads over h and w, and moves the clock on by its longer edge.
    """
    clock, runs, next_grid = 0, [], iter(grids_V)
    for kind, _, length in type_runs(types_L):
        if kind == 0:
            runs.append(torch.arange(clock, clock + length).expand(3, -1))
            clock += length
            continue
        height, width = next(next_grid)
        assert height * width == length, "a run of pads is as long as its merged grid"
        rows = torch.arange(clock, clock + height).repeat_interleave(width)
        columns = torch.arange(clock, clock + width).repeat(height)
        runs.append(torch.stack([torch.full_like(rows, clock), rows, columns]))
        clock += max(height, width)
    assert next(next_grid, None) is None, "every grid has its run of pads"
    return torch.cat(runs, dim=1)


def rope_tables(
    position_ids_3L: Tensor, head_dim: int, theta: float, sections: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [L, d] in `dtype` for half rotation, from int64 positions [3, L].

    Frequency j turns with h when j % 3 == 1 and with w when j % 3 == 2, as far as that axis' section reaches (3 x its
    size); with t otherwise.
    """
    # Frequencies are made on the CPU on every machine: another device's pow may differ in the last bit, and they must
    # stay float32 whatever the weights' dtype is. They are a function and not a buffer so that a cast of the module
    # cannot reach them and a meta-built module lacks nothing.
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angles_3Lf = position_ids_3L[..., None].float() * inverse.to(position_ids_3L.device)

    def interleave(values_3Lf: Tensor) -> Tensor:
        mixed_Lf = values_3Lf[0].clone()
        for axis in (1, 2):
            members = slice(axis, 3 * sections[axis], 3)
            mixed_Lf[:, members] = values_3Lf[axis][:, members]
        return torch.cat((mixed_Lf, mixed_Lf), dim=-1).to(dtype)

    return interleave(angles_3Lf.cos()), interleave(angles_3Lf.sin())
