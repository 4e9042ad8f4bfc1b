"""`twinreel quantize`: a checkpoint whose trunk is in e4m3, as `precision fp8` would make it when loading, bit for bit.

The DiTs are written anew in the original layout, one tensor in memory at a time. What is shared is copied, its tensors
linked where the file system can; a diffusers root gets its DiTs alone, because its other parts are of the other layout.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from glob import escape
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError, RequestError
from ..precision import Fp8, check_weights
from ..spec import Partition, Spec
from ..unfinished import give_name, unfinished
from .config import FP8, dit_config, read_spec
from .files import BYTES, DTYPES, opened, read_json, reading, there
from .keymap import COMPONENTS, SCALE, Stored, stored_tensors, total_bytes
from .locate import Checkpoint, locate
from .recognise import ORIGINAL, Component
from .stream import ROPE, narrow, parameters_of, rope_frequencies
from .tensors import open_component
from .tokenizer import load_tokenizer

SHARD_BYTES = 5 << 30
STEM = "model"
CODES = {name: code for code, name in DTYPES.items()}
Tell = Callable[[str], None]


def quantize(source: str | os.PathLike[str], target: str | os.PathLike[str], blocks: int, tell: Tell) -> dict[str, Any]:
    """Write `source` as `target`, a new folder, all but the first and last `blocks` blocks of each DiT in e4m3.

    `tell` hears of each file begun. Returns facts for printing. Raises RequestError for a target that cannot be written,
    ConfigError for a number of blocks that leaves none, CheckpointError for weights that cannot be read or are quantized
    already, and for DiTs that hold values that are not finite. A target is there whole or not at all, made by one run: each
    writes beside it, in a folder of its own that ends in `.part` and stays only where a run is killed.
    """
    checkpoint = locate(source)
    spec = read_spec(checkpoint)
    if spec.dit.fp8_edge is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is quantized already, but for {spec.dit.fp8_edge} blocks at either end; run it as it is "
            f"with --precision fp8:blocks={spec.dit.fp8_edge}, or name the weights that it was made from"
        )
    check_weights(str(Fp8(blocks)), spec.dit)
    narrow_spec = replace(spec, dit=replace(spec.dit, fp8_edge=blocks))
    made = Path(target).absolute()
    size = len(checkpoint.dits) * total_bytes(stored_tensors("transformer", ORIGINAL, narrow_spec))
    _check_target(made, size)
    _check_source(checkpoint, spec)
    rest = _rest(checkpoint)
    try:
        with unfinished(made) as partial:
            folders = [_write_dit(checkpoint, name, spec, narrow_spec, partial, tell) for name in checkpoint.dits]
            linked = sum(_share(path, partial / name) for name, path in rest.items())
            give_name(partial, made)
    except FileExistsError:
        raise RequestError("target", f"{made} was made by another run meanwhile; name a new folder") from None
    except OSError as error:
        raise RequestError("target", f"{made} cannot be written: {error.strerror or error}") from error
    dits = [str(made / folder) for folder in folders]
    use = ["twinreel", "generate", "--model", str(made if rest else checkpoint.path)]
    for dit, folder in () if rest else zip(checkpoint.dits.values(), dits, strict=True):
        use += ["--component", f"{dit.folder.name}={folder}"]  # a diffusers root has them by slot
    use += ["--precision", f"fp8:blocks={blocks}"]
    shared = f"{len(rest)} files, {linked} of them linked, the others copied"
    shared = shared if rest else "left where it is: the source is a diffusers root"
    return {"path": str(made), "transformers": dits, "bytes": size, "shared": shared, "use": shlex.join(use)}


def _check_source(checkpoint: Checkpoint, spec: Spec) -> None:
    """Every part must be whole before one is written: headers against the config, the tokenizer. Raises CheckpointError."""
    for component in (*checkpoint.dits.values(), *checkpoint.components.values()):
        if component.kind in COMPONENTS:
            open_component(component, spec)
    load_tokenizer(checkpoint.folders["tokenizer"], spec.text)


def _check_target(made: Path, size: int) -> None:
    if os.path.lexists(made):  # also a link that leads nowhere
        raise RequestError("target", f"{made} exists; name a new folder")
    if not made.parent.is_dir():
        raise RequestError("target", f"{made.parent} is no folder; make it first")
    free = shutil.disk_usage(made.parent).free
    if free < size:
        left = [path.name for path in made.parent.glob(f".{escape(made.name)}.*.part")]
        told = f"; {', '.join(left)} may be left of a run that was killed: remove it" if left else ""
        raise RequestError(
            "target", f"{size / 2**30:.1f} GiB are needed, {made.parent} has {free / 2**30:.1f} GiB free{told}"
        )


def _write_dit(checkpoint: Checkpoint, name: str, spec: Spec, narrow_spec: Spec, root: Path, tell: Tell) -> Path:
    """One DiT under `root`, its config and its partition's index; where, relative to `root`."""
    component = checkpoint.dits[name]
    partition = next(each for each in checkpoint.partitions if each.name == name)
    if component.layout == ORIGINAL:
        folder = component.folder.absolute().relative_to(checkpoint.path.absolute())
        config = read_json(component.config)
    else:
        folder = Path(name) / "transformer"
        config = dit_config(spec.dit, ORIGINAL)
        _write_json(root / name / "model_index.json", _index(partition))
    assert narrow_spec.dit.fp8_edge is not None
    _write_json(
        root / folder / "config.json", config | {FP8: {"schema_version": 1, "blocks": narrow_spec.dit.fp8_edge}}
    )
    rows = stored_tensors("transformer", ORIGINAL, narrow_spec)
    with ExitStack() as stack:
        places = _open_shards(root / folder, rows, stack, tell)
        for stored, tensor in _tensors(component, spec, rows):
            places[stored].write(tensor)
    return folder


