"""Temporary folders of a run, which go with it; what a run that was killed has left goes with the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "twinreel-"
LOCK = ".in-use"  # locked for as long as the process lives that made the folder, or the block lasts


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A new folder `twinreel-NAME-...` in the folder for temporary files, removed after the block; an error that leaves
    the block loses the notes that send somebody there."""
    clear()
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix=f"{PREFIX}{name}-") as text:
        folder = Path(text)
        made = folder / "new"
        file = held.enter_context(open(made, "wb"))
        with suppress(OSError):  # where a file system knows no locks, nobody clears
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(folder / LOCK)  # so that nobody sees it unlocked

        def forget(kind: object, error: BaseException | None, at: object) -> None:
            if notes := getattr(error, "__notes__", []):
                notes[:] = [note for note in notes if folder.name not in note]

        held.push(forget)
        yield folder


def clear() -> None:
    """Remove the folders of runs of this user that have ended without doing so."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(os.open(lock, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
