"""What a result is known by: hashes of its pictures, its sound and its file, and the JSON report beside it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
PACKAGES = ("torch", "transformers", "av", "numpy", "pillow", "safetensors")


class FrameHasher:
    """SHA-256 of raw frames in order, while they pass by; the same for any split into clips."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.frames = 0

    def through(self, clips: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8 `[f, H, W, 3]` clips unchanged, counted and hashed."""
        for clip in clips:
            frames = np.ascontiguousarray(clip)
            assert frames.dtype == np.uint8 and frames.ndim == 4
            self._sha.update(frames.data)
            self.frames += len(frames)
            yield frames

    def hexdigest(self) -> str:
        """The hash of what has passed so far."""
        return self._sha.hexdigest()


def hash_frames(frames: NDArray[np.uint8]) -> str:
    """SHA-256 of uint8 `[F, H, W, 3]`."""
    hasher = FrameHasher()
    for _ in hasher.through([frames]):
        pass
    return hasher.hexdigest()


def hash_waveform(waveform: NDArray[np.float32]) -> str:
    """SHA-256 of float32 `[2, n]` as little-endian bytes, channel after channel."""
    return hashlib.sha256(np.ascontiguousarray(waveform, dtype="<f4").tobytes()).hexdigest()


def hash_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
    return sha.hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a bit; None for one that is not installed."""
    own = getattr(sys.modules[__package__ or ""], "__version__", None)
    found: dict[str, str | None] = {"python": platform.python_version(), "twinreel": own}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """Where the report of `path` lies: `out.mp4` has `out.json`."""
    path = Path(path)
    return path.with_suffix(".json") if path.suffix != ".json" else path.with_name(path.name + ".json")


def write_report(path: str | os.PathLike[str], report: Mapping[str, Any]) -> Path:
    """Write the report beside the finished file `path`, atomically. Returns the report's path.

    Values are plain JSON; `sha256.file` and `versions` are added when absent.
    """
    hashes = {**report.get("sha256", {})}
    hashes.setdefault("file", hash_file(path))
    whole = {**report, "file": Path(path).name, "sha256": hashes}
    whole.setdefault("versions", versions())
    target = sidecar_path(path)
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path in the folder of `target`, renamed onto it on success and removed on any failure."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
