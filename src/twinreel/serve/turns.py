"""Work that may take a minute, in threads of its own: what is quick never waits for one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 30.0  # seconds for a turn; who waits longer may have hung up already
AGAIN = 10  # seconds after which one who was sent away may come again


class Busy(Exception):
    """No turn is free; `wait` seconds until trying again makes sense."""

    wait = AGAIN


class Turns:
    """At most `most` calls at once and `line` that wait, which hold no thread; used from one event loop."""

    def __init__(self, what: str, most: int, line: int) -> None:
        self._what, self._line, self._waiting = what, line, 0
        self._threads = ThreadPoolExecutor(most, thread_name_prefix=what)
        self._free = asyncio.Semaphore(most)

    async def run(self, do: Callable[..., T], *values: Any) -> T:
        """`do(*values)` in a thread. Raises Busy, and what `do` raises."""
        if self._waiting >= self._line:
            raise Busy(f"too many {self._what} at once; try again later")
        self._waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), LONGEST_WAIT)
        except TimeoutError:
            raise Busy(f"{self._what} take long now; try again later") from None
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()

        def free(done: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._free.release)

        future = self._threads.submit(do, *values)
        future.add_done_callback(free)
        return await asyncio.wrap_future(future)
