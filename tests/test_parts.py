"""The parts of a model: what is known of their files before the first of them is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinreel import CheckpointError, Engine, EngineConfig, Request
from twinreel.watch import Event

SHORT = Request("A cat plays piano.", steps=3, duration=0.9)


def make(model: Path, residency: str = "auto") -> Engine:
    return Engine(EngineConfig(model=str(model), device="cpu", threads=2, residency=residency))


def extra(partition: Path) -> str:
    file = partition / "video_vae" / "source" / "model.safetensors"
    save_file(load_file(file) | {"extra": torch.ones(2)}, file)
    return "extra: left over"


def cut(partition: Path) -> str:
    file = partition / "transformer" / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "model-00002-of-00003.safetensors: truncated"


def absent(partition: Path) -> str:
    (partition / "transformer" / "model-00003-of-00003.safetensors").unlink()
    return "1 of 3 shards are absent"


def odd_total(partition: Path) -> str:
    file = partition / "transformer" / "model.safetensors.index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metadata": {"total_size": "many"}}))
    return "metadata.total_size"


def other_dtype(partition: Path) -> str:
    file = partition / "audio_vae" / "model.safetensors"
    save_file({name: value.half() for name, value in load_file(file).items()}, file)
    return "dtype float16, float32 is needed"


@pytest.mark.parametrize("damage", [extra, cut, absent, odd_total, other_dtype])
def test_every_file_a_request_needs_is_looked_at_before_the_first_load(
    tiny_original: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    model = shutil.copytree(tiny_original, tmp_path / "model")
    words, events = damage(model / "FL2VA"), list[Event]()
    with pytest.raises(CheckpointError, match=words):
        make(model).render(SHORT, tmp_path / "a.mp4", watch=events.append)
    assert {event.stage for event in events} <= {"read"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_partition_that_is_not_asked_for_may_be_damaged(tiny_original: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_original, tmp_path / "model")
    cut(model / "Ref2VA")
    assert make(model).generate(SHORT).video.shape[0] == 22


def test_what_is_loaded_needs_its_files_no_more(tiny_all: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_all, tmp_path / "model")
    engine = make(model, residency="all")
    before = engine.generate(SHORT).report["sha256"]
    for file in model.rglob("*.safetensors"):
        file.unlink()
    assert engine.generate(SHORT).report["sha256"] == before
