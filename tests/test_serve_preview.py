"""Previews: a linear map is found again from its own pictures, and a run with a map tells of forming pictures."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from twinreel import Engine, EngineConfig, Keyframe, Picture, Request
from twinreel.demo import bundled_model
from twinreel.output.placing import replacing
from twinreel.serve import preview
from twinreel.serve.fit_preview import behind, main
from twinreel.serve.preview import Previewer, fit_map, load_map, paint
from twinreel.spec import Spec

RNG = np.random.default_rng(4)


def test_a_map_is_found_again() -> None:
    rows = RNG.normal(0, 0.1, (25, 3)).astype(np.float32)
    latents = RNG.normal(size=(500, 24)).astype(np.float32)
    found = fit_map(latents, latents @ rows[:-1] + rows[-1])
    assert np.allclose(found, rows, atol=1e-4)
    picture = paint(RNG.normal(size=(24, 2, 3, 4)).astype(np.float32), rows)
    assert picture.shape == (2, 3, 4, 3) and picture.dtype == np.uint8


def test_weights_without_a_map_have_no_preview(tmp_path: Path) -> None:
    assert load_map(tmp_path) is None
    for text in ("{", "[]", '{"rows": [[1, 2]]}', '{"rows": "x"}'):
        (tmp_path / preview.MAP).write_text(text)
        assert load_map(tmp_path) is None


def test_a_run_shows_what_forms(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last preview is the map of the final latents, whatever stands before the target among the rows."""
    monkeypatch.setattr(preview, "SHARE", 1e9)
    model = Path(shutil.copytree(tiny_original, tmp_path / "model"))
    engine = Engine(EngineConfig(model=str(model), device="cpu", threads=2))
    channels = engine.spec.video.latent_channels
    rows = RNG.normal(0.5, 0.1, (channels + 1, 3)).astype(np.float32)
    (model / preview.MAP).write_text(json.dumps({"rows": rows.tolist()}))
    request = Request("p", keyframes=(Keyframe(Picture(np.zeros((64, 96, 3), np.uint8))),), duration=0.9, steps=4)
    made, final = [], {}
    previewer = Previewer(engine, tmp_path, (7, 96, 64), made.append)

    def boundary(name: str, values: dict, part: int = 0, parts: int = 1) -> None:
        previewer.boundary(name, values, part)
        if name == "latents":
            final["video"] = values["video"][0].numpy()

    engine.generate(request, boundary=boundary)
    assert final["video"].shape[1] == 7 and made == [preview.PICTURE] * 3
    with Image.open(tmp_path / preview.PICTURE) as picture:
        expected = paint(final["video"], rows)
        assert picture.n_frames == 7 and picture.size == (expected.shape[2], expected.shape[1])
        assert np.abs(np.asarray(picture.convert("RGB"), int) - expected[0]).mean() < 16  # WebP is lossy


class Disk:
    """Stands for `replacing`: fails as it is told, a time for each word, and then no more."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)

    def __call__(self, target: Path) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        return replacing(target)


@pytest.mark.parametrize(
    ("faults", "made", "told"),
    [
        ([], 3, 0),
        ([OSError(errno.ENOSPC, "No space left on device")] * 2, 1, 1),
        ([FileNotFoundError(errno.ENOENT, "the folder is gone"), RuntimeError("WebP"), MemoryError()], 0, 1),
    ],
    ids=["none", "full for a while", "all"],
)
def test_a_preview_that_cannot_be_written_costs_no_step(
    faults: list[Exception], made: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(preview, "SHARE", 1e9)
    monkeypatch.setattr(preview, "replacing", Disk(*faults))
    (tmp_path / preview.MAP).write_text(json.dumps({"rows": RNG.normal(0.5, 0.1, (25, 3)).tolist()}))
    shown: list[str] = []
    engine: Any = SimpleNamespace(spec=Spec(), weights=SimpleNamespace(path=tmp_path))
    previewer = Previewer(engine, tmp_path, (7, 96, 64), shown.append)
    rows = torch.zeros(7 * (64 // 32) * (96 // 32), Spec().dit.video_row)
    previewer.boundary("sigmas", {"video": torch.tensor([1.0, 0.7, 0.3, 0.0])}, 0)
    previewer.boundary("noise", {"video": rows}, 0)
    for step in range(3):
        previewer.boundary("velocity", {"video": rows}, step)
    assert shown == [preview.PICTURE] * made and (tmp_path / preview.PICTURE).exists() == bool(made)
    assert len(capsys.readouterr().err.splitlines()) == told


def test_the_pixels_behind_each_latent() -> None:
    frames = np.zeros((22, 32, 48, 3), np.uint8)
    frames[0] = 255  # the first latent stands for one frame, the second for the next four
    frames[1:3, :16, 16:32, 0] = 255
    means = behind(frames, 16, 4)
    assert means.shape == (7, 2, 3, 3)
    assert (means[0] == 1).all() and means[1, 0, 1].tolist() == [0.5, 0, 0] and means[2:].max() == 0
    assert means[1].sum() == 0.5


@pytest.mark.parametrize(
    ("model", "clip", "code"), [("model", "absent", 2), ("model", "text", 2), ("absent", "text", 4)]
)
def test_fitting_says_what_it_cannot_use(
    model: str, clip: str, code: int, tiny_original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(tiny_original)
    (tmp_path / "text").write_text("no clip")
    assert main(["--model", str(tmp_path / model), str(tmp_path / clip)]) == code
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 3 and told.err.startswith("twinreel: ") and not told.out
    assert not (tmp_path / "model" / preview.MAP).exists()


def test_the_bundled_model_has_a_map_of_its_colours() -> None:
    rows = load_map(bundled_model())
    assert rows is not None and rows.shape == (25, 3) and np.isfinite(rows).all() and np.abs(rows).max() > 0.01
