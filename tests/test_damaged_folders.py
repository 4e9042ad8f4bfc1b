"""Checkpoint folders from which something is missing: refused where it is damage, noted where the layout allows it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from twinreel.errors import CheckpointError
from twinreel.weights import locate, read_spec


def gone(*names: str) -> Callable[[Path], object]:
    def remove(root: Path) -> None:
        for name in names:
            shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()

    return remove


def nowhere(name: str) -> Callable[[Path], object]:
    def link(root: Path) -> None:
        (root / name).unlink()
        (root / name).symlink_to("nowhere")

    return link


def beside(root: Path) -> None:
    """All tokenizer files in another folder too, as the release has them."""
    shutil.copytree(root / "FL2VA/tokenizer", root / "FL2VA/processor", dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (gone("FL2VA/tokenizer/vocab.json"), "FL2VA/tokenizer: tokenizer.json or vocab.json is needed, found merges"),
        (gone("FL2VA/processor/preprocessor_config.json"), "FL2VA/processor: preprocessor_config.json is needed"),
        (gone("FL2VA/processor/video_preprocessor_config.json"), "video_preprocessor_config.json: cannot be read"),
        (gone("FL2VA/model_index.json"), "FL2VA: has a transformer/ and no model_index.json"),
        (nowhere("FL2VA/model_index.json"), "FL2VA/model_index.json: is a link that leads nowhere"),
        (nowhere("FL2VA/tokenizer/vocab.json"), "FL2VA/tokenizer/vocab.json: is a link that leads nowhere"),
        (nowhere("FL2VA/audio_vae/metadata.json"), "FL2VA/audio_vae/metadata.json: is a link that leads nowhere"),
    ],
)
def test_a_damaged_folder_is_not_replaced_by_another(
    original: Path, damage: Callable[[Path], object], message: str
) -> None:
    beside(original)
    damage(original)
    with pytest.raises(CheckpointError, match=message):
        read_spec(locate(original))


@pytest.mark.parametrize(
    ("layout", "damage", "note"),
    [
        ("original", gone("FL2VA/tokenizer"), "FL2VA: no tokenizer/: its files are taken from processor/"),
        ("original", gone("FL2VA/processor"), "no processor/: its pixel budgets and normalisation are the release's"),
        ("diffusers", gone("scheduler", "audio_scheduler"), "no scheduler/ and no audio_scheduler/: the sigma shifts"),
        ("diffusers", gone("model_index.json"), "no model_index.json: canvases, durations and tasks are the release's"),
    ],
)
def test_what_may_be_absent_is_noted(
    original: Path, diffusers: Path, layout: str, damage: Callable[[Path], object], note: str
) -> None:
    root = original if layout == "original" else diffusers
    if layout == "original":
        beside(root)
    damage(root)
    assert len(notes := locate(root).notes) == 1 and note in notes[0]


def test_one_scheduler_of_two(diffusers: Path) -> None:
    shutil.rmtree(diffusers / "scheduler")
    with pytest.raises(CheckpointError, match="/scheduler/scheduler_config.json: cannot be read"):
        read_spec(locate(diffusers))
