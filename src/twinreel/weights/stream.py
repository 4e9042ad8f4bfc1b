"""Stored tensors into modules: shard by shard, tensor by tensor, strict both ways (SPEC 1, 13.9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..ops.e4m3 import E4M3
from ..ops.reference import quantize_rows
from ..spec import DiTSpec, Spec
from .files import BYTES, Entry, WeightFiles, opened, reading
from .keymap import MODULES, NARROW_ROWS, SCALE, SLOT, SWAPPED, WHOLE, Stored, stored_tensors
from .locate import Checkpoint
from .tensors import open_component

READ_BYTES = 64 << 20
Prefixes = str | tuple[str, ...]  # of parameter names
ROPE = "rope.inv_freq"  # the original layout stores it, the diffusers layout does not


def load_into(
    module: nn.Module, checkpoint: Checkpoint, spec: Spec, part: str, device: torch.device | str = "cpu",
    *, apart: Prefixes = (),
) -> nn.Module:  # fmt: skip
    """Fill a module built on the meta device with its stored tensors, and return it frozen and in eval mode.

    `part` names the module ("text_encoder", "video_encoder", "video_decoder", "audio_encoder", "audio_decoder", "dit",
    "modulation"; the last two as "dit:ref2va" where several partitions are loaded). Each parameter is made on `device`
    in the dtype it was built with, in memory of its own; one built in e4m3 is quantized as it arrives, unless the files
    hold it so. An owner with `shard(whole)` gets its share of the whole tensor. The host holds one stored tensor at a
    time besides what stays there. Afterwards the module's `init_buffers(device)` and `freeze()` are called if it has
    them. Parameters whose names begin with `apart` are checked and left alone: they have their memory already.

    Raises CheckpointError when the component's files do not hold exactly the tensors that the sizes ask for: absent,
    left-over, of another shape or dtype (the first ten and the count), or when a file is damaged.
    """
    name, _, partition = part.partition(":")
    component = checkpoint.component(name, partition or None)
    files, expected = open_component(component, spec)
    rows = {stored: row for stored, row in expected.items() if row.module == name}
    slots = _slots(module, rows.values())
    assembly = _Assembly(torch.device(device))
    wanted = [name for name, row in rows.items() if not row.parameter.startswith(apart)]
    for stored, tensor in read_tensors(files, wanted):
        owner, leaf, target_dtype = slots[rows[stored].parameter]
        whole = assembly.add(rows[stored], tensor, target_dtype)
        if whole is not None:
            parameters = narrow(leaf, whole) if _narrows(owner, leaf, target_dtype) else {leaf: whole}
            while parameters:
                leaf, whole = parameters.popitem()
                assign(owner, leaf, share_of(owner, leaf, whole))
        del tensor, whole  # the next one is allocated before these names are bound again
    assert not assembly.open, f"incomplete: {list(assembly.open)[:10]}"
    finish(module, device)
    return module


def stream_part(
    checkpoint: Checkpoint, spec: Spec, part: str, prefix: str, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a part whose names begin with `prefix`, whole, one after the other, without a module.

    They come in the order they lie in the files, on `device`, in `dtype` (float32 islands stay float32). Nothing of
    them is kept here. Raises CheckpointError as `load_into` does.
    """
    name, _, partition = part.partition(":")
    files, expected = open_component(checkpoint.component(name, partition or None), spec)
    rows = {stored: row for stored, row in expected.items() if row.module == name and row.parameter.startswith(prefix)}
    assembly = _Assembly(torch.device(device))
    for stored, tensor in read_tensors(files, rows):
        whole = assembly.add(rows[stored], tensor, torch.float32 if rows[stored].island else dtype)
        if whole is not None:
            yield rows[stored].parameter, whole
        del tensor, whole
    assert not assembly.open, f"incomplete: {list(assembly.open)[:10]}"


