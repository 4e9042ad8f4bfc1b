"""One host's GPUs, one topology after the other: on ranks of a CPU, at tiny sizes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinreel import cli
from twinreel.errors import ConfigError
from twinreel.machine import Memory
from twinreel.scratch import LOCK
from twinreel.tools import bench_scaling, random_weights
from twinreel.tools.bench import main
from twinreel.tools.scaling_record import Record, beside_one, each_card


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sp1", ["sp1"]),
        ("sp2", ["sp2:plain", "sp2:packed", "sp2:overlapped"]),
        ("sp2:overlap", ["sp2:overlapped"]),
        ("sp2tp2:plain", ["sp2tp2:plain"]),
        ("tp4", ["tp4"]),
        ("sp4:vae", ["sp4:vae"]),
        ("sp2tp2:share", ["sp2tp2:share"]),
        (
            "sp2:whole-balanced",
            ["sp2:overlapped:whole-balanced", "sp2:packed:whole-balanced", "sp2:plain:whole-balanced"],
        ),
    ],
)
def test_cases_of_scaling(text: str, names: list[str]) -> None:
    cases = bench_scaling.parse_case(text)
    assert [case.name for case in cases] == names
    assert all(bench_scaling.parse_case(case.name) == [case] for case in cases)


def changed(words: list[str], more: str) -> list[str]:
    """`words` with the flags in `more`, each of them once."""
    kept = list(words)
    for flag in [word for word in more.split() if word.startswith("--") and word in words]:
        del kept[kept.index(flag) : kept.index(flag) + 2]
    return kept + more.split()


WHOLE = "sp3:plain"
HERE = ["--device", "cpu", "--text", "5"]


@pytest.mark.parametrize(
    ("more", "names", "told"),
    [
        ("--shape wide", "sp1 sp2:plain sp2:overlapped tp2 sp1:vae sp2:vae sp4:share tp4:share sp2tp2:share sp8:share", []),
        ("--shape bundled", "sp1 sp1:vae sp3:share", []),
        ("--shape bundled --gpus 3", "sp1 sp3:plain sp1:vae sp3:vae", []),
        ("--shape bundled --gpus 3 --whole", f"sp1 sp3:plain sp1:vae sp3:vae {WHOLE}:whole {WHOLE}:whole-balanced", []),
        ("--shape wide --only sp2:whole", "sp2:overlapped:whole", []),
        ("--shape bundled --only sp3:whole", "sp3:plain:whole", []),
        ("--shape wide --only sp4:plain", "sp4:plain", []),  # somebody's own word, on two cores
        ("--shape bundled --only sp3", "sp3:plain", ["sp3:packed: attend: packed: needs", "sp3:overlapped: attend: over"]),
    ],
)  # fmt: skip
def test_what_runs_is_what_can(
    more: str, names: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    measured: list[bench_scaling.Case] = []
    monkeypatch.setattr(bench_scaling, "measure", lambda cases, *_: measured.extend(cases))
    monkeypatch.setattr(bench_scaling.os, "cpu_count", lambda: 2)
    out = tmp_path / "out.json"
    words = ["scaling", str(out), *HERE, "--ops", "reference", *more.split()]
    assert main(words) == 0
    assert sorted(case.name for case in measured) == sorted(names.split())
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert len(lines) == len(told)
    assert all(line.startswith(f"bench scaling: without {why}") for line, why in zip(lines, told, strict=True))
    out.write_text("mine")
    assert main(words) == 3 and not capsys.readouterr().out, "a refusal comes alone"


def test_ranks_whose_weights_do_not_fit_are_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scaling, "Pool", pool_is_wrong)
    monkeypatch.setattr(random_weights, "host_memory", lambda: Memory(1 << 40, 180 << 30))
    words = ["scaling", str(tmp_path / "out.json"), "--device", "cpu", "--only"]
    with pytest.raises(AssertionError, match="about to be started"):  # twice 75 GiB
        main([*words, "sp2:plain"])
    for case in ("sp1,sp3:plain --gpus 2", "sp4:plain", "sp2:plain:whole"):
        assert main([*words, *case.split()]) == 3
    monkeypatch.setattr(random_weights, "host_memory", lambda: Memory(1 << 40, 70 << 30))
    capsys.readouterr()
    assert main([*words, "sp1"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "74.8 GiB of weights, and 70.0 GiB of host memory are free" in lines[1]
    assert not list(tmp_path.iterdir())


def test_cards_are_tried_in_a_process_that_ends_before_the_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tried = tmp_path / "out.json", list[str]()

    def elsewhere(work: Callable[[argparse.Namespace], object], parts: list[argparse.Namespace]) -> list[object]:
        tried.append(parts[0].device)
        parts[0].device = "cpu"  # there is no card here
        return [work(parts[0])]

    monkeypatch.setattr(bench_scaling, "divide", elsewhere)
    monkeypatch.setattr(bench_scaling, "measure", lambda cases, *_: tried.extend(case.name for case in cases))
    words = ["scaling", str(out), "--shape", "wide", "--ops", "reference", "--only", "sp1"]
    assert main(words) == 0 and tried == ["cuda", "sp1"]
    assert main([*words, "--device", "cpu"]) == 0 and tried == ["cuda", "sp1", "sp1"]


def test_an_empty_flag_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", str(tmp_path / "out.json"), *HERE]
    assert (
        cli.main(["bench", *words, "--only", ""]) == 2
        and "cannot be run: --only\n  is empty" in capsys.readouterr().err
    )
    assert cli.main(["bench", *words, "--only", " "]) == 3 and "--only\n  '' is no mesh" in capsys.readouterr().err


def test_a_rank_that_is_late_is_told_with_its_limit(tmp_path: Path) -> None:
    pool = object.__new__(bench_scaling.Pool)
    ours, theirs = multiprocessing.Pipe()
    pool.world, pool._lines, pool._processes = 1, [ours], []
    (case,) = bench_scaling.parse_case("sp1")
    assert pool.run(case, 0.01) == ([], "rank [0] did not answer within 0.01 s")
    theirs.close()


def pool_is_wrong(*_: object) -> None:
    raise AssertionError("a process was about to be started")


def test_scaling_measures_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scaling.json"
    words = ["scaling", str(out), "--shape", "wide", "--device", "cpu", "--frames", "22", "--text", "5"]
    words += ["--seconds", "0.01", "--calls", "2", "--json"]
    words += ["--only", "sp1,sp2:plain,sp2:overlap,sp2:whole,sp2:share,tp2:share"]
    assert main(words) == 0
    told = capsys.readouterr()
    cases = json.loads(out.read_text())["cases"]
    assert json.loads(told.out)["cases"] == cases and len(told.out.splitlines()) == 1
    assert len(cases["sp1"]["cards"]) == 2 and cases["sp1"]["cards"][0] == cases["sp1"]["seconds"]
    for name in ("sp2:plain", "sp2:overlapped"):
        assert set(cases[name]["times"]) == {"slowest", "first"} and "x of the slowest card" in cases[name]["beside"]
    for name in ("sp2:share", "tp2:share"):  # one rank's work, so no more than its part of one rank's
        assert cases[name]["ceiling"] == cases["sp1"]["seconds"] / cases[name]["seconds"] > 0
        assert len(cases[name]["ranks"]) == 1 and "sha256" not in cases[name]
    calls = [cases[name] for name in ("sp1", "sp2:plain", "sp2:overlapped")]
    assert len({case["sha256"] for case in calls}) == 1
    assert calls[1]["distance_to_one"] == {"video": 0.0, "audio": 0.0}
    assert calls[1]["ranks"][1]["exposed_seconds"] > 0
    whole = cases["sp2:overlapped:whole"]["ranks"][0]
    assert {"encode", "denoise", "decode"} <= whole["stages"].keys() == whole["began"].keys()
    assert main(changed(words, "--seconds 9 --gpus 2 --budget 5")) == 0  # everything is there
    assert capsys.readouterr().out.startswith("{")
    monkeypatch.setattr(bench_scaling, "Pool", pool_is_wrong)
    with pytest.raises(AssertionError, match="about to be started"):
        main(changed(words, "--only sp1,sp4:plain"))  # on two more cards
    before, base = out.read_bytes(), tmp_path / "scaling.one.safetensors"
    for other, told in (("--text 6 --calls 3", "text 5, calls 2"), ("--shape tiny --only sp1", "shape 'wide'")):
        assert main(changed(words, other)) == 3 and told in capsys.readouterr().err
    base.write_bytes(b"mine")
    assert main(words) == 3 and str(base) in capsys.readouterr().err
    assert out.read_bytes() == before and base.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("--only sp3x", 3),
        ("--only sp0", 3),
        ("--only sp1,tp0", 3),
        ("--only sp1:plain", 3),
        ("--only sp1:share", 3),
        ("--only sp2:plain:share", 3),
        ("--only sp2:vae:plain", 3),
        ("--only sp2:vae:whole", 3),
        ("--only sp2:sideways", 3),
        ("--only sp2:packed --ops reference", 3),  # needs Triton's table
        ("--only sp3", 3),  # 56 heads
        ("--only sp4 --gpus 2", 3),
        ("--only sp2:overlapped --shape tiny", 3),  # a head a rank cannot be halved
        ("--calls 0", 3),
        ("--calls 5000", 2),
        ("--gpus 0", 3),
        ("--seconds nan", 3),
        ("--budget inf", 3),
        ("--case-limit -1", 3),
        ("--ops magic", 3),
        ("--attention fa3", 3),
        ("--frames 9999", 2),
        ("--frames 0", 3),
        ("--size 64", 2),
        ("--text 9999", 2),
        ("--device cuda", 3),
    ],
)
def test_scaling_refuses_before_there_are_ranks(
    more: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if more == "--device cuda" and torch.cuda.is_available():
        pytest.skip("it can")
    monkeypatch.setattr(bench_scaling, "Pool", pool_is_wrong)
    words = ["scaling", str(tmp_path / "out.json"), "--shape", "wide", "--device", "cpu", "--frames", "22"]
    assert main(changed(words, more)) == code
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 3 and told.err.startswith("twinreel: ") and not told.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("absent/out.json", None, 2),
        (".", None, 2),
        ("out.json", b"", 3),
        ("out.json", b"\xff\x00\x01", 3),
        ("out.json", b"{", 3),
        ("out.json", b"[1]", 3),
        ("out.json", b'{"cases": {}, "errors": {}}', 3),
        ("out.json", b'{"settings": {}, "cases": {"sp1": 1}, "errors": {}}', 3),
        ("out.json", b'{"settings": {"shape": "wide"}, "cases": {}, "errors": {}}', 3),
        ("out.one.safetensors", b"weights", 3),
    ],
)
def test_scaling_leaves_other_files_alone(
    name: str, content: bytes | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(bench_scaling, "Pool", pool_is_wrong)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    out = tmp_path / name.replace(".one.safetensors", ".json")
    assert main(["scaling", str(out), "--shape", "wide", "--device", "cpu", "--frames", "22", "--only", "sp1"]) == code
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 3 and not told.out
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content] * (content is not None)


def test_a_record_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "a.json.new"
    mine.write_text("mine")
    record = Record(tmp_path / "a.json", {"text": 5})
    assert not (tmp_path / "a.json").exists()
    record.keep("sp1", None, "Traceback\nit broke", 1.0)
    record.keep("sp1", {"line": "fine", "seconds": 1.0}, None, 1.0)
    again = Record(tmp_path / "a.json", {"text": 5})
    assert again.has("sp1") and not again.values["errors"] and mine.read_text() == "mine"
    other = Record(tmp_path / "b.json", {})
    (tmp_path / "b.json").write_text("came meanwhile")
    with pytest.raises(ConfigError, match="File exists"):
        other.keep("sp1", {"line": "fine"}, None, 1.0)
    assert (tmp_path / "b.json").read_text() == "came meanwhile"


ONE = {"seconds": 5.0, "line": "5.0000 s a call", "cards": [5.0, 5.5, 8.0], "cards_ran": "at once"}
OLD = {"seconds": 5.0, "line": "5.0000 s a call"}


@pytest.mark.parametrize(
    ("one", "world", "times", "told"),
    [
        (
            ONE,
            2,
            {"slowest": 2.2, "first": 2.0},
            "2.20x of the slowest card, 2.00x of the first (one card each, at once: 5.0000 5.5000 s)",
        ),
        (
            ONE,
            3,
            {"slowest": 3.2, "first": 2.0},
            "3.20x of the slowest card, 2.00x of the first (one card each, at once: ",
        ),
        (ONE, 4, {"first": 2.0}, "2.00x of the first card"),
        (OLD, 2, {"first": 2.0}, "2.00x of the first card"),
    ],
)
def test_a_mesh_is_held_against_the_slowest_of_its_own_cards(
    one: dict[str, Any], world: int, times: dict[str, float], told: str
) -> None:
    mesh = {"seconds": 2.5, "line": "2.5000 s a call"}
    cases: dict[str, Any] = {f"sp{world}:plain": mesh, "sp1": one}
    lines = beside_one(cases)
    found = cases[f"sp{world}:plain"]
    assert (
        found["times"] == pytest.approx(times)
        and told in found["beside"]
        and lines == {f"sp{world}:plain": found["beside"]}
    )
    assert found["line"] == mesh["line"] and not beside_one(cases), "there is nothing new"


@pytest.mark.parametrize("order", [("sp1", "tp2", "sp2:share", "sp2:vae"), ("sp2:vae", "sp2:share", "tp2", "sp1")])
def test_what_stands_beside_one_card_does_not_depend_on_the_order(
    order: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"sp1": ONE, "tp2": {"seconds": 2.5}, "sp2:share": {"seconds": 2.0}, "sp2:vae": {"decode": 1.0}}
    for case in order:  # each in a run of its own
        Record(tmp_path / "a.json", {}).keep(case, {"line": "measured", **figures[case]}, None, 1.0)
    cases = Record(tmp_path / "a.json", {}).values["cases"]
    assert cases["tp2"]["times"] == {"slowest": 2.2, "first": 2.0} and cases["sp2:share"]["ceiling"] == 2.5
    assert "times" not in cases["sp1"] and cases["sp2:vae"] == {"took": 1.0, "line": "measured", "decode": 1.0}
    told = capsys.readouterr().out
    assert told.count("2.20x of the slowest card") == told.count("at most 2.50x of one card") == 1


def test_the_first_cards_figures_are_those_of_the_case() -> None:
    results = [
        {"seconds": seconds, "line": f"{seconds} s", "sha256": sha} for seconds, sha in ((5.0, "a"), (5.5, None))
    ]
    assert each_card(results) == {
        "seconds": 5.0, "sha256": "a", "line": "5.0 s; cards at once: 5.0000 5.5000 s", "cards": [5.0, 5.5],
        "cards_ran": "at once",
    }  # fmt: skip
    assert each_card(results[:1])["line"] == "5.0 s", "one card has nothing beside it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_scaling_that_is_stopped_leaves_no_process(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[bench_scaling.Pool] = []
    real = bench_scaling.Pool.run

    def run(pool: bench_scaling.Pool, *_: object) -> Any:
        pools.append(pool)
        os.kill(os.getpid(), number)
        return real(pool, *_)

    monkeypatch.setattr(bench_scaling.Pool, "run", run)
    words = ["scaling", str(tmp_path / "out.json"), "--shape", "wide", "--device", "cpu", "--frames", "22"]
    assert cli.main(["bench", *words, "--only", "sp1"]) == 128 + number
    assert "goes on from what its file holds" in capsys.readouterr().err
    assert pools and not any(process.is_alive() for pool in pools for process in pool._processes)


def test_a_killed_scaling_leaves_what_the_next_run_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is one of `scratch`, which locks it for as long as its process lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bench_scaling, "start", lambda process: None)
    monkeypatch.setattr(bench_scaling.Pool, "close", lambda pool: pool._held.close())
    pool = bench_scaling.Pool(1, 1, None)  # type: ignore[arg-type]
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("twinreel-scaling-") and (folder / LOCK).exists()
    pool.close()
    assert not list(tmp_path.iterdir())
