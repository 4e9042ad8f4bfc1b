"""Latents on disk: what is no such file, is damaged, or is another model's is refused before anything is loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from interrupted import LATENTS, T2VA, interrupt
from twinreel import CheckpointError, Engine, RequestError
from twinreel.output.latents import load_latents
from twinreel.plan import Plan
from twinreel.watch import Event


@pytest.fixture(scope="module")
def kept(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The latents file of an interrupted run."""
    folder = tmp_path_factory.mktemp("kept")
    interrupt(engine, folder)
    return (folder / LATENTS).read_bytes()


def test_the_latents_are_those_of_the_run(engine: Engine, kept: bytes, tmp_path: Path):
    (tmp_path / LATENTS).write_bytes(kept)
    found = load_latents(tmp_path / LATENTS, engine.parts.spec)
    plan = found.latents.plan
    assert (plan.frames, plan.prompt, plan.asked_seconds) == (22, T2VA.prompt, 0.9) and plan.shifts == (12.0, 3.0)
    assert found.latents.video.dtype == torch.float32 and found.report["request"]["seed"] == 42
    assert found.latents.facts["plan"]["calls"] == 1


@pytest.mark.parametrize("room", [True, False])
def test_latents_whose_folder_is_taken_away_are_kept_elsewhere(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
):
    folder, elsewhere = tmp_path / "out", tmp_path / "tmp"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))

    def watch(event: Event) -> None:
        if event.stage == "decode" and event.done:
            shutil.rmtree(folder)
            if not room:
                shutil.rmtree(elsewhere)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        engine.render(T2VA, folder / "a.mp4", watch=watch)
    (note,) = caught.value.__notes__
    if not room:
        assert "was taken away meanwhile, and nothing is kept in" in note and not elsewhere.exists()
        return
    assert f"kept in {elsewhere / LATENTS}; finish with: twinreel decode {elsewhere / LATENTS}" in note
    report = engine.decode(elsewhere / LATENTS, tmp_path / "a.npz")
    assert report["sha256"]["frames"] == engine.generate(T2VA).report["sha256"]["frames"]


@pytest.mark.parametrize("how", ["success", "failure", "no answer"])
def test_what_took_the_name_of_the_latents_is_not_taken_for_them(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder, elsewhere = tmp_path / "out", tmp_path / "tmp"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    stat = os.stat

    def watch(event: Event) -> None:
        if event.stage != "decode" or not event.done:
            return
        if how == "no answer":
            refused = PermissionError(errno.EACCES, "Permission denied")
            monkeypatch.setattr(
                os, "stat", lambda path, **more: fail(refused) if path == latents else stat(path, **more)
            )
        else:
            latents.unlink()
            latents.write_text("somebody's own")
        if how != "success":
            raise ZeroDivisionError

    latents = folder / LATENTS
    with pytest.raises(ZeroDivisionError) if how != "success" else nullcontext() as caught:
        engine.render(T2VA, folder / "a.mp4", watch=watch)
    monkeypatch.setattr(os, "stat", stat)
    if how != "no answer":
        assert latents.read_text() == "somebody's own"
    if caught is not None:
        assert f"kept in {elsewhere / LATENTS}" in caught.value.__notes__[0]
        assert load_latents(elsewhere / LATENTS, engine.parts.spec)


def test_latents_of_which_nobody_can_say_whether_they_are_there_are_told(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, latents, refused = os.stat, tmp_path / LATENTS, PermissionError(errno.EACCES, "Permission denied")

    def watch(event: Event) -> None:
        if event.stage == "decode" and event.done:
            monkeypatch.setattr(
                os, "stat", lambda path, **more: fail(refused) if path == latents else stat(path, **more)
            )

    report = engine.render(T2VA, tmp_path / "a.mp4", watch=watch)
    assert f"latents: {latents} is done with, and stays (Permission denied)" in report["warnings"]


def fail(error: Exception) -> Any:
    raise error


def changed(data: bytes, name: str, value: Any) -> bytes:
    """A latents file whose text `name` is `value`, or absent for `...`; `plan.x` is a field of one, `video` a tensor."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    whole, _, part = name.partition(".")
    texts = header["__metadata__"]
    if whole == "video":
        header["video"]["dtype"] = value
    elif part:
        plan = json.loads(texts[whole])
        plan |= {part: None if value is ... else value}
        if value is ...:
            del plan[part]
        texts[whole] = json.dumps(plan)
    elif value is ...:
        del texts[whole]
    else:
        texts[whole] = value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


TEXTS = ("plan", "facts", "report", "format", "vae", "digest")
PLAN = [item.name for item in fields(Plan)]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in TEXTS for value in (..., "", "x", "[]", "{}", "null")]
    + [(f"plan.{name}", value) for name in PLAN for value in (..., None, -1, "x", {})]
    + [("plan.more", 1), ("video", "I32"), ("video", "BOOL")],
)
def test_damaged_latents_are_refused(engine: Engine, kept: bytes, tmp_path: Path, name: str, value: Any):
    source = tmp_path / "bad.latents.safetensors"
    source.write_bytes(changed(kept, name, value))
    with pytest.raises(RequestError, match="latents: ") as caught:
        load_latents(source, engine.parts.spec)
    assert caught.value.field == "latents"


@pytest.mark.parametrize("at", [-1, -5000])
def test_one_bit_of_latents(engine: Engine, kept: bytes, tmp_path: Path, at: int):
    data = bytearray(kept)
    data[at] ^= 1
    (tmp_path / LATENTS).write_bytes(data)
    with pytest.raises(RequestError, match="not as it was written"):
        load_latents(tmp_path / LATENTS, engine.parts.spec)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_latents_are_a_file(engine: Engine, tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / LATENTS)
    with pytest.raises(RequestError, match="is no file"):
        engine.decode(tmp_path / LATENTS, tmp_path / "b.mp4")


def test_what_is_no_latents_file_is_refused(engine: Engine, kept: bytes, tmp_path: Path):
    source, data = tmp_path / LATENTS, kept
    source.write_bytes(data)
    for bad in (b"", data[:-10], data[:100], b"x" * 400):
        (tmp_path / "bad.latents.safetensors").write_bytes(bad)
        with pytest.raises(RequestError, match="latents: "):
            engine.decode(tmp_path / "bad.latents.safetensors", tmp_path / "b.mp4")
    with pytest.raises(RequestError, match="cannot be read"):
        engine.decode(tmp_path / "none.latents.safetensors", tmp_path / "b.mp4")
    spec = engine.parts.spec
    other = replace(spec, audio=replace(spec.audio, std=(2.0,) * 32))
    with pytest.raises(CheckpointError, match="another VAE"):
        load_latents(source, other)
    assert not (tmp_path / "b.mp4").exists() and source.exists()
