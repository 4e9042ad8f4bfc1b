"""The safetensors files of one component: index and headers, read and checked without touching a weight.

The format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range), then the bytes. It is
read here by hand, because a plain read into freshly allocated memory keeps the host peak at one tensor and gives every
tensor the allocator's alignment; a mapped file gives neither (SPEC 13.9).
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO

from ..errors import CheckpointError
from ..small_files import each_once

DTYPES = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64", "I32": "int32",
    "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "float8_e4m3fn": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the limit of the safetensors format
MAX_NAME = 255  # of a file, in bytes
_brief = Repr()
_brief.maxlist, _brief.maxtuple, _brief.maxstring, _brief.maxother = 12, 12, 60, 60


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: file, absolute byte offset and byte length, with its dtype and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class WeightFiles:
    """Every tensor of a component by name, its shards in name order, and the byte total its index declares, if any."""

    folder: Path
    entries: Mapping[str, Entry]
    shards: tuple[Path, ...]
    declared_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries.values())


def first_ten(problems: Iterable[str]) -> str:
    """The first ten lines and the count, as every strict check reports them."""
    lines = list(problems)
    shown = "".join(f"\n  {line}" for line in lines[:10])
    rest = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
    return f"{len(lines)} problem{'' if len(lines) == 1 else 's'}:{shown}{rest}"


def shown(value: object) -> str:
    """A refused value as text of bounded length and depth."""
    return _brief.repr(value)


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Around whatever reads a checkpoint: what a file system or a damaged text may do there becomes CheckpointError."""
    try:
        yield
    except OSError as error:
        name, reason = str(error.filename or where), error.strerror or str(error)
        raise CheckpointError(f"{name[:MAX_NAME]}: cannot be read ({reason}); check its name and its rights") from error
    except UnicodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8 text ({error}); download it again") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deeply to be read; download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; CheckpointError naming the file when it is absent, unreadable or no object."""
    try:
        with reading(path):
            data = json.loads(read_text(path), object_pairs_hook=each_once)
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, a JSON object is needed")
    return data


