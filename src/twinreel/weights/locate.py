"""Where the parts of a checkpoint lie: a released layout, one partition alone, or component folders (SPEC 1.1)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..spec import Partition
from .fields import Fields
from .files import ending, has_weights, index_file, read_bytes, reading, shown, there
from .keymap import MODULES
from .recognise import (
    BOTH,
    DIFFUSERS,
    ORIGINAL,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    Component,
    listing,
    no_folder,
    recognise,
    small_files,
)

SLOTS = {"transformer": Partition("fl2va", ("t2va", "fl2va")), "transformer_ref": Partition("ref2va", ("ref2va",))}
KNOWN_TASKS = ("t2va", "fl2va", "ref2va")
ALIASES = {"visual_vae": "video_vae", "vae": "video_vae"}
SHARED = ("text_encoder", "tokenizer", "processor", "video_vae", "audio_vae")
OVERRIDES = (*SLOTS, *SHARED)
REQUIRED = ("text_encoder", "tokenizer", "video_vae", "audio_vae")
FOLDERS = {"video_vae": ("video_vae", "visual_vae", "vae")}
# A partition may keep tokenizer and processor files inside another folder of its own (SPEC 1.1).
MEMBERS = {"tokenizer": TOKENIZER_FILES, "processor": PROCESSOR_FILES}
# The small files of a component that a run reads, besides indexes.
READ = {
    *TOKENIZER_FILES, *PROCESSOR_FILES, "merges.txt", "tokenizer_config.json", "video_preprocessor_config.json",
    "config.json", "config.yaml", "metadata.json",
}  # fmt: skip
MEMBER_FOLDERS = {"tokenizer": ("tokenizer", "processor", "text_encoder"), "processor": ("processor", "text_encoder")}
SCHEDULERS = ("scheduler", "audio_scheduler")
NEED = (
    "needed: a folder with FL2VA/ and/or Ref2VA/, one such partition folder, a diffusers root "
    "(transformer/, transformer_ref/, text_encoder/, tokenizer/, vae/, audio_vae/), or component folders by name"
)
ELSE = "name another, or leave --model out for the bundled miniature"


@dataclass(frozen=True)
class Checkpoint:
    """What was found. `layout` is "original", "diffusers" or "mixed"; `notes` say what was chosen or left out.

    `dits` maps a partition's name to its DiT, `components` the shared parts by kind ("text_encoder", "tokenizer",
    "processor", which may be absent, "video_vae", "audio_vae"); `indexes` are the model_index files that declare tasks
    and world values.
    """

    path: Path
    layout: str
    partitions: tuple[Partition, ...]
    dits: Mapping[str, Component]
    components: Mapping[str, Component]
    indexes: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of the shared parts by kind; `folders["tokenizer"]` is where the tokenizer's files lie."""
        return {kind: component.folder for kind, component in self.components.items()}

    def component(self, part: str, partition: str | None = None) -> Component:
        """The component of a module ("dit", "video_decoder", ...) or of a kind ("tokenizer", ...).

        `partition` picks the DiT; it may be left out when there is one.
        """
        kind = MODULES.get(part, part)
        if kind != "transformer":
            if kind not in self.components:
                raise CheckpointError(f"{self.path}: no {kind}; found {', '.join(self.components)}")
            return self.components[kind]
        if partition is None and len(self.dits) == 1:
            return next(iter(self.dits.values()))
        if partition is None or partition not in self.dits:
            raise CheckpointError(f"{self.path}: no partition {partition!r}; loaded are {', '.join(self.dits)}")
        return self.dits[partition]


