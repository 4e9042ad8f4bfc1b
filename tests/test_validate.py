"""validate: frozen requests, setups, verdicts, the matrix, the plot, and the public implementation on tiny weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from twinreel import EngineConfig, cli
from twinreel.errors import ConfigError, RequestError, TwinreelError
from twinreel.output.report import hash_frames, hash_waveform
from twinreel.tools import pareto
from twinreel.tools.compare import compare_media
from twinreel.tools.frozen import bell, clip, frozen_requests, hum, more_seeds, picture, short
from twinreel.tools.setups import Setup, parse_setup
from twinreel.tools.validate import _figures, read_requests, table, validate
from twinreel.tools.verdict import BOUNDS, summarise, verdict

BY_NAME = {named.name: named for named in frozen_requests()}
FROZEN_MEDIA = ["1fa768f79326", "927fab6c9b44", "4ee7fdfe2454", "b14f840180b5"]
FEW = short([BY_NAME["t2va-bounce"], BY_NAME["fl2va-both"], BY_NAME["ref2va-picture-sound"]], 14, 0.9)


@pytest.fixture(scope="module")
def base(tiny_original: Path) -> Setup:
    return Setup(EngineConfig(model=str(tiny_original), device="cpu", threads=2))


def test_frozen_requests_are_frozen() -> None:
    requests = frozen_requests()
    assert len({named.name for named in requests}) == len(requests) >= 5
    assert len({(named.request.prompt, named.request.seed) for named in requests}) == len(requests)
    assert {named.request.resolved_task for named in requests} == {"t2va", "fl2va", "ref2va"}
    assert all(named.request.steps == 50 for named in requests)
    # the media are part of what is frozen: another picture is another set
    hashes = [hash_frames(picture().pixels[None]), hash_frames(clip().frames), hash_waveform(hum().samples),
              hash_waveform(bell().samples)]  # fmt: skip
    assert [each[:12] for each in hashes] == FROZEN_MEDIA
    seeds = more_seeds(20)
    assert len({named.request.seed for named in seeds}) == 20 and {named.request.prompt for named in seeds} <= {
        named.request.prompt for named in requests
    }


def test_setups_are_words_or_files(tmp_path: Path) -> None:
    base = parse_setup("precision=fp32 threads=2 host_memory=1.5 policy=velocity")
    assert base == Setup(EngineConfig(precision="fp32", threads=2, host_memory=1.5), "reuse", None)
    (tmp_path / "test.toml").write_text('policy = "forecast:fast"\nsteps = 30\n')
    test = parse_setup(str(tmp_path / "test.toml"), base)
    assert test == Setup(base.engine, "forecast:fast", 30)
    (tmp_path / "test.json").write_text('{"residency": "stages"}')
    assert parse_setup(str(tmp_path / "test.json")).describe() == {"residency": "stages", "policy": "every-step"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("speed=11", "no field 'speed'"),
        ("fast", "not key=value"),
        ("threads=two", "whole number"),
        ("none.toml", "cannot be read"),
        ("policy=none", "use every-step"),
        ("host_memory=much", "a number is needed"),
        ("components=x", "^components: got 'x'"),
        ("steps=3 steps=4", "'steps' stands twice"),
        ({"model": 5}, "^model: got 5"),
        ({"components": {"x": 1}}, "^components: got 'x'"),
        ({"components": {"transformer": 1}}, "^components\\['transformer'\\]: got 1"),
        ({"threads": 1.5}, "^threads: got 1.5"),
        ({"policy": 5}, "^policy: got 5"),
        ('{"steps": 3, "steps": 4}', "'steps' stands twice in one object"),
    ],
)
def test_bad_setups(text: str | dict, reason: str, tmp_path: Path) -> None:
    if isinstance(text, dict) or text.startswith("{"):
        (tmp_path / "setup.json").write_text(text if isinstance(text, str) else json.dumps(text))
        text = str(tmp_path / "setup.json")
    with pytest.raises((ConfigError, RequestError), match=reason):
        parse_setup(text)


def comparison(psnr: float | None, snr: float | None, ssim: float | None = 0.97, cosine: float = 0.99) -> dict:
    video = {"psnr": psnr, "ssim": ssim, "identical": psnr is None}
    audio = {"snr": snr, "cosine": cosine, "identical": snr is None}
    return {"identical": psnr is None and snr is None, "video": video, "audio": audio}


def test_verdicts() -> None:
    exact, good, fair, bad = (comparison(*values) for values in ((None, None), (41, 31), (36.5, 19), (20, 5)))
    assert verdict(summarise([exact, exact]), "strict") == "exact"
    assert verdict(summarise([exact, good]), "strict") == "close"
    assert verdict(summarise([good, fair]), "strict") == "apart"  # strict looks at the worst
    assert verdict(summarise([good, fair]), "published") == "close"  # published at the mean
    assert verdict(summarise([fair, bad]), "published") == "apart"
    assert (
        verdict(summarise([exact, comparison(None, 29)]), "strict") == "apart"
    )  # exact pictures do not excuse the sound
    assert BOUNDS["published"].least == {
        "video_psnr": 35.86, "video_ssim": 0.9646, "audio_cosine": 0.989, "audio_snr": 18.8,
    }  # fmt: skip
    # eight exact requests do not excuse the ninth
    assert verdict(summarise([exact] * 8 + [comparison(36, 19, 0.90, 0.95)]), "published") == "apart"
    assert verdict(summarise([comparison(41, 31, ssim=None)]), "published") == "apart"
    assert verdict(summarise([comparison(41, 31, ssim=None)]), "strict") == "close"


@pytest.mark.parametrize(
    ("rows", "cells"),
    [
        ([comparison(40, 30, None)], ["40.00 (40.00)", "not measured", "30.00 (30.00)", "0.9900 (0.9900)"]),
        ([comparison(None, 30)], ["exact", "exact", "30.00 (30.00)", "0.9900 (0.9900)"]),
        ([comparison(40, None), comparison(50, None)], ["45.00 (40.00)", "0.9700 (0.9700)", "exact", "exact"]),
    ],
)
def test_figures_without_a_mean_say_why(rows: list[dict], cells: list[str]) -> None:
    point = {"costs": {"calls": 34.0}, "summary": summarise(rows), "warnings": []}
    line = pareto.table({"points": {"reuse": point}, "left_out": {}}).splitlines()[-1]
    assert line == f"| reuse | 34.0 | {' | '.join(cells)} |"
    told = [words.split(" ", 1)[1].replace(" dB", "") for words in _figures(point["summary"]).split(", ")]
    assert told == cells


def test_matrix_on_tiny_weights(base: Setup) -> None:
    test = replace(base, engine=replace(base.engine, residency="stages", adaln="precompute"), policy="forecast:fast")
    report = validate(base, test, FEW, matrix=True)
    json.dumps(report, allow_nan=False)
    cells = report["cells"]
    assert cells["exact features"]["verdict"] == "exact"
    assert cells["exact features"]["costs"]["calls"] == report["base"]["costs"]["calls"] == 13
    assert cells["policy alone"]["costs"]["calls"] == cells["all together"]["costs"]["calls"] == 7
    assert report["matrix"] == {"features_exact": True, "one_hash": True, "differing": []}
    assert [row["sha256"] for row in cells["policy alone"]["rows"]] == [
        row["sha256"] for row in cells["all together"]["rows"]
    ]
    assert cells["policy alone"]["summary"]["exact"] == 0 and report["verdict"] == cells["policy alone"]["verdict"]
    text = table(report)
    assert "3/3 exact" in text and "give one hash" in text and text.endswith(f"verdict (strict): {report['verdict']}")


def test_apart_and_tasks_the_weights_lack(base: Setup, tiny_original: Path) -> None:
    only = replace(base, engine=replace(base.engine, model=str(tiny_original / "FL2VA")))
    report = validate(only, replace(only, steps=3), FEW)
    assert report["verdict"] == "apart" and report["left_out"] == ["ref2va-picture-sound"]
    assert report["cells"]["test"]["setup"]["steps"] == 3
    with pytest.raises(ConfigError, match="no request left"):
        validate(only, only, FEW[2:])


def test_policies_that_never_engage_are_told(base: Setup) -> None:
    report = validate(base, replace(base, policy="forecast"), short(FEW[:1], 4, None))
    assert report["verdict"] == "exact" and "no meaning for 3 calls" in table(report)


def test_requests_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"prompt": "The sea.", "seed": 7}]))
    assert [(named.name, named.request.seed) for named in read_requests(str(path))] == [("mine-0", 7)]
    assert read_requests("frozen") == frozen_requests()
    path.write_text("{}")
    with pytest.raises(RequestError, match="list of requests"):
        read_requests(str(path))


def test_the_plot(base: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "POLICIES", ("reuse", "forecast:fast"))
    monkeypatch.setattr(pareto, "PLAIN", (0.5,))
    monkeypatch.setattr(pareto, "PRECISION", "fp8:blocks=0")
    report = pareto.pareto(base, FEW[:1])
    calls = {name: point["costs"]["calls"] for name, point in report["points"].items()}
    assert calls == {"reuse": 9, "forecast:fast": 7, "7 steps": 6, "fp8:blocks=0": 13} and not report["left_out"]
    drawing = ElementTree.fromstring(pareto.draw(report))
    titles = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(titles) == ["7 steps"] * 2 + ["blocks=0"] * 2 + ["fast"] * 2 + ["reuse"] * 2
    assert pareto.table(report).count("\n") == 5
    assert report["base"]["setup"] == base.describe() and report["base"]["costs"]["calls"] == 13
    report["points"]["reuse"]["warnings"] = ["it never engaged"]
    assert pareto.table(report | {"left_out": {"fp8": "why"}}).endswith(
        "\nfp8 is left out: why\nwarning: reuse: it never engaged"
    )


@pytest.mark.parametrize(
    ("words", "steps", "workers", "reason"),
    [
        ("policy=reuse", (14, 14), 1, "^base: has policy=reuse"),
        ("policy=calibrate", (14, 14), 1, "^base: has policy=calibrate"),
        ("", (14, 15), 1, "^requests: have 14, 15 steps"),
        ("", (14, 14), 3, "^workers: got 3 for 2 requests; use 1 to 2"),
        ("", (14, 14), 0, "^workers: got 0 for 2 requests; use 1 to 2"),
    ],
)
def test_what_would_draw_wrong_figures_is_refused_before_the_first_run(
    base: Setup, words: str, steps: tuple[int, int], workers: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pareto, "Runs", None)  # nothing is run
    requests = [short([named], count, None)[0] for named, count in zip(FEW, steps, strict=False)]
    with pytest.raises((ConfigError, RequestError), match=reason):
        pareto.pareto(parse_setup(words, base), requests, workers=workers)


def test_fewer_plain_steps_are_of_the_steps_that_the_base_has(base: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Setup] = {}

    def keep(right: Setup, shown: dict[str, Setup], *rest: Any) -> None:
        asked.update(shown)
        raise KeyboardInterrupt

    monkeypatch.setattr(pareto, "_measure", keep)
    requests = [short([named], count, None)[0] for named, count in zip(FEW, (3, 4), strict=False)]
    with pytest.raises(KeyboardInterrupt):
        pareto.pareto(replace(base, steps=10), requests)
    assert [name for name in asked if name.endswith("steps")] == ["7 steps", "5 steps", "4 steps", "3 steps"]


def test_workers_find_what_one_finds(base: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "POLICIES", ("reuse",))
    monkeypatch.setattr(pareto, "PLAIN", ())
    monkeypatch.setattr(pareto, "PRECISION", "fp16")
    alone, two = (pareto.pareto(base, FEW[:2], workers=workers) for workers in (1, 2))
    assert alone["points"]["reuse"]["summary"] == two["points"]["reuse"]["summary"]
    assert list(two["points"]) == ["reuse"] and two["left_out"]["fp16"].startswith("precision: ")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_in_a_run_is_named_as_before_it(
    base: Setup, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("a.png")
    Path("mine.json").write_text(json.dumps([BODY, medium("keyframe", "a.png")]))
    monkeypatch.setattr(pareto, "POLICIES", ())
    monkeypatch.setattr(pareto, "PRECISION", "fp16")
    monkeypatch.setattr(pareto, "setups", lambda *given: Path("a.png").unlink(missing_ok=True) or {"fp16": base})
    monkeypatch.setattr(pareto, "check_setups", lambda setups, requests: list(requests))
    with pytest.raises(RequestError, match=r"^requests\[1\]\.conditions\[0\]\.uri: no file at"):
        pareto.pareto(replace(base, steps=3), read_requests("mine.json"), workers=workers)


def test_against_the_public_implementation(tiny_diffusers: Path, tiny_original: Path) -> None:
    pytest.importorskip("diffusers")
    from twinreel.tools import against

    config = EngineConfig(model=str(tiny_diffusers), device="cpu", threads=2)
    report = against.against_diffusers(config, short([BY_NAME["fl2va-first"], BY_NAME["t2va-slide"]], 4, 5.0))
    json.dumps(report, allow_nan=False)
    assert report["identical"], against.table(report)
    for row, own in zip(report["rows"], (["conditions"], ["prompt"]), strict=True):
        expected = {
            "text",
            "layout",
            "noise",
            "velocity.0",
            "velocity.1",
            "velocity.2",
            "latents",
            "waveform",
            "frames.7",
        }
        assert {*expected, *own} <= set(row["compared"])
    assert math.isfinite(np.float64(report["rows"][0]["plan"]["seconds"]))
    with pytest.raises(ConfigError, match="diffusers reads its own only"):
        against.against_diffusers(replace(config, model=str(tiny_original)), FEW)


@pytest.mark.parametrize(
    ("test", "more", "words"),
    [
        ({"steps": -3}, {}, "steps"),
        ({"policy": "reuse"}, {"bounds": "loose"}, "bounds: got 'loose'"),
        ({"engine": {"gpus": 3}}, {}, "gpus: got 3; it must divide"),
        ({"engine": {"ops": "x"}}, {}, "ops: got 'x'"),
        ({"engine": {"model": "/nowhere"}}, {}, "/nowhere: no such folder"),
    ],
)
def test_what_a_later_run_would_refuse_is_refused_before_the_first(
    base: Setup, test: dict[str, Any], more: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinreel.tools.validate.Runs", None)  # nothing is run
    engine = replace(base.engine, **test.get("engine", {}))
    changed = {name: value for name, value in test.items() if name != "engine"}
    with pytest.raises(TwinreelError, match=words):
        validate(base, replace(base, engine=engine, **changed), FEW, **more)


def test_bounds_that_need_scikit_image_are_refused_where_it_is_absent(
    base: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinreel.tools.validate.Runs", None)  # nothing is run
    monkeypatch.setattr("twinreel.tools.verdict.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="^bounds: published needs video_ssim, which needs scikit-image; pip install"):
        validate(base, replace(base, policy="reuse"), FEW, bounds="published")


def test_all_cells_of_the_matrix_are_checked_before_the_first_run(base: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Setup] = []

    def keep(setups: Sequence[Setup], requests: Any) -> None:
        checked.extend(setups)
        raise KeyboardInterrupt

    monkeypatch.setattr("twinreel.tools.validate.Runs", None)  # nothing is run
    monkeypatch.setattr("twinreel.tools.validate.check_setups", keep)
    other = replace(base.engine, residency="stages")
    with pytest.raises(KeyboardInterrupt):
        validate(base, Setup(other, "reuse", 5), FEW, matrix=True)
    assert checked == [base, Setup(base.engine, "reuse", 5), Setup(other), Setup(other, "reuse", 5)]


BODY = {"prompt": "The sea.", "target": {"duration_seconds": 0.9}}


def medium(role: str, uri: str) -> dict[str, Any]:
    rest = {"role": role} | ({"frame_index": 0} if role == "keyframe" else {})
    return BODY | {"conditions": [{"type": "image", "uri": uri} | rest]}


@pytest.mark.parametrize(
    ("body", "setup", "words"),
    [
        (medium("reference", "none.png"), "", r"^requests\[1\]\.conditions\[0\]\.uri: no file at"),
        (medium("keyframe", "text.png"), "", r"^requests\[1\]\.conditions\[0\]\.uri: "),
        (BODY | {"seed": "x"}, "", r"^requests\[1\]\.seed: "),
        (BODY | {"sed": 1}, "", r"^requests\[1\]\.sed: is not a field; did you mean seed"),
        (BODY | {"num_inference_steps": 1}, "", r"^requests\[1\]\.num_inference_steps: "),
        (3, "", r"^requests\[1\]\.request: got int"),
        (BODY | {"policy": "reuse"}, "", r"^requests\[1\]\.policy: would be replaced by the setup's"),
        (BODY | {"policy": "none"}, "", r"^requests\[1\]\.policy: got 'none'"),
        (BODY, "steps=1", r"^steps: "),
        (BODY, "policy=adaptive:profile=none.json", r"^policy: profile 'none.json' cannot be read"),
    ],
)
def test_the_request_of_a_list_is_named_before_the_first_run(
    base: Setup, body: Any, setup: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twinreel.tools.validate.Runs", None)  # nothing is run
    Path("text.png").write_text("text")
    Path("mine.json").write_text(json.dumps([BODY, body]))
    with pytest.raises(RequestError, match=words):
        validate(base, parse_setup(setup or "steps=3", base), read_requests("mine.json"))


@pytest.mark.parametrize(
    "name", ["mine.json", "picture.png", "picture.json", "weights/config.json", "set.toml", "old.json"]
)
def test_no_target_takes_the_place_of_what_the_runs_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twinreel.tools.commands.validate", None)
    Path("weights").mkdir()
    for path in ("picture.png", "weights/config.json", "old.json"):
        Path(path).write_text("old")
    Path("mine.json").write_text(json.dumps([medium("reference", "picture.png")]))
    Path("set.toml").write_text("steps = 3")
    words = ["validate", "--base", "model=weights", "--test", "set.toml", "--requests", "mine.json", "-o", name]
    assert cli.main([*words, *(["--overwrite"] if name != "old.json" else [])]) == 2
    said = "old.json exists" if name == "old.json" else "would take the place of"
    assert said in capsys.readouterr().err


def test_a_sound_that_is_not_finite_is_apart_and_does_not_end_the_rest() -> None:
    sound = np.zeros((2, 3200), np.float32)
    broken = sound.copy()
    broken[0, 0] = np.nan
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    media = {"exact": (sound, sound), "same": (broken, broken), "signed": (sound, -sound), "broken": (sound, broken)}
    rows = {name: compare_media((frames, a), (frames, b)) for name, (a, b) in media.items()}
    assert [row["identical"] for row in rows.values()] == [True, True, False, False]
    for bounds in BOUNDS:
        assert verdict(summarise([rows["exact"], rows["same"]]), bounds) == "exact"
        assert verdict(summarise(list(rows.values())), bounds) == "apart"
    assert verdict(summarise([rows["signed"]]), "strict") == "close"


def test_more_seeds_have_a_limit() -> None:
    for count in (-3, 10**9):
        with pytest.raises(RequestError, match="^more_seeds: got"):
            more_seeds(count)