def there(path: Path) -> bool:
    """Whether there is a file. CheckpointError for a pipe (which would keep us waiting for ever), a folder, a link that
    leads nowhere: what has the name and is no file is damage, not absence."""
    with reading(path):
        try:
            plain = stat.S_ISREG(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                return False
            raise CheckpointError(f"{path}: is a link that leads nowhere; put the file of the release there") from None
        if not plain:
            raise CheckpointError(f"{path}: is no regular file; put the file of the release in its place")
    return True


@contextmanager
def opened(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """A file of a checkpoint, to be read: the one way to open one. CheckpointError where it cannot be."""
    with reading(path):
        there(path)
        file = open(path, "rb", buffering)
    with file:
        yield file


def read_bytes(path: Path) -> bytes:
    """A whole file. Raises CheckpointError."""
    with reading(path), opened(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """A whole file of UTF-8, its lines ended by line feeds. Raises CheckpointError."""
    with reading(path):
        return io.StringIO(read_bytes(path).decode("utf-8"), newline=None).getvalue()


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises CheckpointError when the file is cut short or damaged."""
    try:
        with reading(path), opened(path) as file:
            actual = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if actual < 8 or 8 + length > actual or length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: truncated or damaged: {actual} bytes, a header of {length} announced; download it again"
                )
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=each_once)
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is no JSON ({error}); download the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is no JSON object; download the file again")
    header.pop("__metadata__", None)
    _check_names(path, header)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_extent(path, entries, 8 + length, actual)
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> Entry:
    facts: dict[str, Any] = value if isinstance(value, dict) else {}
    kind, shape, offsets = (facts.get(key, 0) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(kind, str) and kind.isprintable() and _counts(shape) and _counts(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{path}: damaged header entry for {name} ({shown(value)}); download it again")
    dtype, (begin, end) = DTYPES.get(kind, kind), offsets
    if dtype in BYTES and end - begin != math.prod(shape) * BYTES[dtype]:
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, {dtype} {shown(shape)} needs another number")
    return Entry(path, dtype, tuple(shape), start + begin, end - begin)


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse names that no model has and a terminal would obey, so that no later message holds one."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME:
            raise CheckpointError(f"{path}: {shown(name)} is no name of a tensor; download the file again")


def _counts(value: Any) -> bool:
    """Whether it is a list of whole numbers from 0."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extent(path: Path, entries: Mapping[str, Entry], start: int, actual: int) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != position:
            raise CheckpointError(f"{path}: {name} starts at byte {entry.offset}, expected {position}; damaged header")
        position += entry.size
    if position != actual:
        state = "truncated" if actual < position else "too long"
        raise CheckpointError(f"{path}: {state}: {actual} bytes, the header needs {position}; download the file again")


def ending(folder: Path, suffix: str) -> list[Path]:
    """A folder's files of that ending in name order, none where there is no folder. Unlike a glob it does not take a
    folder that may not be read for an empty one."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix)) if folder.is_dir() else []


def index_file(folder: Path) -> Path | None:
    """The one `*.safetensors.index.json` of a folder, or None."""
    found = ending(folder, ".safetensors.index.json")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: two weight indexes ({names}): two layouts mixed in one folder; keep one")
    return found[0] if found else None


def has_weights(folder: Path) -> bool:
    """Whether a folder holds any safetensors file."""
    return bool(ending(folder, ".safetensors"))


def tensor_names(folder: Path) -> tuple[str, ...]:
    """The tensor names of a component from its index (or its single file), () when there are no weights at all."""
    index = index_file(folder)
    if index is not None:
        return tuple(_read_index(index)[0])
    files = ending(folder, ".safetensors")
    return tuple(read_header(_only(folder, files))) if files else ()


def open_weights(folder: Path) -> WeightFiles:
    """Index and all shard headers of a component's weight folder, checked against each other.

    Raises CheckpointError (SPEC 1.1) when weights are absent, a shard of the index is absent, a file is cut short or
    damaged, a tensor lies in two shards, or index and headers disagree; the message names the files.
    """
    with reading(folder):
        return _open(folder)


def _open(folder: Path) -> WeightFiles:
    files = ending(folder, ".safetensors")
    index = index_file(folder)
    if index is None:
        file = _only(folder, files)
        return WeightFiles(folder, read_header(file), (file,), None)
    weight_map, declared = _read_index(index)
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    absent = [shard.name for shard in shards if not there(shard)]
    if absent:
        raise CheckpointError(f"{index}: {len(absent)} of {len(shards)} shards are absent: {', '.join(absent[:10])}")
    unlisted = [file.name for file in files if file not in shards]
    if unlisted:
        raise CheckpointError(
            f"{index}: {', '.join(unlisted[:10])} lies beside it and is not in the index; move it away"
        )
    entries = _merge(index, weight_map, shards)
    return WeightFiles(folder, entries, shards, declared)


def _only(folder: Path, files: list[Path]) -> Path:
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder}: {len(files)} safetensors files and no index (*.safetensors.index.json)")
    others = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    raise CheckpointError(f"{folder}: no weights: *.safetensors is needed, found {', '.join(others[:10]) or 'nothing'}")


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """The index's map from tensor to shard, and the byte total that it declares, if any."""
    data = read_json(index)
    weight_map, metadata = data.get("weight_map"), data.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    _check_names(index, weight_map)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _names_shard(shard):
            raise CheckpointError(f"{index}: {shown(name)}: shard {shown(shard)} is no plain *.safetensors file name")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{index}: metadata: an object is needed, got {shown(metadata)}")
    total = metadata.get("total_size")
    # some writers make it a float
    if total is None or (type(total) in (int, float) and 0 <= total < 2**63 and total == int(total)):
        return weight_map, None if total is None else int(total)
    raise CheckpointError(f"{index}: metadata.total_size: a number of bytes is needed, got {shown(total)}")


def _names_shard(name: str) -> bool:
    plain = name.isprintable() and Path(name).name == name and len(name.encode()) <= MAX_NAME
    return plain and name.endswith(".safetensors")


def _merge(index: Path, weight_map: Mapping[str, str], shards: tuple[Path, ...]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    problems = []
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in entries:
                problems.append(f"{name} lies in two shards, {entries[name].file.name} and {shard.name}")
            elif weight_map.get(name) != shard.name:
                problems.append(f"{name} lies in {shard.name}, the index says {weight_map.get(name, 'nothing of it')}")
            entries[name] = entry
    problems += [f"{name} is not in {shard}" for name, shard in weight_map.items() if name not in entries]
    if problems:
        raise CheckpointError(f"{index}: index and shards disagree, {first_ten(problems)}")
    return entries
