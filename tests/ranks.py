"""Pools of gloo ranks for tests: `Pool(4).run(function, *arguments)` calls it on every rank with an `Axis` of all."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 150  # seconds for one call on all ranks


def serve(rank: int, world: int, meeting: str, orders: Connection) -> None:
    """A rank: start, then run what is sent until None comes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE)
    )
    kept: dict[Any, Any] = {}
    while (order := orders.recv()) is not None:
        function, arguments = order
        try:
            orders.send((True, function(Place(rank, world, kept), *arguments)))
        except Exception:
            orders.send((False, traceback.format_exc()))
    os._exit(0)  # not every rank leaves at the same time, and there is nothing to save


@dataclass(frozen=True)
class Place:
    """Where a function runs: its rank, the number of ranks, and what it keeps for the next call."""

    rank: int
    world: int
    kept: dict[Any, Any]


class Pool:
    """`world` processes with one thread each."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world = world
        spawn = mp.get_context("spawn")
        self.lines, self.processes = [], []
        for rank in range(world):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(rank, world, str(folder / "meeting"), theirs), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Each rank's result, in rank order; AssertionError with the traceback of a rank that failed."""
        for line in self.lines:
            line.send((function, arguments))
        answers = []
        for rank, line in enumerate(self.lines):
            assert line.poll(PATIENCE + 30), f"rank {rank} of {self.world} did not answer"
            answers.append(line.recv())
        for rank, (fine, value) in enumerate(answers):
            assert fine, f"rank {rank} of {self.world}:\n{value}"
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for line in self.lines:
            try:
                line.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.join(10)
            process.kill()
