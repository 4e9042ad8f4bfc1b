"""Checkpoints: find them, read their sizes, stream their tensors, verify them. Importing this room loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import read_spec
from .locate import Checkpoint, locate
from .verify import verify

if TYPE_CHECKING:
    from .stream import stored_bytes

__all__ = ["Checkpoint", "locate", "read_spec", "stored_bytes", "verify"]


def __getattr__(name: str) -> Any:
    if name == "stored_bytes":
        from .stream import stored_bytes

        return stored_bytes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