@dataclass
class _Found:
    """A checkpoint while it is being put together."""

    dits: dict[str, Component] = field(default_factory=dict)
    tasks: dict[str, Partition] = field(default_factory=dict)
    components: dict[str, Component] = field(default_factory=dict)
    indexes: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_shared(self, component: Component, folder: Path) -> None:
        """What `folder`, a partition or a diffusers root, holds of the shared parts."""
        kind = component.kind
        self.components[kind] = component
        if kind in MEMBERS and component.folder.name != kind:
            self.notes.append(f"{folder}: no {kind}/: its files are taken from {component.folder.name}/")

    def add_dit(self, declared: Partition, component: Component) -> None:
        if declared.name in self.dits:
            other = self.dits[declared.name].folder
            raise CheckpointError(f"{component.folder} and {other} both declare partition {declared.name!r}; name one")
        for task in declared.tasks:
            taken = next((name for name, other in self.tasks.items() if task in other.tasks), None)
            if taken is not None:
                raise CheckpointError(
                    f"{component.folder}: task {task!r} is declared by partition {taken!r} too; name one"
                )
        self.dits[declared.name], self.tasks[declared.name] = component, declared


def locate(
    path: str | os.PathLike[str] | None,
    components: Mapping[str, str | os.PathLike[str]] | None = None,
    weights: bool = True,
) -> Checkpoint:
    """Recognise a checkpoint from its files (SPEC 1.1).

    `path`: a folder with `FL2VA/`, `Ref2VA/`; one partition folder; or a diffusers root. When a root holds both layouts
    with weights the original partitions are taken and a note says so. `components` replaces parts by folder
    ("transformer", "transformer_ref", "text_encoder", "tokenizer", "processor", "video_vae" or "visual_vae",
    "audio_vae"), each in its own layout; with all of them given `path` may be None. `weights=False` accepts folders
    without safetensors (sizes only). Raises CheckpointError saying what was found and what is needed.
    """
    with reading(path):
        return _locate(path, _overrides(components or {}), weights)


def _locate(path: str | os.PathLike[str] | None, overrides: Mapping[str, Path], weights: bool) -> Checkpoint:
    found = _Found()
    if path is not None:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise CheckpointError(f"{no_folder(root)}; {NEED}; {ELSE}")
        _read_root(root, found, weights, overrides)
    elif overrides:
        root = Path(os.path.commonpath([folder.absolute() for folder in overrides.values()]))
    else:
        raise CheckpointError(f"no checkpoint path given; {NEED}")
    for key, folder in overrides.items():
        _override(key, folder, found)
    _complete(root, found, weights)
    layouts = {part.layout for part in (*found.dits.values(), *found.components.values())} - {BOTH}
    layout = layouts.pop() if len(layouts) == 1 else "mixed"
    return Checkpoint(
        root,
        layout,
        tuple(found.tasks.values()),
        found.dits,
        found.components,
        tuple(found.indexes),
        tuple(found.notes),
    )


