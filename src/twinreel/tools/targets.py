"""The files a tool writes at its end: refused before the work what could not be written after it, whole or not at all.

A fault in writing one loses nothing else: `Targets.unwritten` has it, and the figures still reach stdout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..output import OVERWRITE, absolute_path, check_kind, is_taken, overlap, sidecar_path, write_probe
from ..output.placing import give_name, replace, unfinished
from ..small_files import why

Write = Callable[[Path, str], None]


class Targets:
    """Files to write, by the flag that names them (None: not asked for).

    Args:
        read: files and folders that the tool reads; neither they nor the reports beside them may be replaced.
        overwrite: replace other files that exist.

    Raises RequestError naming the flag.
    """

    def __init__(self, paths: Mapping[str, Path | None], read: Iterable[Path], overwrite: bool) -> None:
        self.unwritten: list[dict[str, str]] = []
        self._overwrite = overwrite
        read, checked = list(read), dict[str, Path]()
        for field, path in paths.items():
            if path is None:
                continue
            target = absolute_path(field, path)
            for other, earlier in checked.items():
                if overlap(target, earlier):
                    raise RequestError(field, f"{path} is the file of {other} as well; name two")
            _check(field, target, read, overwrite)
            checked[field] = target

    def write(self, path: Path, text: str) -> None:
        """Write `text`; a fault is remembered in `unwritten`."""
        try:
            write_whole(path, text, self._overwrite)
        except OSError as error:
            self.unwritten.append({"path": str(path), "why": why(error)})


def write_whole(path: Path, text: str, overwrite: bool = False) -> None:
    """A file of UTF-8 text, whole or not at all. Raises OSError, without `overwrite` for a file that exists as well."""
    with unfinished(path.absolute()) as temporary:
        # bytes of a name that are no UTF-8 are lone surrogates
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        (replace if overwrite else give_name)(temporary, path.absolute())


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """`result` as JSON can hold it: a number that is not finite is None, and `not_finite` names where each stood."""
    lost: list[str] = []

    def clean(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{place}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(place)
            return None
        return value

    made: dict[str, Any] = clean(result, "")
    return made | {"not_finite": lost} if lost else made


def not_finite_line(result: Mapping[str, Any], most: int = 10) -> list[str]:
    """The line for people about what `plain` has left out, if it has."""
    lost = result.get("not_finite", [])
    more = f" and {len(lost) - most} more" if len(lost) > most else ""
    return [f"not finite, null in JSON: {', '.join(lost[:most])}{more}"] if lost else []


def json_text(result: Mapping[str, Any]) -> str:
    """The result as the text of a JSON file."""
    return json.dumps(plain(result), indent=2, allow_nan=False) + "\n"


def _check(field: str, target: Path, read: Iterable[Path], overwrite: bool) -> None:
    try:
        for path in read:
            for taken in (path, sidecar_path(path)):
                if overlap(taken, target):
                    what = "is read" if taken is path else f"stands beside {path}"
                    raise RequestError(field, f"{target} would take the place of {taken}, which {what}; name another")
        check_kind(field, target)
        if is_taken(target) and not overwrite:
            raise RequestError(field, f"{target} exists; name another, or replace it by {OVERWRITE}")
        write_probe(target)
    except OSError as error:
        raise RequestError(field, f"{target} cannot be written ({why(error)}); name another") from None
