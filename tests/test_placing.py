"""Names are given once: what appears during a run stays, runs of one name lose nothing, latents in use stay."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interrupted import LATENTS, T2VA, interrupt, names
from twinreel import Engine, EngineConfig, OutputOptions, RequestError, cli
from twinreel import finish as finishing
from twinreel.output.placing import drop_latents, give_name, hold, place_output
from twinreel.unfinished import unfinished
from twinreel.watch import Event


@pytest.mark.parametrize("taken", ["a.mp4", "a.json", LATENTS])
@pytest.mark.parametrize("stage", ["denoise", "decode"])
def test_what_takes_the_name_during_a_run_stays(engine: Engine, tmp_path: Path, whole: bytes, stage: str, taken: str):
    """The result has the next number; latents are safe from a stranger who takes their name while they are in use."""

    def watch(event: Event) -> None:
        if event.stage == stage and event.done and not (tmp_path / taken).exists():
            (tmp_path / taken).write_bytes(b"mine")

    report = engine.render(T2VA, tmp_path / "a.mp4", watch=watch)
    moved = (stage, taken) != ("decode", LATENTS)  # there they are our own
    name = "a-2" if moved else "a"
    assert report["path"] == str(tmp_path / f"{name}.mp4") and (tmp_path / f"{name}.mp4").read_bytes() == whole
    assert json.loads((tmp_path / f"{name}.json").read_text())["path"] == report["path"]
    assert names(tmp_path) == sorted([taken] * moved + [f"{name}.json", f"{name}.mp4"])
    if moved:
        assert (tmp_path / taken).read_bytes() == b"mine"
        assert "a.mp4 was taken while this was made; it is" in report["warnings"][0]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_fills_during_a_run_stays(engine: Engine, tmp_path: Path, overwrite: bool):
    (tmp_path / "shots").mkdir()

    def watch(event: Event) -> None:
        if event.stage == "decode":
            (tmp_path / "shots" / "diary.txt").write_text("mine")

    report = engine.render(T2VA, tmp_path / "shots", OutputOptions(overwrite=overwrite), watch)
    assert names(tmp_path) == ["shots", "shots-2", "shots-2.json"] and names(tmp_path / "shots") == ["diary.txt"]
    assert report["path"] == str(tmp_path / "shots-2") and len(names(tmp_path / "shots-2")) == 23


@pytest.fixture(scope="module")
def second(tiny_all: Path) -> Engine:
    return Engine(EngineConfig(model=tiny_all, device="cpu", threads=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_runs_of_one_name_none_is_lost(
    engine: Engine, second: Engine, tmp_path: Path, whole: bytes, overwrite: bool
):
    reports = []

    def watch(event: Event) -> None:
        if event.stage == "denoise" and event.done and not reports:
            reports.append(second.render(T2VA, tmp_path / "a.mp4"))

    report = engine.render(T2VA, tmp_path / "a.mp4", OutputOptions(overwrite=overwrite), watch)
    assert reports[0]["path"] == str(tmp_path / "a.mp4") and (tmp_path / "a.mp4").read_bytes() == whole
    assert report["path"] == str(tmp_path / ("a.mp4" if overwrite else "a-2.mp4"))
    assert names(tmp_path) == ["a.json", "a.mp4"] if overwrite else ["a-2.json", "a-2.mp4", "a.json", "a.mp4"]


def test_latents_of_a_run_that_goes_on_are_nobody_elses(engine: Engine, second: Engine, tmp_path: Path, whole: bytes):
    refusals: list[str] = []

    def watch(event: Event) -> None:
        if event.stage == "decode" and event.done:
            with pytest.raises(RequestError) as caught:  # while they are in use
                second.decode(tmp_path / LATENTS, tmp_path / "b.mp4")
            refusals.append(str(caught.value))
            second.render(T2VA, tmp_path / "a.mp4", OutputOptions(overwrite=True))
            raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        engine.render(T2VA, tmp_path / "a.mp4", watch=watch)
    assert "another run is finishing" in refusals[0] and names(tmp_path) == ["a.json", LATENTS, "a.mp4"]
    second.decode(tmp_path / LATENTS, tmp_path / "b.mp4")  # and they are whole
    assert (tmp_path / "b.mp4").read_bytes() == whole
    (tmp_path / LATENTS).write_bytes(b"of a run that died")
    second.render(T2VA, tmp_path / "a.mp4", OutputOptions(overwrite=True))
    assert names(tmp_path) == ["a.json", "a.mp4", "b.json", "b.mp4"]


def test_latents_that_cannot_be_removed_are_a_warning(
    engine: Engine, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
):
    interrupt(engine, tmp_path)
    remove = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == LATENTS:
            raise PermissionError(errno.EROFS, "Read-only file system")
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    report = engine.decode(tmp_path / LATENTS, tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == whole and names(tmp_path) == ["a.json", LATENTS, "a.mp4"]
    assert "is done with, and stays (Read-only file system)" in report["warnings"][0]


def test_a_report_that_cannot_be_written_leaves_a_command_that_finishes(
    second: Engine, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
):
    """The file has its name by then, and is replaced."""

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr("twinreel.finish.write_report", full)
        second.render(T2VA, tmp_path / "a.mp4")
    words = shlex.split(caught.value.__notes__[0].split("finish with: ")[1])
    assert names(tmp_path) == [LATENTS, "a.mp4"] and cli.main([*words[1:], "--quiet"]) == 0
    assert (tmp_path / "a.mp4").read_bytes() == whole and names(tmp_path) == ["a.json", "a.mp4"]


def test_a_model_given_as_a_path_is_named_in_the_command(second: Engine, tiny_all: Path, tmp_path: Path):
    assert f"--model {tiny_all}" in interrupt(second, tmp_path).__notes__[0]


@pytest.fixture
def full_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `acme` with no room for latents; the one for temporary files has those of another run."""
    for name in ("acme", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / LATENTS).write_bytes(b"another run's")
    save = finishing.save_latents

    def full(path: Path, *args: Any) -> Any:
        if path.parent == tmp_path / "acme":
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(path, *args)

    monkeypatch.setattr(finishing, "save_latents", full)
    return tmp_path / "acme"


