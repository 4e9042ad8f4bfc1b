"""Typed reading of config files: every error names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError
from .files import read_json, shown

STORED_DTYPES = ("float32", "bfloat16", "float16")

# No checkpoint comes near these; a damaged config must not make us list a billion tensors.
MOST, MOST_LAYERS, MOST_ITEMS = 2**31, 1024, 16
LARGEST, SMALLEST = 1e15, 1e-15  # float32 squares these
MOST_EPS = 0.1  # what a norm adds to a variance


class Fields:
    """The fields of one config file (or of a block inside it, `prefix` naming it), with H3's values as defaults."""

    def __init__(self, path: Path, data: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.path = path
        self.data = read_json(path) if data is None else data
        self.prefix = prefix

    def fail(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self.prefix}{name}: {reason}")

    def block(self, name: str) -> Fields:
        """The object under `name`; empty when absent."""
        value = self.data.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.fail(name, f"an object is needed, got {shown(value)}")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def whole(self, name: str, default: int, low: int = 1, high: int = MOST) -> int:
        value = self.data.get(name, default)
        high = min(high, MOST_LAYERS) if name.endswith(("layers", "blocks", "block", "depth")) else high
        if type(value) is not int or not low <= value <= high:
            self.fail(name, f"an integer from {low} to {high} is needed, got {shown(value)}")
        return value

    def real(self, name: str, default: float, low: float = SMALLEST, high: float = LARGEST) -> float:
        """A number from `low` to `high`; an eps is a small one."""
        high = min(high, MOST_EPS) if name.endswith("eps") else high
        value = self.data.get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            self.fail(name, f"a finite number from {low:g} to {high:g} is needed, got {shown(value)}")
        return float(value)

    def wholes(
        self, name: str, default: tuple[int, ...], low: int = 1, high: int = MOST, most: int = MOST_ITEMS
    ) -> tuple[int, ...]:
        """A list of 1 to `most` integers from `low` to `high`."""
        value = self.data.get(name, default)
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= most:
            self.fail(name, f"a list of 1 to {most} integers is needed, got {shown(value)}")
        for item in value:
            if type(item) is not int or not low <= item <= high:
                self.fail(name, f"integers from {low} to {high} are needed, got {shown(item)}")
        return tuple(value)

    def reals(self, name: str, length: int, low: float = -LARGEST) -> tuple[float, ...]:
        """A required list of `length` numbers from `low`."""
        value = self.data.get(name)
        if not isinstance(value, list | tuple) or len(value) != length:
            got = "nothing" if value is None else f"{len(value)}" if isinstance(value, list | tuple) else shown(value)
            self.fail(name, f"{length} numbers are needed (one per channel), got {got}")
        for item in value:
            if type(item) not in (int, float) or not low <= item <= LARGEST:
                self.fail(name, f"finite numbers from {low:g} to {LARGEST:g} are needed, got {shown(item)}")
        return tuple(float(item) for item in value)

    def truth(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"true or false is needed, got {shown(value)}")
        return value

    def fixed(self, **only: Any) -> None:
        """Fields that change what the model computes and of which one value is supported, or one of a tuple; any of
        them may be absent."""
        for name, allowed in only.items():
            values = allowed if isinstance(allowed, tuple) else (allowed,)
            if name in self.data and not any(_same(self.data[name], value) for value in values):
                words = " or ".join(map(repr, values))
                self.fail(name, f"only {words} is supported, got {shown(self.data[name])}")

    def known(self, *names: str) -> None:
        """Refuse every field but these: for blocks in which each field is an argument of the released model."""
        for name in self.data:
            self.need(name in names, name, f"unknown; known are {', '.join(names)}")

    def dtype(self, default: str) -> str:
        """The stored dtype (`dtype`, older `torch_dtype`)."""
        name = "dtype" if "dtype" in self.data else "torch_dtype"
        value = self.data.get(name, default)
        if value not in STORED_DTYPES:
            self.fail(name, f"one of {', '.join(STORED_DTYPES)} is needed, got {shown(value)}")
        return str(value)

    def need(self, condition: bool, name: str, reason: str) -> None:
        """A rule between fields: CheckpointError naming `name` unless it holds."""
        if not condition:
            self.fail(name, reason)


def _same(given: Any, value: Any) -> bool:
    """Equal, and of one kind: 1 is 1.0, but not true."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)
