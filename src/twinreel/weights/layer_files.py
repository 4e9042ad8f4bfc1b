"""The layers of a part straight from its files, mapped into memory: read as often as one likes, held by nobody."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..ops.e4m3 import E4M3
from ..spec import Spec
from .files import Entry, opened
from .keymap import LAYERS, SCALE, Stored
from .locate import Checkpoint
from .stream import narrow, place
from .tensors import open_component


class LayerFiles:
    """The stored tensors of a part's layers (`keymap.LAYERS`) by layer. Raises CheckpointError as `load_into` does."""

    def __init__(self, checkpoint: Checkpoint, spec: Spec, part: str) -> None:
        name, _, partition = part.partition(":")
        files, expected = open_component(checkpoint.component(name, partition or None), spec)
        self._layers: dict[int, list[tuple[str, Stored, Entry]]] = {}
        for stored, row in expected.items():
            if row.module == name and row.parameter.startswith(LAYERS[name]):
                number, _, leaf = row.parameter.removeprefix(LAYERS[name]).partition(".")
                self._layers.setdefault(int(number), []).append((leaf, row, files.entries[stored]))
        shards = {entry.file for rows in self._layers.values() for _, _, entry in rows}
        self._maps: Mapping[Path, Any] = {shard: _mapped(shard) for shard in shards}

    def read(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write layer `index` into `tensors`: by name in the layer, CPU, in the dtypes that they are to have."""
        rows = self._layers[index]
        names = {leaf for leaf, _, _ in rows}
        made = {leaf + SCALE for leaf in names if tensors[leaf].dtype == E4M3} - names
        assert names | made == tensors.keys(), f"layer {index}: key map and module differ"
        for leaf, row, entry in rows:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            count = entry.size // dtype.itemsize
            stored = torch.frombuffer(self._maps[entry.file], dtype=dtype, count=count, offset=entry.offset)
            # copied, never computed with: a mapped tensor has the file's alignment, which decides bits (SPEC 13.9)
            if leaf + SCALE in made:
                for name, part in narrow(leaf, stored.view(entry.shape).clone()).items():
                    place(row, part, tensors[name])
            else:
                place(row, stored.view(entry.shape), tensors[leaf])


def _mapped(shard: Path) -> Any:
    try:
        with opened(shard) as file:
            # private and writable, because torch warns of memory that it could not write to; nobody does
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shard}: cannot be mapped into memory ({error})") from error
