"""What a person may choose about the finished file, and what is checked before a weight is loaded.

The rule of names: nothing that exists is replaced unless `overwrite` says so. That covers the file itself, the report
beside it and the latents that an interrupted run has left there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError

PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")
CRF_RANGE = (0, 51)
FORMATS: Mapping[str, str] = {
    ".mp4": "H.264 and AAC",
    ".mkv": "H.264 and FLAC, whose sound is lossless (24 bit)",
    ".webm": "VP9 and Opus",
    ".wav": "sound alone, 32-bit float",
    ".npz": "raw frames and samples for NumPy",
    "": "a folder of PNG frames with sound.wav",
}
CONTAINERS = (".mp4", ".mkv", ".webm")  # what `crf` and `preset` mean something to
LATENTS_SUFFIX = ".latents.safetensors"
FRAME_NAME, SOUND_NAME = "frame-{:05d}.png", "sound.wav"
OVERWRITE = "--overwrite (in Python overwrite=True)"
SPARE_BYTES = 4 << 20  # the report, the index of the container, what a file system keeps for itself


@dataclass(frozen=True)
class OutputOptions:
    """How the finished file is written; its format follows from its name (`FORMATS`).

    Args:
        crf: quality of H.264 or VP9, 0 (lossless) to 51.
        preset: speed of the encoder, x264's names.
        overwrite: replace files that exist.
        audio: False leaves the sound out.
        exact_seconds: cut picture and sound to the duration asked for; otherwise everything made is kept.
        private: leave the prompt and every path out of the report.
    """

    crf: int = 18
    preset: str = "fast"
    overwrite: bool = False
    audio: bool = True
    exact_seconds: bool = False
    private: bool = False


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """Where the report of `path` lies: `out.mp4` has `out.json`."""
    path = Path(path)
    return path.with_suffix(".json") if path.suffix != ".json" else path.with_name(path.name + ".json")


def latents_path(target: Path) -> Path:
    """Where the latents of `target` wait while it is decoded: `out.mp4` has `out.latents.safetensors`."""
    return target.with_name(target.stem + LATENTS_SUFFIX)


def check_output(path: str | os.PathLike[str], output: OutputOptions, source: Path | None = None) -> Path:
    """The absolute path of a file that can be written as asked; `source` is the latents file about to be decoded.

    Raises RequestError (`output`, `crf`, `preset`, `audio`). The folder is proven by writing a byte into it.
    """
    if not isinstance(path, str | os.PathLike):
        raise RequestError("output", f"got {type(path).__name__}; give the path of a file")
    target = Path(path).absolute()
    _check_options(path, target.suffix.lower(), output)
    if not target.parent.is_dir():
        raise RequestError("output", f"the folder {target.parent} does not exist; make it first")
    _check_names(target, output, source)
    probe = target.with_name(f".{target.name}.{secrets.token_hex(4)}.probe")
    try:
        try:
            probe.write_bytes(b"0")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError("output", f"the folder {target.parent} cannot be written to ({error.strerror})") from None
    return target


def _check_options(path: str | os.PathLike[str], suffix: str, output: OutputOptions) -> None:
    if not isinstance(output.overwrite, bool):
        raise RequestError("overwrite", f"got {output.overwrite!r}; use True or False")
    low, high = CRF_RANGE
    if isinstance(output.crf, bool) or not isinstance(output.crf, int) or not low <= output.crf <= high:
        raise RequestError("crf", f"got {output.crf!r}; a whole number from {low} to {high}")
    if output.preset not in PRESETS:
        raise RequestError("preset", f"got {output.preset!r}; use {', '.join(PRESETS)}")
    if suffix not in FORMATS:
        known = ", ".join(filter(None, FORMATS))
        raise RequestError("output", f"got {path}; the name ends in {known}, or in nothing for a folder of PNG frames")
    if suffix == ".wav" and not output.audio:
        raise RequestError("audio", f"{path} is sound alone, and no sound was asked for; keep one of the two")
    for name in ("crf", "preset"):
        if suffix not in CONTAINERS and getattr(output, name) != getattr(OutputOptions, name):
            raise RequestError(name, f"means nothing to {path}; leave it out, or write {', '.join(CONTAINERS)}")


def _check_names(target: Path, output: OutputOptions, source: Path | None) -> None:
    folder = target.suffix == ""
    if target.is_dir() and not folder:
        raise RequestError("output", f"{target} is a folder; name a file")
    if folder and target.exists() and not target.is_dir():
        raise RequestError("output", f"{target} is a file; a name without an ending is a folder of PNG frames")
    if folder and target.is_dir() and not is_ours(target):
        raise RequestError("output", f"{target} holds other files than our frames; name a new folder")
    waiting = latents_path(target)
    if waiting.exists() and not output.overwrite and (source is None or waiting != source.absolute()):
        raise RequestError(
            "output",
            f"{waiting} holds a run that is sampled and not decoded; finish it with `twinreel decode`, name another "
            f"output, or lose it by {OVERWRITE}",
        )
    for taken in (target, sidecar_path(target)):
        empty = taken.is_dir() and not any(taken.iterdir())
        if taken.exists() and not empty and not output.overwrite:
            raise RequestError("output", f"{taken} exists; name another, or replace it by {OVERWRITE}")


def is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but frames and sound as we name them; an empty one does."""
    start, end = FRAME_NAME.split("{:05d}")
    names = [entry.name for entry in folder.iterdir()]
    return all(
        name == SOUND_NAME or name.startswith(start) and name.endswith(end) and name[len(start) : -len(end)].isdigit()
        for name in names
    )


def estimate_bytes(target: Path, output: OutputOptions, size: tuple[int, int], frames: int, samples: int) -> int:
    """About what the file and its latents take at most, for (width, height) `size`; an estimate, not a bound.

    Two bits a pixel at CRF 18, halved every 6 points, is noise's share of it and several times what films take.
    """
    pixels = size[0] * size[1] * frames
    suffix = target.suffix.lower()
    if suffix in CONTAINERS:
        picture = min(pixels * 2 ** ((18 - output.crf) / 6) / 4, pixels * 1.5)
    else:
        picture = 0 if suffix == ".wav" else pixels * 3
    latents = pixels / 1024 * 24 * 4 + samples * 2 / 800 * 32 * 4
    return int(picture + latents + samples * 2 * 4) + SPARE_BYTES


def check_space(target: Path, output: OutputOptions, size: tuple[int, int], frames: int, samples: int) -> None:
    """Refuse an output that the disk has no room for. Raises RequestError (`output`)."""
    need, free = estimate_bytes(target, output, size, frames, samples), shutil.disk_usage(target.parent).free
    if free < need:
        raise RequestError(
            "output",
            f"about {need / 1e6:.0f} MB are needed in {target.parent}, {free / 1e6:.0f} MB are free; free some, or "
            "name another folder",
        )
