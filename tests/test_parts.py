"""The parts of a model: what is known of their files before the first of them is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinreel import Cancelled, CheckpointError, Engine, EngineConfig, Request, parts
from twinreel.config import resolve
from twinreel.parallel import Axis, Parallel
from twinreel.watch import Event
from twinreel.weights import locate
from twinreel.weights.stored import StoredWeights

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


@pytest.mark.parametrize("residency", ["stages", "all"])
def test_what_was_loaded_before_a_cancel_goes_where_the_residency_says(tiny_all: Path, residency: str) -> None:
    engine = make(tiny_all, residency)

    def watch(event: Event) -> None:
        if event.stage == "load" and event.note.startswith("dit") and event.done:
            engine.cancel()

    with pytest.raises(Cancelled):
        engine.generate(SHORT, watch)
    held = [name for name in engine.parts.loaded if name.startswith("dit")]
    assert held == ([] if residency == "stages" else ["dit:miniature"])
    assert engine.generate(SHORT).report["plan"]["calls"] == 2


@dataclass(frozen=True)
class Beside(Axis):
    """A control axis whose other rank has `free` bytes; what rank 0 decides is its own."""

    free: int = 0

    def tell_all(self, value: Any) -> list[Any]:
        return [value, self.free]

    def from_first(self, value: Any) -> Any:
        return value


def test_the_fullest_card_decides_for_all_ranks(tiny_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_device", lambda choices: 100 << 30)
    alone, choices = Parallel.single(), resolve(EngineConfig(device="cpu"), 32)
    weights = StoredWeights(locate(tiny_all, {}))
    for free in (5 << 30, 200 << 30):
        made = parts.Parts(weights, choices, "auto", parallel=replace(alone, control=Beside("control", 2, free=free)))
        assert made._free.device == min(free, 100 << 30)