def _overrides(components: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    result = {}
    for key, folder in components.items():
        name = ALIASES.get(key, key)
        if name not in OVERRIDES:
            raise CheckpointError(f"{key}: no such component; known are {', '.join((*OVERRIDES, *ALIASES))}")
        result[name] = Path(folder).expanduser()
    return result


def _read_root(root: Path, found: _Found, weights: bool, overrides: Mapping[str, Path]) -> None:
    if _declaration(root) is not None:
        partitions = [root]
    else:
        folders = sorted(child for child in root.iterdir() if child.is_dir())
        partitions = [child for child in folders if _declaration(child) is not None]
        for folder in folders if partitions else ():
            if folder not in partitions and _dit_weights(folder / "transformer", weights):
                raise CheckpointError(f"{folder}: has a transformer/ and no model_index.json that declares its tasks")
    usable = [folder for folder in partitions if _dit_weights(folder / "transformer", weights)]
    slots = [slot for slot in SLOTS if _dit_weights(root / slot, weights)] if root not in partitions else []
    if usable:
        if slots:
            found.notes.append(
                "both layouts are here with weights: the original partitions are used, the diffusers folders are not"
            )
        for folder in partitions:
            if folder in usable:
                _read_partition(folder, found, overrides)
            else:
                found.notes.append(f"{folder.name}: its transformer/ holds no weights; its tasks are not available")
    elif slots or any((root / name).is_dir() for name in (*SLOTS, "vae", "video_vae", "text_encoder")):
        _read_diffusers(root, slots, found, overrides)
    elif partitions and not set(SLOTS) & overrides.keys():
        names = ", ".join(str(folder / "transformer") for folder in partitions)
        raise CheckpointError(f"no *.safetensors in {names}; the download is incomplete")
    elif not overrides:
        raise CheckpointError(f"{root}: no checkpoint recognised: found {listing(root)}; {NEED}")


def _dit_weights(folder: Path, weights: bool) -> bool:
    return has_weights(folder) or index_file(folder) is not None or (not weights and there(folder / "config.json"))


def _declaration(folder: Path) -> Partition | None:
    """The partition an original `model_index.json` declares, or None where there is none."""
    path = folder / "model_index.json"
    fields = Fields(path) if there(path) else Fields(path, {})
    if fields.data.get("_minimax_h3") is None:
        return None
    block = fields.block("_minimax_h3")
    block.fixed(schema_version=1)
    return _partition(block, "partition")


def _partition(block: Fields, name: str) -> Partition:
    """Name and tasks of a partition, as a block declares them."""
    given, tasks = block.data.get(name), block.data.get("tasks")
    # `quantize` makes it the name of a folder
    if not isinstance(given, str) or not given.isprintable() or given in ("", ".", "..") or Path(given).name != given:
        block.fail(name, f"a plain name is needed, got {shown(given)}")
    if not isinstance(tasks, list) or not tasks:
        block.fail("tasks", f"a list of names is needed, got {shown(tasks)}")
    for task in tasks:
        block.need(task in KNOWN_TASKS, "tasks", f"{shown(task)} is none of {', '.join(KNOWN_TASKS)}")
    return Partition(given, tuple(dict.fromkeys(tasks)))


def _read_partition(folder: Path, found: _Found, overrides: Mapping[str, Path]) -> None:
    declared = _declaration(folder)
    assert declared is not None
    found.indexes.append(folder / "model_index.json")
    slot = next((slot for slot, partition in SLOTS.items() if partition.name == declared.name), "transformer")
    if slot not in overrides:
        found.add_dit(
            declared,
            _of_kind(folder / "transformer", "transformer", ORIGINAL, f"{folder.name} is an original partition"),
        )
    for kind in SHARED:
        component = (
            None if kind in overrides else _find(folder, kind, ORIGINAL, f"{folder.name} is an original partition")
        )
        if component is None:
            continue
        if kind in found.components:
            _same(found.components[kind], component)
        else:
            found.add_shared(component, folder)


def _read_diffusers(root: Path, slots: list[str], found: _Found, overrides: Mapping[str, Path]) -> None:
    reason = f"{root} is a diffusers root (no _minimax_h3 block in its model_index.json)"
    index = _index_of(root)
    if index is not None:
        found.indexes.append(index)
    declared = diffusers_partitions(index)
    for slot in slots:
        if slot not in overrides:
            found.add_dit(declared[slot], _of_kind(root / slot, "transformer", DIFFUSERS, reason))
    for kind in SHARED:
        component = None if kind in overrides else _find(root, kind, DIFFUSERS, reason)
        if component is not None:
            found.add_shared(component, root)
    if not any((root / name).is_dir() for name in SCHEDULERS):
        found.notes.append(f"{root}: no {'/ and no '.join(SCHEDULERS)}/: the sigma shifts are the release's")


def _index_of(root: Path) -> Path | None:
    return next((root / name for name in ("model_index.json", "modular_model_index.json") if there(root / name)), None)


def diffusers_partitions(index: Path | None) -> dict[str, Partition]:
    """The partition in each DiT folder of a diffusers root: the release's, unless `_twinreel.partitions` says other."""
    result = dict(SLOTS)
    if index is not None:
        block = Fields(index).block("_twinreel").block("partitions")
        for slot in block.data:
            block.need(slot in SLOTS, slot, f"is none of {', '.join(SLOTS)}")
            result[slot] = _partition(block.block(slot), "name")
    return result


def _find(folder: Path, kind: str, layout: str, reason: str) -> Component | None:
    if kind in MEMBERS:
        holders = [folder / name for name in MEMBER_FOLDERS[kind]]
        if holders[0].is_dir() and not _holds(holders[0], kind):  # damaged, whatever the other folders have
            names = " or ".join(MEMBERS[kind])
            raise CheckpointError(f"{holders[0]}: {names} is needed, found {listing(holders[0])}; download it again")
        holder = next((path for path in holders if _holds(path, kind)), None)
        return None if holder is None else Component(kind, BOTH, holder, holder)
    candidates = [folder / name for name in FOLDERS.get(kind, (kind,)) if (folder / name).is_dir()]
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder}: {' and '.join(path.name for path in candidates)} both hold a {kind}; name one"
        )
    return _of_kind(candidates[0], kind, layout, reason) if candidates else None


