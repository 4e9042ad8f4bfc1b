"""The formats of a finished file: how each is written, clip by clip, and how it is read back."""

from __future__ import annotations

from pathlib import Path

from .. import CONTAINERS
from . import container, raw
from .content import Content

__all__ = ["Content", "read_back", "write_content"]


def write_content(path: Path, suffix: str, content: Content) -> None:
    """Write `content` to `path` in the format of `suffix`, taking its clips one at a time.

    Raises ValueError for clips of another shape or none, OSError for what the disk refuses.
    """
    if suffix in CONTAINERS:
        container.write(path, suffix, content)
    elif suffix == ".wav":
        raw.write_wav(path, content.samples())
    else:
        (raw.write_npz if suffix == ".npz" else raw.write_folder)(path, content)


def read_back(path: Path, suffix: str, content: Content) -> None:
    """Decode the whole of `path` and compare it with what `content` was when it was written. Raises OSError."""
    if suffix in CONTAINERS:
        found = container.read_back(path, suffix, content)
    elif suffix == ".wav":
        found = raw.read_wav(path, content)
    else:
        found = (raw.read_npz if suffix == ".npz" else raw.read_folder)(path, content)
    if found:
        raise OSError(f"{path.name} does not read back as it was written: {'; '.join(found)}")