def _tensors(component: Component, spec: Spec, rows: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `rows` once, in any order."""
    files, expected = open_component(component, spec)
    for name, whole in parameters_of(files, expected):
        if not whole.isfinite().all():
            raise CheckpointError(f"{component.weights}: {name}: holds values that are not finite; download it again")
        yield from (narrow(name, whole) if name + SCALE in rows else {name: whole}).items()
    if all(row.name != ROPE for row in expected.values()):
        yield ROPE, rope_frequencies(spec.dit)


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: an open file and the offset in it."""

    row: Stored
    file: BinaryIO
    offset: int

    def write(self, tensor: Tensor) -> None:
        """The tensor's bytes."""
        assert tuple(tensor.shape) == self.row.shape and str(tensor.dtype) == f"torch.{self.row.dtype}", self.row.name
        raw: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self.file.seek(self.offset)
        self.file.write(memoryview(raw))


def _open_shards(folder: Path, rows: Mapping[str, Stored], stack: ExitStack, tell: Tell) -> dict[str, _Place]:
    """Shards of about `SHARD_BYTES` with their headers written, and their index; the place of each tensor."""
    shards: list[list[Stored]] = [[]]
    room = SHARD_BYTES
    for row in rows.values():
        size = prod(row.shape) * BYTES[row.dtype]
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(row)
        room -= size
    places: dict[str, _Place] = {}
    for number, shard in enumerate(shards, 1):
        tail = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        path = folder / f"{STEM}{tail}.safetensors"
        tell(str(path))
        file = stack.enter_context(path.open("wb"))
        places |= _begin(file, shard)
    if len(shards) > 1:
        weight_map = {name: Path(place.file.name).name for name, place in places.items()}
        index = {"metadata": {"total_size": total_bytes(rows)}, "weight_map": weight_map}
        _write_json(folder / f"{STEM}.safetensors.index.json", index)
    return places


def _begin(file: BinaryIO, rows: list[Stored]) -> dict[str, _Place]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, begins = 0, dict[str, int]()
    # wide dtypes first, so that each tensor is aligned to its own
    for row in sorted(rows, key=lambda row: -BYTES[row.dtype]):
        begins[row.name], size = position, prod(row.shape) * BYTES[row.dtype]
        offsets = [position, position + size]
        header[row.name] = {"dtype": CODES[row.dtype], "shape": list(row.shape), "data_offsets": offsets}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    start = 8 + len(text)
    return {row.name: _Place(row, file, start + begins[row.name]) for row in rows}


def _rest(checkpoint: Checkpoint) -> dict[Path, Path]:
    """Every file but the DiTs' by its name in the checkpoint; none of a diffusers root, whose parts are left where they
    are."""
    if any(dit.layout != ORIGINAL for dit in checkpoint.dits.values()):
        return {}
    files = {path for path in checkpoint.indexes}
    for component in checkpoint.components.values():
        with reading(component.folder):
            files |= set(_files(component.folder))
    return {path.absolute().relative_to(checkpoint.path.absolute()): path for path in sorted(files)}


def _files(folder: Path) -> Iterator[Path]:
    """Every file under `folder`, also behind links. CheckpointError for what is neither file nor folder."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        elif there(path):
            yield path


def _share(path: Path, copy: Path) -> bool:
    """Tensors are linked where the file system can: they are large, and nobody edits them. Whether it was linked."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        try:
            os.link(path.resolve(), copy)
            return True
        except OSError:
            pass  # another file system, or one without links
    with opened(path) as source, copy.open("wb") as file:
        shutil.copyfileobj(source, file)
    return False


def _index(partition: Partition) -> dict[str, Any]:
    return {"_minimax_h3": {"schema_version": 1, "partition": partition.name, "tasks": list(partition.tasks)}}


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