def test_latents_in_the_folder_for_temporary_files_take_nobodys_place(engine: Engine, full_beside: Path):
    """They leave nothing there after success, and a private report does not say where the output lies."""
    temporary = full_beside.parent / "tmp"
    engine.render(T2VA, full_beside / "a.mp4", OutputOptions(private=True))
    assert names(temporary) == [LATENTS] and "acme" not in (full_beside / "a.json").read_text()
    interrupt(engine, full_beside, overwrite=True)
    assert (temporary / LATENTS).read_bytes() == b"another run's"
    assert names(temporary) == ["a-2.latents.safetensors", LATENTS]


def test_a_report_whose_name_is_taken_is_told(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = finishing.write_report

    def late(path: Path, *args: Any, **more: Any) -> Path:
        (tmp_path / "a.json").write_text("mine")
        return write(path, *args, **more)

    monkeypatch.setattr(finishing, "write_report", late)
    report = engine.render(T2VA, tmp_path / "a.wav")
    assert report["warnings"] == [
        f"report: {tmp_path / 'a.json'} was taken while this was made; it is {tmp_path / 'a-2.json'}"
    ]
    assert (tmp_path / "a.json").read_text() == "mine" and names(tmp_path) == ["a-2.json", "a.json", "a.wav"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("there", [None, "file", "link"])
def test_a_name_is_given_once(tmp_path: Path, links: bool, there: str | None, monkeypatch: pytest.MonkeyPatch):
    """Also on a file system that has no hard links."""

    def refuse(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    new, target = tmp_path / "new", tmp_path / "a.mp4"
    new.write_text("new")
    if there is None:
        give_name(new, target)
        assert target.read_text() == "new"
        return
    target.write_text("old") if there == "file" else target.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        give_name(new, target)
    assert target.read_text() == "old" if there == "file" else os.readlink(target) == "nowhere"


def test_a_name_that_could_not_be_given_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*names: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, refuse)
    (tmp_path / "new").write_text("new")
    with pytest.raises(OSError, match="Input/output"):
        give_name(tmp_path / "new", tmp_path / "a.mp4")
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize(
    ("before", "faster", "left"),
    [
        ("old", "retake", {"shots": "theirs", "shots-2": "old", "shots-3": "mine"}),
        ("old", "set aside", {"shots": "mine"}),
        (None, "retake", {"shots": "theirs", "shots-2": "mine"}),
        ("old", None, {"shots": "mine"}),
    ],
)
def test_two_runs_that_replace_one_folder_of_frames(
    tmp_path: Path, before: str | None, faster: str | None, left: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Another run takes the name, or sets its folder aside, just before this one does."""
    rename, shots = os.rename, tmp_path / "shots"

    def frames(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / "frame-00000.png").write_text(text)

    def race(old: Path, new: Path) -> None:
        if faster == "set aside" and old == shots:
            monkeypatch.setattr(os, "rename", rename)
            rename(shots, tmp_path / "aside")
        if faster == "retake" and old.suffix == ".part":
            monkeypatch.setattr(os, "rename", rename)
            frames(shots, "theirs")
        rename(old, new)

    if before:
        frames(shots, before)
    monkeypatch.setattr(os, "rename", race)
    with unfinished(shots) as temporary:
        frames(temporary, "mine")
        placed = place_output(temporary, shots, overwrite=True)
    found = {path.name: (path / "frame-00000.png").read_text() for path in tmp_path.iterdir() if path.name != "aside"}
    assert found == left and found[placed.name] == "mine"


def test_latents_in_use_are_not_dropped(tmp_path: Path):
    """Not those of another process, nor, once it is killed, kept."""
    path = tmp_path / "a.latents.safetensors"
    path.write_bytes(b"latents")
    script = (
        "import sys; from pathlib import Path; from twinreel.output.placing import hold; kept = hold(Path(sys.argv[1]))"
    )
    script += "; print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for use in (hold, drop_latents):
            with pytest.raises(BlockingIOError):
                use(path)
        other.kill()
    drop_latents(path)
    assert not path.exists()
    drop_latents(path)
