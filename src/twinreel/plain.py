"""Numbers and paths of other libraries as Python's own, so that checks, reports and commands meet one kind of each."""

from __future__ import annotations

import numbers
import os
from typing import Any


def plain(value: Any) -> Any:
    """An int, float or text for what counts as one (`np.int64(3)`, `Path("a")`), also in tuples and lists, which become
    tuples; anything else as it is, for a check to refuse."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, numbers.Real) else value
    except OverflowError:
        return value


def make_plain(values: Any, *names: str) -> None:
    """Put `plain` values into the fields `names` of a frozen dataclass."""
    for name in names:
        object.__setattr__(values, name, plain(getattr(values, name)))
