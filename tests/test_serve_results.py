"""What an earlier attempt has left in a job's folder: it goes on from latents that are whole, and loses none of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from interrupted import T2VA, interrupt
from twinreel import CheckpointError, Engine, RequestError
from twinreel.output import latents_path
from twinreel.output.latents import load_latents
from twinreel.request_json import request_to_json
from twinreel.serve import results as results_module
from twinreel.serve.results import KEPT, VIDEO
from twinreel.serve.worker import perform

OWN = latents_path(Path(VIDEO)).name


@pytest.fixture(scope="module")
def saved(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The latents of the request, sampled."""
    folder = tmp_path_factory.mktemp("saved")
    interrupt(engine, folder)
    return next(folder.glob("*.safetensors")).read_bytes()


class Deaf:
    """Orders that bring no cancel."""

    @staticmethod
    def is_cancelled(turn: int) -> bool:
        return False


def attempt(engine: Engine, folder: Path, keep: bool = True) -> dict[str, Any]:
    """The outcome of a job in `folder`, as the engine's process tells it."""
    told: list[dict[str, Any]] = []
    options = {"keep_latents": keep, "sizes": (6, 64, 64)}
    order = {"folder": str(folder), "body": request_to_json(T2VA), "turn": 1, "options": options}
    perform(engine, order, Deaf(), lambda **event: told.append(event))  # type: ignore[arg-type]
    assert told[-1]["event"] == "done"
    return dict(told[-1]["outcome"])


def leave(folder: Path, names: tuple[str, ...], data: bytes) -> None:
    """One file under all `names`."""
    (folder / names[0]).write_bytes(data)
    for name in names[1:]:
        os.link(folder / names[0], folder / name)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("left", [(OWN, KEPT), (OWN,), (KEPT,)], ids=" ".join)
def test_saved_latents_are_gone_on_from_and_kept(
    engine: Engine, saved: bytes, tmp_path: Path, left: tuple[str, ...], keep: bool
) -> None:
    leave(tmp_path, left, saved)
    outcome = attempt(engine, tmp_path, keep)
    assert outcome["resumed"] and ("latents" in outcome["files"]) == keep == (tmp_path / KEPT).exists()
    assert not (tmp_path / OWN).exists() and (not keep or (tmp_path / KEPT).read_bytes() == saved)


@pytest.mark.parametrize("left", [(OWN, KEPT), (OWN,), (KEPT,)], ids=" ".join)
def test_damaged_latents_go_under_all_their_names(
    engine: Engine, saved: bytes, tmp_path: Path, left: tuple[str, ...]
) -> None:
    leave(tmp_path, left, saved[:-1] + bytes([saved[-1] ^ 1]))
    outcome = attempt(engine, tmp_path)
    assert not outcome["resumed"] and outcome["files"]["latents"] == KEPT
    assert load_latents(tmp_path / KEPT, engine.spec)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("twinreel.engine.check_space", RequestError("output", "about 9 MB are needed, 1 MB are free")),
        ("twinreel.parts.Parts.check_files", CheckpointError("the weights are not whole")),
        ("twinreel.finish._in_use", RequestError("latents", "another run is finishing them")),
        ("twinreel.output.latents.Path.open", OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else type(value).__name__,
)
def test_a_decode_that_fails_leaves_good_latents(
    engine: Engine, saved: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def fail(*words: Any) -> None:
        raise error

    leave(tmp_path, (OWN, KEPT), saved)
    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises((type(error), RequestError)):
            attempt(engine, tmp_path)
    assert attempt(engine, tmp_path)["resumed"]


@pytest.mark.parametrize("keep", [True, False])
def test_latents_are_there_until_an_outcome_is(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def end(folder: Path) -> Path:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(results_module, "outcome_file", end)
        with pytest.raises(ZeroDivisionError):
            attempt(engine, tmp_path, keep)
    assert attempt(engine, tmp_path, keep)["resumed"] and (tmp_path / KEPT).exists() == keep
