"""Decisions that all ranks take alike. Alone, each of these is the plain call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

from twinreel.parallel.axis import Axis

T = TypeVar("T")


def portable(error: BaseException) -> BaseException:
    """`error` if it survives a pickle, otherwise a RuntimeError with its name and words."""
    try:
        sent: BaseException = pickle.loads(pickle.dumps(error))
        return sent
    except Exception:  # whatever a foreign class does when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")


class Team:
    """The ranks of a control axis."""

    def __init__(self, control: Axis) -> None:
        self.control = control

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that reads, writes and speaks for all."""
        return self.control.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; its picklable value, or its error, is every rank's. `work` uses no collective."""
        if self.control.size == 1:
            return work()
        value, error = self.control.from_first(attempt(work) if self.leads else None)
        if error is not None:
            raise agreed(error)
        result: T = value
        return result

    def together(self, work: Callable[[], T]) -> T:
        """Every rank works; the lowest failing rank's error is every rank's. `work` uses no collective.

        All ranks leave at the same time: whatever collective comes next finds them close together.
        """
        if self.control.size == 1:
            return work()
        value, error = attempt(work)
        errors = [failed for failed in self.control.tell_all(error) if failed is not None]
        if errors:
            raise agreed(errors[0])
        return value

    def differing(self, mine: str) -> str | None:
        """Which ranks have chosen what, where not all have said the same `mine`."""
        told = self.control.tell_all(mine)
        ranks = [f"rank {rank} {words}" for rank, words in enumerate(told) if words not in told[:rank]]
        return "; ".join(ranks) if len(ranks) > 1 else None


def agreed(error: BaseException) -> BaseException:
    """`error`, marked as one that every rank raises now, at the same place: none waits for another."""
    vars(error)["agreed"] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank has raised it."""
    return bool(vars(error).get("agreed"))


def attempt(work: Callable[[], T]) -> tuple[T, BaseException | None]:
    """The value of `work` or its error, in a form that can be sent."""
    try:
        return work(), None
    except Exception as error:  # the edge between ranks: what ends one must end all, with this cause
        nothing: T = None  # type: ignore[assignment]
        return nothing, portable(error)