def parameters_of(files: WeightFiles, rows: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of `rows` whole, in its stored dtype on the CPU, by the name that the original layout has for it;
    tensors that no module owns keep their own."""
    assembly = _Assembly(torch.device("cpu"))
    for stored, tensor in read_tensors(files, rows):
        whole = assembly.add(rows[stored], tensor, tensor.dtype)
        if whole is not None:
            yield rows[stored].parameter or stored, whole
        del tensor, whole


def rope_frequencies(spec: DiTSpec) -> Tensor:
    """What the original layout stores as `ROPE`, fp32 [rope_freqs]. The DiT computes its own (SPEC 2.4)."""
    exponent = torch.arange(0, 2 * spec.rope_freqs, 2, dtype=torch.float32) / (2 * spec.rope_freqs)
    return 1.0 / spec.rope_theta**exponent


def stored_bytes(spec: Spec, part: str) -> int:
    """Bytes that a part's tensors take as they are stored (both layouts alike)."""
    name = part.partition(":")[0]
    rows = stored_tensors(MODULES[name], "original", spec).values()
    return sum(prod(row.shape) * BYTES[row.dtype] for row in rows if row.module == name)


def read_tensors(files: WeightFiles, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors as (name, CPU tensor in the stored dtype), in the order they lie in the shards.

    Each shard is opened once and read forwards. Every tensor is freshly allocated by torch and owned by the caller:
    never a view of a mapped file, whose alignment would change the last bits of products on a CPU (SPEC 13.9).
    """
    wanted: dict[Path, list[tuple[str, Entry]]] = {shard: [] for shard in files.shards}
    for name in names:
        wanted[files.entries[name].file].append((name, files.entries[name]))
    for shard, entries in wanted.items():
        if entries:
            yield from _read_shard(shard, sorted(entries, key=lambda item: item[1].offset))


def _read_shard(shard: Path, entries: Sequence[tuple[str, Entry]]) -> Iterator[tuple[str, Tensor]]:
    with reading(shard), opened(shard, buffering=0) as file:  # its bytes go straight into the tensors
        for name, entry in entries:
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            file.seek(entry.offset)
            _fill(tensor, file, name)
            yield name, tensor
            del tensor  # or this frame would hold it while the next one is allocated


def _fill(tensor: Tensor, file: Any, name: str) -> None:
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    target = memoryview(raw)
    while target:
        count = file.readinto(target[:READ_BYTES])
        if not count:
            raise CheckpointError(f"{file.name}: ends inside {name}; the file changed while it was read")
        target = target[count:]


def narrow(leaf: str, whole: Tensor) -> dict[str, Tensor]:
    """A whole weight as e4m3 with a scale for each row beside it, by name: the same bits on every device."""
    rows = [quantize_rows(part) for part in whole.split(NARROW_ROWS)]
    values = torch.cat([row.values.view(torch.uint8) for row in rows]).view(E4M3)
    return {leaf: values, leaf + SCALE: torch.cat([row.scale for row in rows])}


def _narrows(owner: nn.Module, leaf: str, stored: torch.dtype) -> bool:
    return getattr(owner, leaf).dtype == E4M3 != stored


Place = tuple[nn.Module, str, torch.dtype]


def _slots(module: nn.Module, rows: Iterable[Stored]) -> dict[str, Place]:
    """Parameter name -> owner, leaf and dtype. Our own modules and key map must agree, hence assertions."""
    state = module.state_dict(keep_vars=True)
    targets = {row.parameter: row for row in rows}
    made = {name + SCALE for name in targets.keys() & state.keys() if state[name].dtype == E4M3} - targets.keys()
    left = state.keys() ^ targets.keys() ^ made
    assert not left, f"key map and module differ: {sorted(left)[:10]}"
    slots = {}
    for name, row in targets.items():
        path, _, leaf = name.rpartition(".")
        owner, parameter = module.get_submodule(path), state[name]
        shape = share_of(owner, leaf, torch.empty(row.target_shape, device="meta")).shape
        assert parameter.shape == shape, f"{name}: module has {list(parameter.shape)}, key map {list(shape)}"
        assert not row.island or parameter.dtype == torch.float32, f"{name}: an fp32 island built as {parameter.dtype}"
        slots[name] = owner, leaf, getattr(torch, row.dtype) if name + SCALE in made else parameter.dtype
    return slots


class _Assembly:
    """Whole parameters being put together on the device; a parameter stored in pieces is complete after the last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.open: dict[str, tuple[Tensor, int]] = {}

    def add(self, row: Stored, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Take one stored tensor; the whole parameter once it is complete, else None."""
        if row.placement == WHOLE:
            return tensor.to(self.device, dtype)
        if row.parameter not in self.open:
            self.open[row.parameter] = torch.empty(row.target_shape, device=self.device, dtype=dtype), 0
        whole, count = self.open.pop(row.parameter)
        place(row, tensor, whole)
        if row.placement == SWAPPED or count + 1 == len(SLOT):
            return whole
        self.open[row.parameter] = whole, count + 1
        return None


def place(row: Stored, tensor: Tensor, whole: Tensor) -> None:
    """Write a stored `tensor` to where it belongs in the `whole` parameter, in the parameter's dtype."""
    if row.placement == WHOLE:
        whole.copy_(tensor)
    elif row.placement == SWAPPED:
        half = row.shape[0] // 2
        whole[:half].copy_(tensor[half:])
        whole[half:].copy_(tensor[:half])
    else:
        head = row.shape[0] // row.heads
        whole.unflatten(0, (row.heads, 3, head))[:, SLOT[row.placement]].copy_(tensor.unflatten(0, (row.heads, head)))


def cut(row: Stored, whole: Tensor) -> Tensor:
    """What a stored tensor holds of the `whole` parameter: the other way of `place`."""
    if row.placement == WHOLE:
        return whole
    if row.placement == SWAPPED:
        return torch.cat(whole.chunk(2)[::-1])
    head = row.shape[0] // row.heads
    return whole.unflatten(0, (row.heads, 3, head))[:, SLOT[row.placement]].flatten(0, 1)


def share_of(owner: nn.Module, leaf: str, whole: Tensor) -> Tensor:
    """An owner's share of a whole tensor; the whole tensor itself, not a copy, where nothing is cut."""
    shard = getattr(owner, "shard", None)
    if shard is None or leaf not in getattr(owner, "sharded", ("weight",)):
        return whole
    share = shard(whole)
    return whole if share.shape == whole.shape else share.clone(memory_format=torch.contiguous_format)


def assign(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Give a parameter or a buffer of `owner` another tensor, in place of whatever it has."""
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def finish(module: nn.Module, device: torch.device | str) -> None:
    """Make a module whose tensors have arrived ready: its hooks, frozen, in eval mode, nothing left on the meta device."""
    for hook, arguments in (("init_buffers", (device,)), ("freeze", ())):
        if hasattr(module, hook):
            getattr(module, hook)(*arguments)
    module.requires_grad_(False).eval()
    left = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    assert not left, f"still on the meta device: {left[:10]}"
