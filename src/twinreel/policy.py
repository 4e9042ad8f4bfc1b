"""Which steps call the model. One argument of the loop; the model never knows.

`EveryStep` is the definition; the kinds that call less often are in `policies/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .noise import Rows


@dataclass(frozen=True)
class Update:
    """What a step moves by: the velocity (rows' shapes), and corrected rows to use instead of the loop's, if any."""

    velocity: Rows
    correction: Rows | None = None

    def corrected(self, rows: Rows) -> Rows:
        """The rows to advance."""
        return rows if self.correction is None else self.correction


class StepPolicy(Protocol):
    """State of one request; it dies with it."""

    name: str

    def update(self, step: int, rows: Rows, call: Callable[[], Rows]) -> Update:
        """The step's update; `call` runs the model on the rows.

        The loop writes over `rows` after each step, so a policy that remembers them keeps a copy.
        """
        ...

    def report(self) -> dict[str, Any]:
        """What was computed, for the report: plain JSON values, `warning` when the policy did nothing."""
        ...


@dataclass
class EveryStep:
    """The definition: the model is called at every step."""

    name: str = "every-step"
    computed: list[int] = field(default_factory=list)

    def update(self, step: int, rows: Rows, call: Callable[[], Rows]) -> Update:
        """Call the model."""
        self.computed.append(step)
        return Update(call())

    def report(self) -> dict[str, Any]:
        """The steps computed."""
        return {"name": self.name, "calls": len(self.computed), "computed": self.computed}
