"""What a person may choose about the finished file, and what is checked before a weight is loaded.

The rule of names: nothing that exists is replaced unless `overwrite` says so. That covers the file itself, the report
beside it and the latents that an interrupted run has left there. What a run itself needs is never replaced. Names are
asked for before a run begins; what takes one meanwhile stays as well (`placing`), and the result is then `out-2.mp4`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError
from ..limits import apart, check_text, shown
from ..plain import make_plain
from ..unfinished import write_probe

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
SWITCHES = ("overwrite", "audio", "exact_seconds", "private")
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

    def __post_init__(self) -> None:
        make_plain(self, "crf")


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """Where the report of `path` lies: `out.mp4` has `out.json`."""
    path = Path(path)
    return path.with_suffix(".json") if path.suffix != ".json" else path.with_name(path.name + ".json")


def latents_path(target: Path) -> Path:
    """Where the latents of `target` wait while it is decoded: `out.mp4` has `out.latents.safetensors`."""
    return target.with_name(target.stem + LATENTS_SUFFIX)


def check_output(
    path: str | os.PathLike[str], output: OutputOptions, source: Path | None = None, needed: Iterable[Path] = ()
) -> Path:
    """The absolute path of a file that can be written as asked.

    `source` is the latents file about to be decoded; `needed` is whatever else the run reads, and the folder of its
    trace: none of them may be what it replaces. Raises RequestError (`output`, or an option's name). The folder is proven
    by a byte written into it.
    """
    check_options(output)
    target = absolute_path("output", path)
    _check_format(path, target.suffix.lower(), output)
    try:
        if not target.parent.is_dir():
            raise RequestError("output", f"the folder {target.parent} does not exist; make it first")
        _check_length(target)
        _check_needed(target, source, needed)
        _check_names(target, output, source)
        write_probe(target)
    except OSError as error:
        why = f"cannot be written to ({error.strerror}); name another"
        raise RequestError("output", f"the folder {str(target.parent)[:300]} {why}") from None
    return target


def check_options(output: OutputOptions) -> None:
    """Refuse values that mean nothing to any format. Raises RequestError naming the option."""
    if not isinstance(output, OutputOptions):
        raise RequestError("output", f"got {shown(output)} for its options; give OutputOptions, or leave them out")
    for name in SWITCHES:
        if not isinstance(getattr(output, name), bool):
            raise RequestError(name, f"got {shown(getattr(output, name))}; use True or False")
    low, high = CRF_RANGE
    if isinstance(output.crf, bool) or not isinstance(output.crf, int) or not low <= output.crf <= high:
        raise RequestError("crf", f"got {shown(output.crf)}; a whole number from {low} to {high}")
    if output.preset not in PRESETS:
        raise RequestError("preset", f"got {shown(output.preset)}; use {', '.join(PRESETS)}")


def absolute_path(field: str, path: str | os.PathLike[str]) -> Path:
    """`path` as a whole one that a report can hold. Raises RequestError (`field`) for what no file can be called."""
    if not isinstance(path, str | os.PathLike):
        raise RequestError(field, f"got {shown(path)}; give the path of a file")
    text = os.fspath(path)
    check_text(field, text)
    if Path(text) == Path():
        raise RequestError(field, f"got {text!r}, the current folder; give the path of a file, or of a new folder")
    try:
        whole = Path(text).absolute()
    except OSError:
        raise RequestError(field, "the current folder is gone; change to another, or give a whole path") from None
    check_text(field, str(whole))
    if text.endswith("/") and whole.suffix:
        raise RequestError(
            field, f"{shown(text)} ends like a folder and like a file; leave out the slash or {whole.suffix}"
        )
    return whole


def _check_format(path: str | os.PathLike[str], suffix: str, output: OutputOptions) -> None:
    if os.fspath(path) == "-":
        raise RequestError("output", "got '-', and no video is written to stdout; name a file, or a folder, as in ./-")
    known = ", ".join(filter(None, FORMATS))
    if suffix not in FORMATS or Path(path).name.lower() in FORMATS:
        raise RequestError(
            "output", f"got {shown(str(path))}; a name that ends in {known}, or in nothing for a folder of PNG frames"
        )
    if suffix == ".wav" and not output.audio:
        raise RequestError("audio", f"{path} is sound alone, and no sound was asked for; keep one of the two")
    for name in ("crf", "preset"):
        if suffix not in CONTAINERS and getattr(output, name) != getattr(OutputOptions, name):
            raise RequestError(name, f"means nothing to {path}; leave it out, or write {', '.join(CONTAINERS)}")


def _check_length(target: Path) -> None:
    most = os.pathconf(target.parent, "PC_NAME_MAX")
    longest = max(len(os.fsencode(name.name)) for name in (target, sidecar_path(target), latents_path(target)))
    if longest > most:
        raise RequestError(
            "output",
            f"the name {shown(target.name)} and what stands beside it take {longest} bytes, {most} are possible; "
            "shorten it",
        )


def _written(target: Path, source: Path | None) -> tuple[Path, ...]:
    """Every path that a run makes or replaces; one that decodes leaves latents but its `source` alone."""
    made = (target, sidecar_path(target))
    return made if source is not None else (*made, latents_path(target))


def _check_needed(target: Path, source: Path | None, needed: Iterable[Path]) -> None:
    for path in (*needed, *([] if source is None else [source])):
        for written in _written(target, source):
            if overlap(path, written):
                raise RequestError(
                    "output", f"{written} would take the place of {path}, which this run needs; name another output"
                )


def overlap(one: Path, other: Path) -> bool:
    """Whether two paths are one file, or one lies in the other."""
    a, b = (Path(os.path.realpath(path)) for path in (one, other))
    if a == b or a in b.parents or b in a.parents:
        return True
    # not Path.exists: a name that is too long is refused where it is opened, in words of its own
    return os.path.exists(one) and os.path.exists(other) and one.samefile(other)


def _check_names(target: Path, output: OutputOptions, source: Path | None) -> None:
    folder = target.suffix == ""
    for path in _written(target, source):
        check_kind("output", path, folder and path == target)
    if folder and target.is_dir() and not is_ours(target):
        raise RequestError("output", f"{target} holds other files than our frames; name a new folder")
    waiting = latents_path(target)
    if source is None and waiting.exists() and not output.overwrite:
        raise RequestError(
            "output",
            f"{waiting} holds a run that is sampled and not decoded; finish it with `twinreel decode`, name another "
            f"output, or lose it by {OVERWRITE}",
        )
    for taken in (target, sidecar_path(target)):
        if is_taken(taken) and not output.overwrite:
            raise RequestError("output", f"{taken} exists; name another, or replace it by {OVERWRITE}")


def check_kind(field: str, path: Path, folder: bool = False) -> None:
    """Refuse to replace what is no plain file, or where a folder is written no folder; overwriting does not mean that.

    Raises RequestError (`field`), and OSError for what can be no path.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a name that is too long, or in what is no folder, is the caller's OSError
        return
    if stat.S_ISLNK(mode):
        raise RequestError(field, f"{path} is a link to {os.readlink(path)}; name what it leads to, or another")
    if stat.S_ISDIR(mode) and not folder:
        raise RequestError(field, f"{path} is a folder; name another file")
    if folder and stat.S_ISREG(mode):
        raise RequestError(field, f"{path} is a file; a name without an ending is a folder of PNG frames")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RequestError(field, f"{path} is a pipe, socket or device and no file; name another")


def is_taken(path: Path) -> bool:
    """Whether something is called so; an empty folder is no loss."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


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
        needed, there = apart(need, free, 1e6)
        told = f"about {needed} MB are needed in {target.parent}, {there} MB are free"
        raise RequestError("output", f"{told}; free some, or name another folder")
