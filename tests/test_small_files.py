"""Files that a person names: what is no small plain file is refused before it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from twinreel.calibration import read_profile
from twinreel.errors import ConfigError, RequestError
from twinreel.flags import RequestFlags
from twinreel.serve.options import first_line
from twinreel.small_files import read_small, read_small_json, why
from twinreel.tools.compare import compare
from twinreel.tools.setups import parse_setup
from twinreel.tools.trace import read_manifest
from twinreel.tools.validate import read_requests


def pipe(path: Path) -> None:
    os.mkfifo(path)


DAMAGED: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "absent": lambda path: None,
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "many digits": lambda path: path.write_text("9" * 5000),
    "a list": lambda path: path.write_text("[]"),
}
READERS: dict[str, Callable[[Path], object]] = {
    "--request": lambda path: RequestFlags(request=path).build(),
    "validate --requests": lambda path: read_requests(str(path)),
    "validate --base": lambda path: parse_setup(str(path)),
    "policy profile": lambda path: read_profile(str(path), {}),
    "compare": lambda path: compare(path, path),
    "trace": lambda path: read_manifest(path.parent),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGED)
def test_whatever_it_is_it_is_refused_in_few_words(damage: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    DAMAGED[damage](path)
    with pytest.raises((RequestError, ConfigError)) as caught:
        READERS[reader](path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("damage", ["pipe", "endless", "folder", "absent", "huge", "no text"])
def test_a_key_file_too(damage: str, tmp_path: Path) -> None:
    DAMAGED[damage](tmp_path / "key")
    with pytest.raises(ConfigError, match="^--server-key-file: cannot read"):
        first_line(tmp_path / "key", "--server-key-file")


def test_what_is_right_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "é"}', encoding="utf-8")
    assert read_small(tmp_path / "a.json", 11) and read_small_json(tmp_path / "a.json") == {"a": "é"}
    with pytest.raises(OSError, match="it is no file of at most 10 bytes") as caught:
        read_small(tmp_path / "a.json", 10)
    assert why(caught.value) == "it is no file of at most 10 bytes"
