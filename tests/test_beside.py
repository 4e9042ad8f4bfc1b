"""One thread makes, another works it off: order, errors of either side, and what is not taken."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from twinreel.beside import beside


def counted(most: int, made: list[int]) -> Iterator[int]:
    for number in range(most):
        made.append(number)
        yield number


def test_items_come_in_order_and_from_another_thread() -> None:
    seen: list[threading.Thread] = []

    def consume(items: Iterator[int]) -> list[int]:
        seen.append(threading.current_thread())
        return list(items)

    assert beside(consume, range(20)) == list(range(20))
    assert seen[0] is not threading.current_thread() and not seen[0].is_alive()
    assert beside(consume, []) == []


def test_making_goes_on_while_an_item_is_worked_off_and_no_further() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def source() -> Iterator[int]:
        for number in counted(9, made):
            if number == 3:
                ahead.set()
            yield number

    def consume(items: Iterator[int]) -> int:
        next(items)
        assert ahead.wait(20), "nothing is made meanwhile"
        assert len(made) <= 4
        return sum(items)

    assert beside(consume, source()) == sum(range(1, 9))


def test_the_rest_is_what_the_consumer_does_once_all_is_made() -> None:
    told: list[str] = []
    begun = threading.Event()

    @contextmanager
    def rest() -> Iterator[None]:
        told.append("begins")
        begun.set()
        yield
        told.append("ends")

    def source() -> Iterator[int]:
        yield from range(3)
        told.append("made")

    def consume(items: Iterator[int]) -> int:
        first = next(items)
        assert begun.wait(20), "it began no later than the last item could be taken"
        found = first + sum(items)
        told.append("worked off")
        return found

    assert beside(consume, source(), rest=rest()) == 3
    assert told == ["made", "begins", "worked off", "ends"]


def test_an_error_at_the_beginning_of_the_rest_reaches_the_consumer() -> None:
    @contextmanager
    def rest() -> Iterator[None]:
        raise KeyboardInterrupt("mine")
        yield

    seen: list[BaseException] = []

    def consume(items: Iterator[int]) -> None:
        try:
            list(items)
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(KeyboardInterrupt, match="mine"):
        beside(consume, range(2), rest=rest())
    assert [type(error) for error in seen] == [KeyboardInterrupt]


def test_what_is_not_taken_is_made_all_the_same() -> None:
    made: list[int] = []
    assert beside(next, counted(9, made)) == 0
    assert len(made) == 9


@pytest.mark.parametrize("made", [0, 3], ids=["is empty", "is full"])
def test_ctrl_c_while_the_end_is_offered_ends_the_consumer(made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an item hears of it, and takes what is in the line before."""
    put, taken = queue.Queue.put, threading.Event()

    def interrupted(line: queue.Queue[object], item: object, *args: object, **more: object) -> None:
        if not isinstance(item, int):
            taken.set()
            raise KeyboardInterrupt("mine")
        put(line, item, *args, **more)  # type: ignore[arg-type]

    seen: list[object] = []

    def consume(items: Iterator[int]) -> None:
        assert not made or taken.wait(20)
        try:
            seen.extend(items)
        except KeyboardInterrupt:
            seen.append("ended")
            raise

    monkeypatch.setattr(queue.Queue, "put", interrupted)
    with pytest.raises(KeyboardInterrupt, match="mine"):
        beside(consume, range(made), ahead=4)
    assert seen == [*range(made), "ended"]


def test_an_error_that_the_caller_is_at_is_none_of_the_makers() -> None:
    try:
        raise ValueError("an earlier one")
    except ValueError:
        assert beside(list, range(2)) == [0, 1]


def test_an_error_of_the_consumer_ends_the_making() -> None:
    made: list[int] = []

    def consume(items: Iterator[int]) -> None:
        next(items)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        beside(consume, counted(1000, made))
    assert len(made) < 1000


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_error_of_the_maker_reaches_the_consumer_which_cleans_up(kind: type[BaseException]) -> None:
    cleaned: list[object] = []

    def source() -> Iterator[int]:
        yield 1
        raise kind("mine")

    def consume(items: Iterator[int]) -> None:
        try:
            list(items)
        finally:
            cleaned.append(kind)

    with pytest.raises(kind, match="mine"):
        beside(consume, source())
    assert cleaned == [kind]
