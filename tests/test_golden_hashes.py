"""A changed bit is a reviewed event: hashes recorded by ops table, processor kind and torch version."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "golden" / "make_hashes.py"


def test_hashes_are_as_recorded() -> None:
    spec = importlib.util.spec_from_file_location("make_hashes", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    known = json.loads(script.FILE.read_text())
    assert known and all(set(value) == {"t2va", "fl2va", "ref2va"} for value in known.values())
    key, found = script.measure("cpu")
    if key not in known:
        pytest.skip(f"no hashes are recorded for {key!r}: run tests/golden/make_hashes.py on a commit you trust")
    assert found == known[key], "bits changed: find out why, then record them with tests/golden/make_hashes.py"
