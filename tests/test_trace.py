"""Traces: what is written, that recording changes nothing, and the first boundary that differs."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinreel import Engine, EngineConfig, Request
from twinreel.errors import RequestError
from twinreel.tools.compare import compare, summary
from twinreel.tools.trace import SCHEMA, Trace, difference

REQUEST = Request("A cat plays piano.", steps=6, duration=0.9)


@pytest.fixture(scope="module")
def engine(tiny_original: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_original), device="cpu", threads=2))


@pytest.fixture(scope="module")
def traces(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    requests = {"a": REQUEST, "same": REQUEST, "other": Request("A dog sings.", steps=6, duration=0.9)}
    for name, request in requests.items():
        trace = Trace(folder / name, all_steps=name == "other")
        media = engine.generate(request, boundary=trace)
        trace.finish(media.report)
    return folder


def test_the_boundaries_of_a_run(engine: Engine, traces: Path) -> None:
    manifest = json.loads((traces / "a" / "manifest.json").read_text())
    assert manifest["schema"] == SCHEMA and manifest["engine"].startswith("twinreel ")
    names = [boundary["name"] for boundary in manifest["boundaries"]]
    assert names == [
        "prompt", "layout", "sigmas", "text", "noise", "velocity.0", "velocity.2", "velocity.4",
        "latents", "waveform", "frames.0", "frames.1",
    ]  # fmt: skip
    files = {boundary["name"]: load_file(traces / "a" / boundary["file"]) for boundary in manifest["boundaries"]}
    # recording changes nothing, and what is recorded is what came out
    media = engine.generate(REQUEST)
    assert manifest["report"]["sha256"] == media.report["sha256"]
    frames = torch.cat([files["frames.0"]["pixels"], files["frames.1"]["pixels"]])
    assert torch.equal(frames, torch.from_numpy(media.video))
    assert torch.equal(files["waveform"]["samples"], torch.from_numpy(media.audio))
    shapes = {name: {key: list(t.shape) for key, t in tensors.items()} for name, tensors in files.items()}
    declared = {b["name"]: {key: facts["shape"] for key, facts in b["tensors"].items()} for b in manifest["boundaries"]}
    assert shapes == declared
    other = json.loads((traces / "other" / "manifest.json").read_text())
    steps = [boundary["name"] for boundary in other["boundaries"] if boundary["name"].startswith("velocity")]
    assert steps == [f"velocity.{step}" for step in range(5)]


@pytest.mark.parametrize(
    ("name", "tensors", "parts", "label"),
    [
        ("velocity", 1, 1, "velocity.0"),  # two steps are one call
        ("velocity", 1, 3, "velocity.0"),
        ("frames", 1, 0, "frames.0"),
        ("noise", 1, 1, "noise"),
        ("conditions", 0, 1, None),
    ],
)
def test_names_depend_on_the_kind_and_what_is_empty_is_left_out(
    tmp_path: Path, name: str, tensors: int, parts: int, label: str | None
) -> None:
    trace = Trace(tmp_path / "t")
    trace(name, {f"x.{i}": torch.ones(3) for i in range(tensors)}, 0, parts)
    assert [boundary["name"] for boundary in trace.boundaries] == ([label] if label else [])
    assert [path.name for path in (tmp_path / "t").iterdir()] == ([f"000-{label}.safetensors"] if label else [])


def test_equal_traces_and_the_first_difference(traces: Path, tmp_path: Path) -> None:
    same = compare(traces / "a", traces / "same")
    assert same["identical"] and same["first_difference"] is None and len(same["boundaries"]) > 15
    other = compare(traces / "a", traces / "other")
    assert other["first_difference"]["boundary"] == "prompt" and other["only_b"] == ["velocity.1", "velocity.3"]
    assert "first difference: prompt" in summary(other)


def test_a_changed_velocity_is_named(traces: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(traces / "a", tmp_path / "b")
    path = next((tmp_path / "b").glob("*-velocity.2.safetensors"))
    tensors = load_file(path)
    tensors["audio"][3, 5] += 0.25
    save_file(tensors, path)
    result = compare(traces / "a", tmp_path / "b")
    first = result["first_difference"]
    assert (first["boundary"], first["tensor"], first["differing"]) == ("velocity.2", "audio", 1)
    assert first["max"] == pytest.approx(0.25, rel=1e-5)


def test_differences() -> None:
    ones = torch.ones(4)
    assert difference(ones, ones.clone()) == {"equal": True}
    assert difference(ones, None) == {"equal": False, "why": "only in a"}
    assert "shapes" in difference(ones, torch.ones(5))["why"]
    assert difference(ones, ones.double())["max"] == 0 and not difference(ones, ones.double())["equal"]
    assert difference(torch.arange(4), torch.arange(4) * 2)["relative_l1"] == 1.0


def test_a_folder_is_used_once_and_strangers_are_refused(traces: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds files already"):
        Trace(traces / "a")
    (tmp_path / "manifest.json").write_text('{"schema": "other/1"}')
    with pytest.raises(RequestError, match=SCHEMA):
        compare(tmp_path, traces / "a")


@pytest.mark.parametrize("folder", ["", ".", "file", "file/x", "used", "x" * 300, "a\0b", "\udcff"])
def test_folders_that_hold_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    for given in (folder, Path(folder)):
        with pytest.raises(RequestError) as caught:
            Trace(given)
        assert caught.value.field == "trace"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "used"]


@pytest.mark.parametrize("at", ["boundary", "manifest"])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    trace = Trace(tmp_path / "t")

    def full(path: Path, *args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    if at != "manifest":
        monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RequestError, match="No space left on device.; free some room there"):
        trace("velocity", {"video": torch.ones(3)}, 0, 1)
        trace.finish({})
    assert not (tmp_path / "t" / "manifest.json").exists() and not list(tmp_path.glob("t/.*"))
