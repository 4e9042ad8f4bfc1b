"""How what was written gets its name: once it is whole and on the disk, and never over what nobody gave up for it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from ..unfinished import flush, give_name, name_folder, remove, unfinished
from . import is_ours, is_taken, latents_path, sidecar_path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path that takes the place of the file or the folder of frames `target`, if the block succeeds."""
    with unfinished(target) as temporary:
        yield temporary
        replace(temporary, target)


def numbered(target: Path) -> Iterator[Path]:
    """`out.mp4`, `out-2.mp4`, `out-3.mp4` and on."""
    yield target
    for number in count(2):
        yield target.with_stem(f"{target.stem}-{number}")


def place_output(temporary: Path, target: Path, overwrite: bool) -> Path:
    """Name a finished result `target`; where that or its report's name was taken meanwhile, the next number of it that
    is free, and `overwrite` gives up what is a file or a folder of frames. Returns the name."""
    for name in numbered(target):
        beside = [sidecar_path(name)] if name == target else [sidecar_path(name), latents_path(name)]
        try:
            if overwrite and name == target:
                replace(temporary, name)
            elif any(map(is_taken, beside)):
                continue
            else:
                give_name(temporary, name)
            return name
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def give_free_name(temporary: Path, target: Path) -> Path:
    """Name a file `target`, or by the next number of it that is free. Returns the name."""
    for name in numbered(target):
        try:
            give_name(temporary, name)
            return name
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def replace(temporary: Path, target: Path) -> None:
    """Put a file or folder in the place of `target`: a file in one step; a folder that is in the way is first set aside.
    FileExistsError for a folder that holds other files than our frames, and where another run was faster. What was set
    aside in vain has its name again, or the next number of it that is free."""
    if not temporary.is_dir():
        flush(temporary)
        os.replace(temporary, target)
        return
    aside = temporary.with_suffix(".old")
    if target.is_dir():
        with suppress(FileNotFoundError):  # another run has just set it aside
            os.rename(target, aside)
    try:
        if aside.exists() and not is_ours(aside):
            raise FileExistsError(errno.EEXIST, "holds other files than our frames", str(target))
        give_name(temporary, target)
    finally:
        if temporary.exists() and aside.exists():  # it did not come to that
            _put_back(aside, target)
    remove(aside)


def _put_back(aside: Path, target: Path) -> None:
    for name in numbered(target):
        try:
            return name_folder(aside, name)
        except FileExistsError:
            continue


def hold(path: Path) -> BinaryIO:
    """`path`, open: its latents are in use until that is closed, or this process ends in whatever way. BlockingIOError
    where they are in use already. A file system that knows no locks refuses nobody."""
    try:
        file: BinaryIO = open(path, "r+b")  # NFS locks for writers alone
    except OSError:
        file = open(path, "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass
    return file


def drop_latents(path: Path) -> None:
    """Remove latents that nobody uses. BlockingIOError where somebody does."""
    try:
        held = hold(path)
    except FileNotFoundError:
        return
    with held:
        if os.path.samestat(os.fstat(held.fileno()), os.stat(path)):  # another run may have been faster
            path.unlink()
