"""`twinreel verify`: tensors against the config, values for finiteness, files against a manifest.

Nothing is held but one block of a file at a time. The manifest `twinreel-manifest.json` lies at the checkpoint's root
and has the SHA-256 and size of every file that a run reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, RequestError
from ..spec import DiTSpec, Spec
from ..unfinished import give_name, unfinished, write_probe
from .config import read_spec, scheduler_configs
from .files import Entry, first_ten, open_weights, opened, read_bytes, read_json, reading
from .keymap import COMPONENTS, canonical_names, stored_tensors
from .locate import Checkpoint, locate
from .recognise import Component, small_files
from .tensors import compare
from .tokenizer import load_tokenizer

MANIFEST = "twinreel-manifest.json"
BLOCK = 16 << 20
# Where all exponent bits are set the value is infinite or no number; integers see that without converting any value.
# e4m3 has no infinity: only all of its bits set are no number.
EXPONENT = {
    "float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00),
    "float8_e4m3fn": (np.uint8, 0x7F),
}  # fmt: skip


@dataclass
class Findings:
    """What an examination found: facts per component, problems as lines, hashes by path relative to the root."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    digests: dict[str, dict[str, Any]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)


def verify(
    path: str | os.PathLike[str],
    write_manifest: bool = False,
    components: Mapping[str, str | os.PathLike[str]] | None = None,
) -> dict[str, Any]:
    """Check names, shapes, dtypes, byte totals and finite values of every tensor, the tokenizer against the config, and
    every file against the manifest.

    Returns facts for printing: layout, partitions, tensors and bytes of each component, and `manifest`: "matches N
    files", "written, N files", "not written (...)" or "not compared (...)". With `components` it may list files that are
    not read, and their number is told. `write_manifest` writes it after all other checks passed.
    Raises CheckpointError with the first ten problems and the count when anything differs, and RequestError where a
    manifest to write is there already: it may disagree, and is the only one who knows.
    """
    checkpoint = locate(path, components)
    manifest = checkpoint.path / MANIFEST
    if write_manifest and os.path.lexists(manifest):
        raise RequestError(
            "write_manifest", f"{manifest} exists; verify without it compares the files with that, or remove it first"
        )
    if write_manifest:
        try:
            write_probe(manifest)  # before hours of reading
        except OSError as error:
            why = error.strerror or error
            raise RequestError("write_manifest", f"{manifest} cannot be written ({why}); leave it out") from None
    with reading(checkpoint.path):
        findings = examine(checkpoint)
    outcome = "not compared (no manifest beside the weights; --write-manifest makes one)"
    if os.path.lexists(manifest):
        outcome = _compare_manifest(manifest, findings, bool(components))
    if findings.problems:
        raise CheckpointError(f"{checkpoint.path}: {first_ten(findings.problems)}")
    if write_manifest:
        outcome = _write_manifest(manifest, findings.digests)
    result: dict[str, Any] = {
        "path": str(checkpoint.path),
        "layout": checkpoint.layout,
        "partitions": {partition.name: list(partition.tasks) for partition in checkpoint.partitions},
        **findings.facts,
        "finite": "all values",
        "manifest": outcome,
    }
    if findings.outside:
        result["not in the manifest"] = findings.outside
    return result | ({"notes": list(checkpoint.notes)} if checkpoint.notes else {})


def examine(checkpoint: Checkpoint) -> Findings:
    """Read every file of a checkpoint once. Problems are collected; only an unreadable config raises."""
    spec = read_spec(checkpoint)
    findings = Findings()
    seen: set[Path] = set()
    for label, component in components_of(checkpoint).items():
        if component.kind in COMPONENTS:
            facts = _examine_component(component, spec, checkpoint, findings, seen)
            if facts is not None:
                findings.facts[label] = facts
        for file in small_files(component):
            if file.name != MANIFEST:
                _hash_whole(file, checkpoint, findings, seen)
    for index in checkpoint.indexes:
        for file in (index, *scheduler_configs(index)):
            _hash_whole(file, checkpoint, findings, seen)
    try:
        tokenizer = load_tokenizer(checkpoint.folders["tokenizer"], spec.text)
        findings.facts["tokenizer"] = f"{len(tokenizer.backend)} tokens"
    except CheckpointError as error:
        findings.problems.append(str(error))
    return findings


def components_of(checkpoint: Checkpoint) -> dict[str, Component]:
    """Every component once, the DiTs with their partition's name."""
    return {f"transformer ({name})": dit for name, dit in checkpoint.dits.items()} | dict(checkpoint.components)


def _examine_component(
    component: Component, spec: Spec, checkpoint: Checkpoint, findings: Findings, seen: set[Path]
) -> str | None:
    try:
        files = open_weights(component.weights)
        names = canonical_names(component.kind, files.entries, component.weights)
    except CheckpointError as error:
        findings.problems.append(str(error))
        return None
    expected = stored_tensors(component.kind, component.layout, spec)
    where = _label(component.weights, checkpoint)
    found = compare({names[name]: entry for name, entry in files.entries.items()}, expected)
    findings.problems += [f"{where}: {problem}" for problem in found]
    declared, counted = files.declared_bytes, files.total_bytes
    if declared is not None and declared != counted:
        findings.problems.append(f"{where}: the index's total_size is {declared}, the shards hold {counted} bytes")
    if "rope.inv_freq" in files.entries and not found:
        findings.problems += _check_rope(files.entries["rope.inv_freq"], spec.dit, where)
    for shard in files.shards:
        mine = {name: entry for name, entry in files.entries.items() if entry.file == shard}
        _read_shard(shard, mine, checkpoint, findings, seen)
    return f"{len(files.entries)} tensors, {counted} bytes, {len(files.shards)} files"


