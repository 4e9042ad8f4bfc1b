"""Two pieces of work at once: this thread makes, another one works off what it makes."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = 0.2  # seconds between two looks at whether the other thread still takes


class _End:
    """The end of what is made: whether it has come, and the error that brought it."""

    def __init__(self) -> None:
        self.come = False
        self.error: BaseException | None = None


def beside(
    consume: Callable[[Iterator[T]], R],
    made: Iterable[T],
    *,
    ahead: int = 2,
    rest: AbstractContextManager[object] | None = None,
) -> R:
    """`consume(items)` in a thread of its own, while this one takes item after item from `made`, at most `ahead` too many.

    What `consume` raises is raised here, and no more is then made. What `made` raises is raised in `consume` too, which
    can clean up. Items that `consume` does not take are made all the same: other ranks may count on it. `rest` is a
    block around what is left to `consume` once the last item is made; what it raises at its beginning is raised there too.
    """
    line, end = queue.Queue[T | _End](ahead), _End()

    def items() -> Iterator[T]:
        while True:
            try:
                item = line.get(timeout=PATIENCE)
            except queue.Empty:
                if not end.come or not line.empty():  # what was made before the end is in line by then
                    continue
                item = end
            if isinstance(item, _End):
                break
            yield item
        if end.error is not None:
            raise end.error

    with ThreadPoolExecutor(1, "beside") as pool, ExitStack() as left:
        working = pool.submit(consume, items())

        def offer(item: T | _End) -> None:
            while not working.done():
                try:
                    return line.put(item, timeout=PATIENCE)
                except queue.Full:
                    pass

        finished = False
        try:
            for item in made:
                offer(item)
                if working.done() and working.exception() is not None:
                    break
            else:
                left.enter_context(rest or nullcontext())
            offer(end)  # only so that nobody waits for the flag
            finished = True
        finally:
            if not finished:
                end.error = sys.exc_info()[1]
            end.come = True
        return working.result()
