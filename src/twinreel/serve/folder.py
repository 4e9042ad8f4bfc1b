"""The data folder: is it ours, one server a folder, and what may be removed from it.

Nothing in a folder is changed before its queue says that it is ours, or the folder is empty; and only what bears a name
that we give is ever removed.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import IO

from ..errors import ConfigError
from ..limits import shown
from .jobs import FOREIGN, NEW, OURS, QUEUE, Jobs, kind_of

LOCK = "server.lock"
# What a server leaves that was ended before its queue was made, and what a disk of its own has from the start.
BARE = {"jobs", "incoming", LOCK, "engine.lock", "lost+found"}
BARE |= {QUEUE, f"{QUEUE}-wal", f"{QUEUE}-shm", f"{QUEUE}-journal"}
_INCOMING = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(r"video_[0-9a-f]{24}")


def new_incoming(folder: Path) -> Path:
    """A new folder below `folder` for a request that is being received."""
    path = folder / "incoming" / secrets.token_hex(8)
    path.mkdir(parents=True)
    return path


def leftovers(folder: Path, known: Collection[str]) -> list[Path]:
    """Folders of ours that nobody needs: of jobs that are not `known`, and of requests that were being received."""
    return [path for path in _named(folder / "jobs", _JOB) if path.name not in known] + _named(
        folder / "incoming", _INCOMING
    )


def _named(folder: Path, name: re.Pattern[str]) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def check_ours(folder: Path) -> None:
    """Refuse a folder that holds anything and is no data folder of a server; changes nothing. Raises ConfigError."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        kind = kind_of(folder / QUEUE) if QUEUE in names else NEW
        if kind == OURS:
            return
        within = [path.name for part in ("jobs", "incoming") if part in names for path in (folder / part).iterdir()]
    except sqlite3.Error as error:
        raise ConfigError(f"data: {folder}/{QUEUE} cannot be used ({error}); name another folder") from None
    except OSError as error:
        raise ConfigError(f"data: {folder} cannot be written to ({error.strerror}); name another folder") from None
    if kind == FOREIGN:
        raise ConfigError(f"data: {folder}/{QUEUE} cannot be used (it is another program's); name another folder")
    if jobs := [name for name in within if _JOB.fullmatch(name)]:
        raise ConfigError(
            f"data: {folder} holds {len(jobs)} jobs and no {QUEUE} that knows them; put that file back, or name a new "
            "folder"
        )
    if strange := sorted(names - BARE) or sorted(within):
        raise ConfigError(
            f"data: {folder} holds {shown(strange[0])} and is no data folder of a server; name a new or an empty folder"
        )


def claim(folder: Path) -> IO[str]:
    """Make `folder` and its parts, and hold it for this process as long as the result is open. Raises ConfigError."""
    import fcntl

    check_ours(folder)
    try:
        for part in (folder, folder / "jobs", folder / "incoming"):
            part.mkdir(parents=True, exist_ok=True)
            part.chmod(0o700)  # prompts and media are for the server's user alone
        file = (folder / LOCK).open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"data: another server uses {folder}; give this one its own folder") from None
    except OSError as error:
        raise ConfigError(f"data: {folder} cannot be written to ({error.strerror}); name another folder") from None
    return file


def open_queue(folder: Path) -> Jobs:
    """The queue in `folder`. Raises ConfigError for a file that is none, or another program's."""
    try:
        return Jobs(folder)
    except sqlite3.Error as error:
        raise ConfigError(f"data: {folder}/{QUEUE} cannot be used ({error}); name another folder") from None


def sync(path: Path) -> None:
    """Have a file or folder on the disk when this returns."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
