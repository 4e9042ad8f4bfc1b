"""Files a tool writes: refused beforehand, whole or not at all, no loss where one fails; and numbers that JSON has not."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from twinreel import Media, cli
from twinreel.tools.compare import compare, summary
from twinreel.tools.plots import Frame, draw_lines
from twinreel.tools.targets import json_text, plain

FRAMES = np.arange(2 * 48 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(2, 48, 64, 3)
SOUND = (np.sin(np.arange(2 * 6400) / 7).reshape(2, 6400) / 2).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in ("a", "same"):
        Media(FRAMES, SOUND).save(folder / f"{name}.mp4")
    return folder


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--page a.mp4", "would take the place of .*a.mp4, which is read"),
        ("--overwrite --page b.mp4", "would take the place of .*b.mp4, which is read"),
        ("-o a.json", "would take the place of a.json, which stands beside a.mp4"),
        ("--overwrite -o b.json", "would take the place of b.json, which stands beside b.mp4"),
        ("--overwrite -o link.json", "would take the place of a.mp4"),
        ("-o old.txt", "old.txt exists\n  name another, or replace it by --overwrite"),
        ("--page old.txt", "old.txt exists"),
        ("-o new --page new", "is the file of output as well"),
        ("-o new --page ./sub/../new", "is the file of output as well"),
        ("--overwrite -o to-old", "is a link"),
        ("--overwrite -o sub", "is a folder"),
        ("--overwrite -o .", "the current folder"),
        ("--overwrite -o /dev/null", "is a pipe, socket or device"),
        ("-o none/x.json", "cannot be written \\(No such file"),
    ],
)
def test_targets_are_refused_before_the_work(
    some: Path, words: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("twinreel.tools.commands.compare", None)
    Path("link.json").symlink_to("a.mp4")
    Path("old.txt").write_text("old")
    Path("to-old").symlink_to("old.txt")
    Path("sub").mkdir()
    before = state(some)
    assert cli.main(["compare", "a.mp4", "b.mp4", *words.split()]) == 2
    assert re.search(reason, capsys.readouterr().err) and state(some) == before


@pytest.mark.parametrize("fault", ["", "-o", "--page", "taken meanwhile"])
def test_what_was_found_outlives_a_file_that_cannot_be_written(
    some: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.json").write_text("old")
    lost = {"": "", "-o": "out.json", "--page": "page.html", "taken meanwhile": "page.html"}[fault]
    write = Path.write_text

    def failing(path: Path, *args: object, **kwargs: object) -> int:
        if fault == "taken meanwhile":
            write(some / "page.html", "somebody else's")
        elif lost and path.name.startswith(f".{lost}."):
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", failing)
    words = ["compare", "a.mp4", "b.mp4", "-o", "out.json", "--page", "page.html", "--no-ssim", "--json"]
    words += ["--overwrite"] if fault != "taken meanwhile" else []
    if fault == "taken meanwhile":
        Path("out.json").unlink()
    assert cli.main(words) == int(bool(fault))
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["identical"] and [each["path"] for each in told.get("unwritten", [])] == [lost] * bool(lost)
    assert (f"{lost} was not written" in err) == bool(lost)
    assert (
        json.loads(Path("out.json").read_text())["identical"]
        if fault != "-o"
        else Path("out.json").read_text() == "old"
    )
    if fault == "taken meanwhile":
        assert Path("page.html").read_text() == "somebody else's"
    assert not list(some.glob(".*"))


def with_nan(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.reshape(-1)[[1, 5]] = np.nan, np.inf
    return changed


@pytest.mark.parametrize("kind", ["npz", "wav", "safetensors", "json"])
@pytest.mark.parametrize("both", [False, True], ids=["one", "both"])
def test_what_is_not_finite_is_null_and_said(tmp_path: Path, kind: str, both: bool) -> None:
    a, b = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for path, sound in ((a, with_nan(SOUND) if both else SOUND), (b, with_nan(SOUND))):
        if kind == "npz":
            np.savez(path, frames=FRAMES, audio=sound)
        elif kind == "wav":
            header = Media(FRAMES, SOUND).save(path).read_bytes()
            path.write_bytes(header[: -sound.nbytes] + sound.T.astype("<f4").tobytes())
        elif kind == "safetensors":
            save_file({"x": torch.from_numpy(sound)}, path)
        else:
            path.write_text(json.dumps({"sha256": {}, "snr": float(sound[0, 1]), "list": sound[0, :6].tolist()}))
    result = compare(a, b)
    text = summary(result)
    assert json.loads(json_text(result)) == json.loads(json.dumps(result, allow_nan=False))
    if kind != "json":
        assert result["identical"] is both
    assert ("not finite" in text) is not (both and kind in ("json", "safetensors")), text
    assert "nan" not in text.lower()


def test_the_page_draws_what_is_finite() -> None:
    assert "nan" not in draw_lines(Frame("t", "x", "y"), {"A": [1.0, math.nan, math.inf, 2.0]})
    assert plain({"a": [1.0, math.nan], "b": {"c": -math.inf}}) == {
        "a": [1.0, None], "b": {"c": None}, "not_finite": ["a[1]", "b.c"],
    }  # fmt: skip
