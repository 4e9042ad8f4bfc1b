"""Processes that divide a list of work. All end with the first that fails or is lost, and with whoever started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from ..parallel.team import portable
from ..ranks import LEAVING, RankLost, ending
from ..stopping import held_back, let_through
from ..watch import Watch, ignore

P = TypeVar("P")
R = TypeVar("R")
Work = Callable[[P, Watch], R]


class Elsewhere(Exception):
    """The traceback of an error in the worker where it arose, as text."""


def divide(work: Work[P, R], parts: Sequence[P], watch: Watch = ignore) -> list[R]:
    """`work(part, watch)` for every part, each in a process of its own; what they tell of reaches `watch` in this one.

    Work, parts and results travel by pickle. Raises the first error as it was raised there, and RankLost for a process
    that ended before its work did; no process is left then, nor after a signal. They keep nothing that needs putting
    away: files belong into a folder of the caller's.
    """
    spawn, processes = multiprocessing.get_context("spawn"), list[SpawnProcess]()
    lines, done = dict[Connection, int](), dict[int, R]()
    try:
        for number, part in enumerate(parts):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=_carry_out, args=(theirs, work, part), daemon=True))
            start(processes[-1])
            theirs.close()
            lines[ours] = number
        while lines:
            for line in wait(list(lines)):
                assert isinstance(line, Connection)
                kind, *values = _hear(line, processes[lines[line]], lines[line])
                if kind == "event":
                    watch(values[0])
                elif kind == "failed":
                    raise values[0] from Elsewhere(values[1])
                else:
                    done[lines.pop(line)] = values[0]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [done[number] for number in range(len(parts))]


def start(process: SpawnProcess) -> None:
    """Start it, which calls `follow`, with signals held back: Ctrl-C reaches every process of a terminal, and this one
    alone acts on it."""
    resource_tracker.ensure_running()  # started below, it would let the signals through
    with held_back():
        process.start()


def _hear(line: Connection, process: SpawnProcess, number: int) -> tuple[Any, ...]:
    try:
        heard: tuple[Any, ...] = line.recv()
        return heard
    except (EOFError, OSError):
        process.join(LEAVING)
        how = "closed its line" if process.exitcode is None else f"ended with {ending(process.exitcode)}"
        raise RankLost(f"worker {number + 1} {how} before its work was done") from None


def follow() -> None:
    """In a process that was started by `start`: leave Ctrl-C to its parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    let_through()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _carry_out(line: Connection, work: Work[P, R], part: P) -> None:
    """The process of one worker."""
    follow()
    try:
        result = work(part, lambda event: line.send(("event", event)))
    except Exception as error:  # the edge of the process: whoever started it raises the error
        line.send(("failed", portable(error), traceback.format_exc()))
    else:
        line.send(("done", result))


def _end_with_parent() -> None:
    """However the parent ends, SIGKILL as well."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
