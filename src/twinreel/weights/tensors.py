"""What a component's files hold against what its sizes ask for."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError
from ..spec import Spec
from .files import Entry, WeightFiles, first_ten, open_weights
from .keymap import Stored, canonical_names, stored_tensors
from .recognise import Component


def open_component(component: Component, spec: Spec) -> tuple[WeightFiles, dict[str, Stored]]:
    """A component's files and, for each tensor in them by its name there, what it is.

    CheckpointError when the files do not hold exactly what the sizes ask for (see `stream.load_into`).
    """
    files = open_weights(component.weights)
    names = canonical_names(component.kind, files.entries, component.weights)
    expected = stored_tensors(component.kind, component.layout, spec)
    problems = compare({names[name]: entry for name, entry in files.entries.items()}, expected)
    if problems:
        raise CheckpointError(f"{component.weights} does not fit {component.config}, {first_ten(problems)}")
    return files, {name: expected[released] for name, released in names.items()}


def compare(entries: Mapping[str, Entry], expected: Mapping[str, Stored]) -> list[str]:
    """Every difference between the tensors there and those expected, a line each: missing ones first."""
    problems = [f"{name}: missing" for name, row in expected.items() if name not in entries and not row.optional]
    for name, entry in entries.items():
        row = expected.get(name)
        if row is None:
            problems.append(f"{name}: left over in {entry.file.name}: no part of this model")
        elif entry.shape != row.shape:
            problems.append(f"{name}: shape {list(entry.shape)}, {list(row.shape)} is needed")
        elif entry.dtype != row.dtype:
            problems.append(f"{name}: dtype {entry.dtype}, {row.dtype} is needed")
    return problems
