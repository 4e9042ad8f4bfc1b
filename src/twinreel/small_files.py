"""Small files that a person names (JSON, TOML, a key): read whole, or refused before a byte is, for what they are."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

MOST = 64 << 20  # bytes, unless the reader says otherwise
MOST_JSON = 256 << 20  # of requests, media as data: addresses included


def read_small(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """All bytes of a plain file of at most `most`. Raises OSError with a `strerror` for people, for a pipe, a device, a
    folder and a larger file as well: a pipe would be waited for, and /dev/zero has no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise OSError(errno.EINVAL, f"it is no file of at most {size}", os.fspath(path))
    with open(path, "rb") as file:
        return file.read(most)


def why(error: Exception) -> str:
    """What is wrong with a file that could not be read, in words of bounded length."""
    return (getattr(error, "strerror", None) or str(error))[:200]


def read_small_json(path: str | os.PathLike[str], most: int = MOST) -> Any:
    """The JSON value in a small file of UTF-8. Raises OSError as `read_small`, ValueError, for a key that an object
    holds twice as well."""
    try:
        return json.loads(read_small(path, most).decode("utf-8"), object_pairs_hook=each_once)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of which every name stands once: of two values nobody knows which is meant. Raises ValueError."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{key[:60]!r} stands twice in one object")
        made[key] = value
    return made
