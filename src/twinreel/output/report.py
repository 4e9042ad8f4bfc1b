"""What a result is known by: hashes of its pictures, its sound and its file, and the JSON report beside it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import sidecar_path
from .placing import give_free_name, replace, unfinished

BLOCK = 1 << 20
HIDDEN = "(private)"
PRIVATE_NAMES = ("prompt", "uri", "path", "model", "profile")
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


def warnings_of(report: Mapping[str, Any]) -> list[str]:
    """What was legal but probably not meant, once each: of the plan, of the run, and of a policy that skipped nothing."""
    policy = report.get("policy", {})
    idle = [policy["warning"]] if "warning" in policy else []
    return list(dict.fromkeys([*report["plan"].get("warnings", ()), *report.get("warnings", ()), *idle]))


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a bit; None for one that is not installed."""
    own = getattr(sys.modules[__name__.partition(".")[0]], "__version__", None)
    found: dict[str, str | None] = {"python": platform.python_version(), "twinreel": own}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def write_report(path: str | os.PathLike[str], report: Mapping[str, Any], *, overwrite: bool = True) -> Path:
    """Write the report beside the finished file `path`, atomically. Returns the report's path: without `overwrite` the
    next number of the usual one that is free.

    Values are plain JSON; `sha256.file` and `versions` are added when absent. Raises ValueError for other values.
    """
    hashes = {**report.get("sha256", {})}
    if "file" not in hashes and Path(path).is_file():
        hashes["file"] = hash_file(path)
    whole = {**report, "file": Path(path).name, "sha256": hashes}
    whole.setdefault("versions", versions())
    target = sidecar_path(path)
    # bytes of a name that are no UTF-8 are lone surrogates here, and JSON's own escapes in the file
    text = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with unfinished(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        if overwrite:
            replace(temporary, target)
            return target
        return give_free_name(temporary, target)


def without_private(report: Mapping[str, Any], secrets_in: Iterable[str]) -> dict[str, Any]:
    """A copy of `report` in which the prompt, addresses and paths read `(private)`.

    `secrets_in` are more words to hide; they and what is found under known names are also hidden inside other texts,
    such as notes that name a file.
    """
    words = {word for word in (*secrets_in, *_named(report)) if word}
    words |= {Path(word).name for word in words if "/" in word}
    # the longest first, so that a path goes whole before its last part would; short words only where they stand alone
    ordered = sorted(words, key=len, reverse=True)

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [hide(item) for item in value]
        if not isinstance(value, str):
            return value
        for word in ordered:
            value = HIDDEN if value == word else value.replace(word, HIDDEN) if len(word) > 3 else value
        return value

    return hide(report)


def _named(value: Any) -> Iterator[str]:
    """Texts that stand under a name of something private, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in PRIVATE_NAMES and isinstance(item, str):
                yield item
            elif key == "policy" and isinstance(item, str):
                yield from re.findall(r"profile=([^,]+)", item)
            elif key == "components" and isinstance(item, Mapping):
                yield from item.values()
            else:
                yield from _named(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item)
