"""The safetensors files of one component: index and headers, read and checked without touching a weight.

The format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range), then the bytes. It is
read here by hand, because a plain read into freshly allocated memory keeps the host peak at one tensor and gives every
tensor the allocator's alignment; a mapped file gives neither (SPEC 13.9).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64", "I32": "int32"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
MAX_HEADER = 100_000_000  # the limit of the safetensors format


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; CheckpointError naming the file when it is absent, unreadable or no object."""
    try:
        if path.exists() and not path.is_file():  # a pipe would keep us waiting for ever
            raise CheckpointError(f"{path}: is no regular file; download it again")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, a JSON object is needed")
    return data


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises CheckpointError when the file is cut short or damaged."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is no regular file; download it again")
        actual = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if actual < 8 or 8 + length > actual or length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: truncated or damaged: {actual} bytes, a header of {length} announced; download it again"
                )
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is no JSON ({error}); download the file again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is no JSON object; download the file again")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_extent(path, entries, 8 + length, actual)
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> Entry:
    try:
        dtype = DTYPES.get(value["dtype"], str(value["dtype"]))
        shape = tuple(int(size) for size in value["shape"])
        begin, end = (int(offset) for offset in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged header entry for {name} ({error!r}); download it again") from error
    if dtype in BYTES and end - begin != math.prod(shape) * BYTES[dtype]:
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, {dtype} {list(shape)} needs another number")
    return Entry(path, dtype, shape, start + begin, end - begin)


def _check_extent(path: Path, entries: Mapping[str, Entry], start: int, actual: int) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != position:
            raise CheckpointError(f"{path}: {name} starts at byte {entry.offset}, expected {position}; damaged header")
        position += entry.size
    if position != actual:
        state = "truncated" if actual < position else "too long"
        raise CheckpointError(f"{path}: {state}: {actual} bytes, the header needs {position}; download the file again")


def index_file(folder: Path) -> Path | None:
    """The one `*.safetensors.index.json` of a folder, or None."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: two weight indexes ({names}): two layouts mixed in one folder; keep one")
    return found[0] if found else None


def has_weights(folder: Path) -> bool:
    """Whether a folder holds any safetensors file."""
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def tensor_names(folder: Path) -> tuple[str, ...]:
    """The tensor names of a component from its index (or its single file), () when there are no weights at all."""
    index = index_file(folder)
    if index is not None:
        return tuple(_weight_map(index))
    files = sorted(folder.glob("*.safetensors"))
    return tuple(read_header(_only(folder, files))) if files else ()


def open_weights(folder: Path) -> WeightFiles:
    """Index and all shard headers of a component's weight folder, checked against each other.

    Raises CheckpointError (SPEC 1.1) when weights are absent, a shard of the index is absent, a file is cut short or
    damaged, a tensor lies in two shards, or index and headers disagree; the message names the files.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = index_file(folder)
    if index is None:
        file = _only(folder, files)
        return WeightFiles(folder, read_header(file), (file,), None)
    weight_map = _weight_map(index)
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise CheckpointError(f"{index}: {len(absent)} of {len(shards)} shards are absent: {', '.join(absent[:10])}")
    unlisted = [file.name for file in files if file not in shards]
    if unlisted:
        raise CheckpointError(
            f"{index}: {', '.join(unlisted[:10])} lies beside it and is not in the index; move it away"
        )
    entries = _merge(index, weight_map, shards)
    declared = read_json(index).get("metadata", {}).get("total_size")
    return WeightFiles(folder, entries, shards, int(declared) if declared is not None else None)


def _only(folder: Path, files: list[Path]) -> Path:
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder}: {len(files)} safetensors files and no index (*.safetensors.index.json)")
    others = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    raise CheckpointError(f"{folder}: no weights: *.safetensors is needed, found {', '.join(others[:10]) or 'nothing'}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {name}: shard {shard!r} is no plain file name")
    return weight_map


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