def _read_shard(
    shard: Path, entries: Mapping[str, Entry], checkpoint: Checkpoint, findings: Findings, seen: set[Path]
) -> None:
    """One pass over a shard: its hash, and every value's exponent."""
    if shard in seen:
        return
    seen.add(shard)
    digest, size = hashlib.sha256(), 0
    ordered = sorted(entries.items(), key=lambda item: item[1].offset)
    with opened(shard) as file:
        header = file.read(ordered[0][1].offset if ordered else -1)
        digest.update(header)
        size += len(header)
        for name, entry in ordered:
            bad = 0
            for block in _blocks(file, entry.size):
                digest.update(block)
                size += len(block)
                bad += _not_finite(block, entry.dtype)
            if bad:
                findings.problems.append(f"{_label(shard, checkpoint)}: {name}: {bad} values are not finite")
    _record(shard, digest.hexdigest(), size, checkpoint, findings)


def _check_rope(entry: Entry, dit: DiTSpec, where: str) -> list[str]:
    """The stored frequencies are never loaded, so they must be those that rope_theta gives (SPEC 2.4)."""
    with opened(entry.file) as file:
        stored = np.fromfile(file, np.float32, dit.rope_freqs, offset=entry.offset)
    ours = dit.rope_theta ** (-np.arange(dit.rope_freqs) / dit.rope_freqs)
    if np.allclose(stored, ours, rtol=1e-5, atol=0):
        return []
    return [f"{where}: rope.inv_freq ends at {stored[-1]:g}, rope_theta {dit.rope_theta:g} gives {ours[-1]:g}"]


def _not_finite(block: bytes, dtype: str) -> int:
    if dtype not in EXPONENT:
        return 0
    kind, mask = EXPONENT[dtype]
    return int(np.count_nonzero((np.frombuffer(block, kind) & kind(mask)) == mask))


def _blocks(file: Any, size: int) -> Iterator[bytes]:
    while size > 0:
        block = file.read(min(size, BLOCK))
        if not block:
            raise CheckpointError(f"{file.name}: ends early; the file changed while it was read")
        size -= len(block)
        yield block


def _hash_whole(file: Path, checkpoint: Checkpoint, findings: Findings, seen: set[Path]) -> None:
    if file not in seen:
        seen.add(file)
        data = read_bytes(file)
        _record(file, hashlib.sha256(data).hexdigest(), len(data), checkpoint, findings)


def _record(file: Path, digest: str, size: int, checkpoint: Checkpoint, findings: Findings) -> None:
    if file.absolute().is_relative_to(checkpoint.path.absolute()):
        findings.digests[_label(file, checkpoint)] = {"sha256": digest, "bytes": size}
    else:
        findings.outside.append(str(file))


def _label(path: Path, checkpoint: Checkpoint) -> str:
    """Relative to the root with forward slashes, as the manifest writes it."""
    absolute, root = path.absolute(), checkpoint.path.absolute()
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else str(path)


def _compare_manifest(manifest: Path, findings: Findings, replaced: bool) -> str:
    """Hold the hashes against the manifest. Where components were `replaced`, it lists files that nobody read."""
    listed = read_json(manifest).get("files")
    if not isinstance(listed, dict) or not all(isinstance(facts, dict) for facts in listed.values()):
        raise CheckpointError(
            f"{manifest}: files: hashes by file name are needed; remove it, and write it anew with --write-manifest"
        )
    for name, facts in findings.digests.items():
        if name not in listed:
            findings.problems.append(f"{name}: not in {MANIFEST}; if an older version wrote that, write it anew")
        elif listed[name] != facts:
            got, needed = (str(side.get("sha256", "")) for side in (facts, listed[name]))
            findings.problems.append(f"{name}: SHA-256 {got[:16]}..., {MANIFEST} has {needed[:16]}...")
    unread = [name for name in listed if name not in findings.digests]
    if replaced and unread:
        return f"matches {len(findings.digests)} files, {len(unread)} more are listed and were not read"
    findings.problems += [f"{name}: in {MANIFEST} and not among the files read" for name in unread]
    return f"matches {len(findings.digests)} files"


def _write_manifest(manifest: Path, digests: Mapping[str, Mapping[str, Any]]) -> str:
    """Whole or not at all: written beside its place, then put there. What became of it: the rest was found all the same."""
    text = json.dumps({"schema_version": 1, "files": dict(sorted(digests.items()))}, indent=1) + "\n"
    try:
        with unfinished(manifest) as partial:
            partial.write_text(text, encoding="utf-8")
            give_name(partial, manifest)
    except OSError as error:
        return f"not written ({error.strerror or error})"
    return f"written, {len(digests)} files"
