"""What is not whole yet has a name of its own; it gets the one it was made for in one step, and never over another's."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what renaming a folder onto something is answered with
LONGEST_PART = 150  # bytes of a name that its unfinished form repeats: what follows them must fit as well


def part_path(target: Path) -> Path:
    """A new name beside `target` for what is not whole yet."""
    name = os.fsencode(target.name)[:LONGEST_PART].decode("utf-8", "ignore")
    return target.with_name(f".{name}.{os.getpid()}-{secrets.token_hex(4)}.part")


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A temporary path in the folder of `target`, which the caller makes a file or a folder; nothing is left of it."""
    temporary = part_path(target)
    try:
        yield temporary
    finally:
        remove(temporary)


def write_probe(target: Path) -> None:
    """Prove by a byte that `target` could be written. Raises OSError."""
    with unfinished(target) as probe:
        probe.write_bytes(b"0")


def give_name(temporary: Path, target: Path) -> None:
    """Name a file or folder `target` in one step that fails with FileExistsError where there is something already; an
    empty folder is nothing to a folder."""
    flush(temporary)
    if temporary.is_dir():
        name_folder(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file of our own holds the name for an instant
        with open(target, "xb") as claim:
            mine = os.fstat(claim.fileno())
        try:
            os.replace(temporary, target)
        except OSError:
            with suppress(FileNotFoundError):
                if os.path.samestat(mine, os.stat(target)):
                    target.unlink()
            raise


def name_folder(folder: Path, target: Path) -> None:
    """`give_name` for a folder that is on the disk already, or holds what is not ours to open."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in OCCUPIED:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise


def flush(path: Path) -> None:
    """See to it that a file, or every file below a folder, is on the disk."""
    for part in sorted(path.rglob("*")) if path.is_dir() else (path,):
        if not part.is_dir():
            with open(part, "rb") as file:
                os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
