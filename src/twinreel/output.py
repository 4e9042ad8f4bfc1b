"""What a person may choose about the finished file, checked before a weight is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import RequestError

PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")
CRF_RANGE = (0, 51)


@dataclass(frozen=True)
class OutputOptions:
    """H.264 quality `crf`, 0 (lossless) to 51, and x264's speed `preset`."""

    crf: int = 18
    preset: str = "fast"


def check_output(path: str | os.PathLike[str], output: OutputOptions) -> Path:
    """The absolute path of a file that can be written as asked. Raises RequestError (`output`, `crf`, `preset`)."""
    low, high = CRF_RANGE
    if isinstance(output.crf, bool) or not isinstance(output.crf, int) or not low <= output.crf <= high:
        raise RequestError("crf", f"got {output.crf!r}; a whole number from {low} to {high}")
    if output.preset not in PRESETS:
        raise RequestError("preset", f"got {output.preset!r}; use {', '.join(PRESETS)}")
    target = Path(path).absolute()
    if target.suffix.lower() != ".mp4":
        raise RequestError("output", f"got {path}; the name must end in .mp4")
    if target.is_dir():
        raise RequestError("output", f"{path} is a folder; name a file")
    if not target.parent.is_dir():
        raise RequestError("output", f"the folder {target.parent} does not exist; make it first")
    if not os.access(target.parent, os.W_OK):
        raise RequestError("output", f"the folder {target.parent} cannot be written to")
    return target
