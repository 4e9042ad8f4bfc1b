"""How what was written gets its name: once it is whole and on the disk, and never over what nobody gave up for it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

from . import is_ours, is_taken, latents_path, part_path, sidecar_path

OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what renaming a folder onto something is answered with


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A temporary path in the folder of `target`, which the caller makes a file or a folder; nothing is left of it."""
    temporary = part_path(target)
    try:
        yield temporary
    finally:
        _remove(temporary)


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


def give_name(temporary: Path, target: Path) -> None:
    """Name a file or folder `target` in one step that fails with FileExistsError where there is something already; an
    empty folder is nothing to a folder."""
    _flush(temporary)
    if temporary.is_dir():
        try:
            os.rename(temporary, target)
        except OSError as error:
            if error.errno in OCCUPIED:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            raise
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file of our own holds the name for an instant
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        os.replace(temporary, target)


def replace(temporary: Path, target: Path) -> None:
    """Put a file or folder in the place of `target`: a file in one step; a folder that is in the way is first set aside.
    FileExistsError for a folder that holds other files than our frames."""
    _flush(temporary)
    if not temporary.is_dir() or not target.is_dir():
        os.replace(temporary, target)
        return
    aside = temporary.with_suffix(".old")
    os.rename(target, aside)
    try:
        if not is_ours(aside):
            raise FileExistsError(errno.EEXIST, "holds other files than our frames", str(target))
        os.rename(temporary, target)
    finally:
        if temporary.exists():  # it did not come to that
            os.rename(aside, target)
    _remove(aside)


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


def _flush(path: Path) -> None:
    for part in sorted(path.iterdir()) if path.is_dir() else (path,):
        with open(part, "rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
