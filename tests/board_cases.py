"""Two ranks of a board as threads of one process on one device: what streams and slots must hold, without two GPUs."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from relayout_cases import ANGLES, DIM, whole
from twinreel.models.layers import ColumnLinear
from twinreel.parallel import Axis
from twinreel.parallel.attend import Stretch
from twinreel.parallel.board import Board
from twinreel.parallel.ulysses import Relayout, Ulysses, head_bounds, slot_sizes

RANKS, ROWS, HEADS, HIDDEN, BLOCKS = 2, 192, 16, 64, 6
PATIENCE = 60.0  # seconds


class Threads:
    """`Memory` of ranks that are threads: a signal is an event of its stream, handed over once it is recorded."""

    def __init__(self, rank: int, views: Sequence[Tensor], lines: defaultdict[Any, queue.Queue[Any]]) -> None:
        self.rank, self.views, self._lines, self._cuda = rank, views, lines, views[0].is_cuda

    def meet(self) -> None:
        """They have met."""

    def signal(self, rank: int, channel: int) -> None:
        """After what the current stream has been given."""
        event = torch.cuda.Event() if self._cuda else None
        if event is not None:
            event.record()
        self._lines[self.rank, rank, channel].put(event)

    def wait(self, rank: int, channel: int) -> None:
        """The current stream waits; the thread until the other one has come so far."""
        event = self._lines[rank, self.rank, channel].get(timeout=PATIENCE)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def slowly(attention: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """`attention`, now and then after a pause of the device, so that the ranks' streams drift apart."""
    generator = torch.Generator().manual_seed(3)

    def paused(q: Tensor, k: Tensor, v: Tensor, used: int) -> Tensor:
        if device.type == "cuda" and torch.rand((), generator=generator) < 0.4:
            torch.cuda._sleep(int(3e6 * torch.rand((), generator=generator)))
        return attention(q, k, v, used)

    return paused


@torch.inference_mode()
def check_threads(device: str, attention: Callable[..., Tensor], relayout: Relayout, chunks: int, table: str) -> None:
    """Several blocks one after the other, each fed with what the one before made: the bits of one rank."""
    place = torch.device(device)
    all_rows = whole(table, device, torch.float32, 1)
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(place)

    linear = ColumnLinear(HIDDEN, HEADS * 3 * DIM, Axis("tp"), torch.float32).requires_grad_(False).to(place)
    linear.weight.copy_(0.2 * draw(HEADS * 3 * DIM, HIDDEN))
    x, back = draw(RANKS * ROWS, HIDDEN), 0.1 * draw(HEADS * DIM, HIDDEN)
    rope, used = (draw(RANKS * ROWS, ANGLES), draw(RANKS * ROWS, ANGLES)), RANKS * ROWS - 5

    def blocks(attend: Callable[[Tensor, Stretch], Tensor], x: Tensor, at: Stretch) -> Tensor:
        for _ in range(BLOCKS):
            x = x + torch.cat([part @ back for part in attend(x, at).split(ROWS)])
        return x

    def alone(x: Tensor, at: Stretch) -> Tensor:
        """All rows, in products of the sizes that ranks have: others may round otherwise."""
        bounds = [RANKS * 3 * DIM * bound for bound in head_bounds(HEADS, RANKS, chunks)]
        spans = list(zip(bounds, bounds[1:], strict=False))
        qkv = [torch.cat([linear.columns(part, *span) for span in spans], dim=1) for part in x.split(ROWS)]
        return attention(*all_rows.norms(torch.cat(qkv), at), at.used).flatten(1)

    wanted = blocks(alone, x, Stretch(used, rope))
    sizes = slot_sizes(ROWS, HEADS, 4 * DIM, RANKS, chunks)
    views = [torch.empty(sum(sizes) + 256 * len(sizes), dtype=torch.uint8, device=place) for _ in range(RANKS)]
    lines: defaultdict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)

    @torch.inference_mode()
    def rank(number: int) -> Tensor:
        sp = Axis("sp", RANKS, number)
        memory = Threads(number, views, lines)
        board = Board(sp, Axis("control"), place, lambda size: memory)
        board.reserve(sizes)
        mine = slice(number * ROWS, (number + 1) * ROWS)
        attend = Ulysses(slowly(attention, place), sp, relayout, chunks, board)
        with torch.cuda.stream(torch.cuda.Stream()) if place.type == "cuda" else nullcontext():
            at = Stretch.of(Stretch(used, rope), mine)
            made = blocks(lambda x, at: attend(x, linear, all_rows.norms, at), x[mine], at)
            if place.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return made

    if place.type == "cuda":
        torch.cuda.synchronize()
    with ThreadPoolExecutor(RANKS) as pool:
        made = torch.cat(list(pool.map(rank, range(RANKS))))
    assert torch.equal(made[:used], wanted[:used])
