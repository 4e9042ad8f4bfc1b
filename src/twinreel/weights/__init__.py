"""Checkpoints: find them, read their sizes, stream their tensors, verify them. Importing this room loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import read_spec
from .locate import Checkpoint, locate
from .verify import verify

if TYPE_CHECKING:
    from .stream import load_into, stored_bytes, stream_part

__all__ = ["Checkpoint", "load_into", "locate", "read_spec", "stored_bytes", "stream_part", "verify"]


def __getattr__(name: str) -> Any:
    if name in ("load_into", "stored_bytes", "stream_part"):
        from . import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