def _holds(folder: Path, kind: str) -> bool:
    return any(there(folder / name) for name in MEMBERS[kind])


def _of_kind(folder: Path, kind: str, layout: str, reason: str) -> Component:
    component = recognise(folder)
    if component.kind != kind:
        raise CheckpointError(f"{folder}: is a {component.kind}, a {kind} is needed here")
    if layout not in (component.layout, BOTH) and component.layout != BOTH:
        raise CheckpointError(
            f"{folder}: is in the {component.layout} layout, but {reason}; "
            f"put the {layout} folder here, or name this one as a component"
        )
    return component


def _same(first: Component, second: Component) -> None:
    """Two partitions share one copy of everything but the DiT; copies that differ are no choice for us to make. Small
    files that are read and that both have are compared whole, of weights the sizes: hashing is `twinreel verify`'s."""
    ours, theirs = (_fingerprint(component) for component in (first, second))
    differing = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    differing |= {name for name in ours.keys() ^ theirs.keys() if name.endswith(".safetensors")}
    if differing:
        names = ", ".join(sorted(differing))
        raise CheckpointError(
            f"{first.folder} and {second.folder} should be the same {first.kind} and differ in {names}; "
            "name the one to use as a component"
        )


def _fingerprint(component: Component) -> dict[str, int | bytes]:
    result: dict[str, int | bytes] = {
        str(path.relative_to(component.folder)): read_bytes(path)
        for path in small_files(component)
        if path.name in READ or path.name.endswith(".index.json")
    }
    return result | {path.name: path.stat().st_size for path in ending(component.weights, ".safetensors")}


def _override(key: str, folder: Path, found: _Found) -> None:
    if key in MEMBERS:
        if not _holds(folder, key):
            raise CheckpointError(f"{key}: {folder} holds none of {', '.join(MEMBERS[key])}")
        found.components[key] = Component(key, BOTH, folder, folder)
        return
    kind = "transformer" if key in SLOTS else key
    component = _of_kind(folder, kind, BOTH, "")
    if kind != "transformer":
        found.components[kind] = component
        return
    parent = folder.absolute().parent
    declared = _declaration(parent) if component.layout == ORIGINAL else diffusers_partitions(_index_of(parent))[key]
    index = _index_of(parent)
    if index is not None and index not in found.indexes:
        found.indexes.append(index)
    found.add_dit(declared or SLOTS[key], component)


def _complete(root: Path, found: _Found, weights: bool) -> None:
    missing = [kind for kind in REQUIRED if kind not in found.components]
    missing = (["transformer"] if not found.dits else []) + missing
    if missing:
        have = [f"transformer ({name})" for name in found.dits] + list(found.components)
        raise CheckpointError(
            f"{root}: missing {', '.join(missing)}; found {', '.join(have) or 'nothing'}; "
            "add the folders or name them as components"
        )
    if "processor" not in found.components:
        found.notes.append(f"{root}: no processor/: its pixel budgets and normalisation are the release's")
    if not found.indexes:
        found.notes.append(f"{root}: no model_index.json: canvases, durations and tasks are the release's")
    if not weights:
        return
    parts = (*found.dits.values(), *(found.components[kind] for kind in REQUIRED if kind != "tokenizer"))
    empty = [str(part.weights) for part in parts if not has_weights(part.weights)]
    if empty:
        raise CheckpointError(f"no *.safetensors in {', '.join(empty)}; the download is incomplete")
