"""Temporary folders: gone after their run; those of runs that were killed go with the next, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from twinreel.scratch import LOCK, clear, scratch

HOLD = """
import sys
from twinreel.scratch import scratch
with scratch("test") as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "large").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process in the middle of a run, and its folder."""
    told: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen([sys.executable, "-c", HOLD], text=True, env=environment, **told) as process:  # type: ignore[call-overload]
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_goes_after_its_block(place: Path) -> None:
    with pytest.raises(KeyError), scratch("test") as folder:
        assert folder.parent == place and folder.name.startswith("twinreel-test-")
        (folder / "file").write_text("x")
        clear()  # not while it is in use, by this process either
        assert (folder / "file").exists()
        raise KeyError
    assert not list(place.iterdir())


def test_an_error_loses_the_notes_that_send_somebody_there(place: Path) -> None:
    with pytest.raises(KeyError) as caught, scratch("test") as folder:
        error = KeyError()
        for note in (f"latents are kept in {folder / 'a'}", "on rank 1"):
            error.add_note(note)
        raise error
    assert caught.value.__notes__ == ["on rank 1"]


def test_the_next_run_clears_what_a_killed_one_left(holder: tuple[subprocess.Popen[str], Path], place: Path) -> None:
    process, left = holder
    foreign = place / "twinreel-latents"  # of something else, or of a file system without locks
    foreign.mkdir()
    with scratch("test"):
        assert (left / "inner" / "large").exists() and foreign.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (left / LOCK).exists()
    with scratch("other") as mine:
        assert set(place.iterdir()) == {mine, foreign}


def test_nothing_is_cleared_where_there_are_no_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with ExitStack() as stack:
        folders = [stack.enter_context(scratch("test")) for _ in range(2)]
        assert all(folder.is_dir() for folder in folders)
    assert not list(place.iterdir())
