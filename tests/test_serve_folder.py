"""The data folder of a server: what is not ours is refused, and stays as it is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_stub import running
from twinreel import ConfigError
from twinreel.cli import main
from twinreel.serve.folder import claim, open_queue
from twinreel.serve.jobs import APPLICATION, QUEUE, new_id


def other_database(folder: Path, mark: int = 0) -> None:
    db = sqlite3.connect(folder / QUEUE)
    db.execute("CREATE TABLE notes (words TEXT)")
    db.execute(f"PRAGMA application_id={mark}")
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()


def queue_lost(folder: Path) -> None:
    (folder / "jobs" / new_id()).mkdir(parents=True)
    (folder / "queue.sqlite").touch()


STRANGE: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: (folder / "thesis.txt").write_text("mine"),
    "a folder": lambda folder: (folder / "photos").mkdir(),
    "jobs of somebody": lambda folder: (folder / "jobs" / "2024").mkdir(parents=True),
    "incoming of somebody": lambda folder: (folder / "incoming" / "mail").mkdir(parents=True),
    "jobs of a lost queue": lambda folder: (folder / "jobs" / new_id()).mkdir(parents=True),
    "jobs of an emptied queue": queue_lost,
    "another database": other_database,
    "a marked database": lambda folder: other_database(folder, 7),
    "no database": lambda folder: (folder / QUEUE).write_bytes(b"no queue at all " * 99),
    "a queue that is a folder": lambda folder: (folder / QUEUE).mkdir(),
}


def state(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else None) for path in paths}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_not_ours_stays_as_it_is(strange: str, tmp_path: Path, tiny_original: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    STRANGE[strange](folder)
    before = state(folder)
    with pytest.raises(ConfigError, match="^data: .*; .*name a") as caught:
        running(folder, tiny_original)
    assert caught.value.exit_code == 3 and str(folder) in str(caught.value)
    assert state(folder) == before


def test_the_command_line_refuses_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["serve", "--data", str(tmp_path)]) == 3
    assert "thesis.txt" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("bare", ["", "lost+found", "server.lock", "jobs", "cut short", "unmarked"])
def test_folders_that_are_taken(bare: str, tmp_path: Path) -> None:
    """Empty ones, those of a server that was ended before its queue was made, and the first ones, without a mark."""
    if bare in ("cut short", "unmarked"):
        claim(tmp_path).close()
        queue = open_queue(tmp_path)
        if bare == "cut short":
            queue.close()
            for path in tmp_path.glob("queue.sqlite*"):
                path.unlink()
        else:
            queue._db.execute("PRAGMA application_id=0")
            queue.close()
    elif bare:
        (tmp_path / bare).mkdir() if "." not in bare else (tmp_path / bare).touch()
    lock = claim(tmp_path)
    queue = open_queue(tmp_path)
    assert queue._db.execute("PRAGMA application_id").fetchone()[0] in (APPLICATION, 0 if bare == "unmarked" else None)
    queue.close()
    lock.close()
    claim(tmp_path).close()  # and again
