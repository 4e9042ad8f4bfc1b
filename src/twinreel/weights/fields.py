"""Typed reading of config files: every error names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError
from .files import read_json

STORED_DTYPES = ("float32", "bfloat16", "float16")

# No checkpoint comes near these; a damaged config must not make us list a billion tensors.
MOST, MOST_LAYERS = 2**31, 4096


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
            self.fail(name, f"an object is needed, got {value!r}")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def whole(self, name: str, default: int, low: int = 1) -> int:
        value = self.data.get(name, default)
        high = MOST_LAYERS if name.endswith(("layers", "blocks", "block", "depth")) else MOST
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"an integer from {low} to {high} is needed, got {value!r}")
        return value

    def real(self, name: str, default: float) -> float:
        """A finite number above zero."""
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(name, f"a finite number above 0 is needed, got {value!r}")
        return float(value)

    def wholes(self, name: str, default: tuple[int, ...], low: int = 1) -> tuple[int, ...]:
        value = self.data.get(name, default)
        if not isinstance(value, list | tuple) or not value:
            self.fail(name, f"a list of integers is needed, got {value!r}")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or item < low:
                self.fail(name, f"integers of at least {low} are needed, got {item!r}")
        return tuple(value)

    def reals(self, name: str, length: int) -> tuple[float, ...]:
        """A required list of `length` finite numbers."""
        value = self.data.get(name)
        if not isinstance(value, list | tuple) or len(value) != length:
            got = "nothing" if value is None else f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
            self.fail(name, f"{length} numbers are needed (one per latent channel), got {got}")
        if not all(
            isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item) for item in value
        ):
            self.fail(name, "finite numbers are needed")
        return tuple(float(item) for item in value)

    def truth(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"true or false is needed, got {value!r}")
        return value

    def fixed(self, name: str, only: Any) -> None:
        """A field whose one supported value is `only`; absent is fine."""
        if name in self.data and self.data[name] != only:
            self.fail(name, f"only {only!r} is supported, got {self.data[name]!r}")

    def dtype(self, default: str) -> str:
        """The stored dtype (`dtype`, older `torch_dtype`)."""
        name = "dtype" if "dtype" in self.data else "torch_dtype"
        value = self.data.get(name, default)
        if value not in STORED_DTYPES:
            self.fail(name, f"one of {', '.join(STORED_DTYPES)} is needed, got {value!r}")
        return str(value)

    def need(self, condition: bool, name: str, reason: str) -> None:
        """A rule between fields: CheckpointError naming `name` unless it holds."""
        if not condition:
            self.fail(name, reason)
