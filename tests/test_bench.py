"""The benches at tiny sizes: they run, check what they time, and end with one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinreel.spec import Spec
from twinreel.tools.bench import main
from twinreel.tools.bench_dit import call_work
from twinreel.tools.timing import measure

TINY = ["--shape", "bundled", "--device", "cpu", "--seconds", "0.001"]


def result(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, *TINY]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "ops", "--rows", "4")
    assert found["rows"] == 4 and found["copy_gbs"] > 0
    names = {row["op"]: row for row in found["ops"]}
    assert set(names) == {
        "rms_norm", "norm_modulate", "gate_norm_modulate", "gate_add", "qk_norm_rope", "swiglu", "euler"
    }  # fmt: skip
    for row in names.values():
        assert row["reference"]["gbs"] > 0 and row["reference"]["runs"] >= 3
        assert row["apart"]["share"] < 0.01, "the kernels are checked before they are timed"
    assert found["attention"]["sdpa"]["tflops"] > 0 and "needs a CUDA device" in found["attention"]["fa3"]
    assert set(found["products_tflops"]) == {"qkv", "out", "fc1", "fc2"}


def test_dit_compares_live_with_precompute(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(
        capsys, "dit", "--frames", "22", "--text", "5", "--ops", "reference", "--adaln", "both", "--layers", "2"
    )
    assert [call["adaln"]["adaln"] for call in found["calls"]] == ["precompute", "live"]
    for call in found["calls"]:
        assert call["equal_to_first"] and call["repeats"] and call["finite"] and call["share_of_floor"] > 0
    assert found["rows"] > 100 and found["floor_seconds"] > 0


def test_vae(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "vae", "--frames", "22", "--tile-batch", "1", "2", "--encode-frames", "5")
    assert set(found["decode"]) == {"1", "2"} and found["encode"]["fp32"]["frames"] == 5


def test_the_work_of_one_released_call_is_the_known_one() -> None:
    work = call_work(Spec(), 38_010)
    assert work["products"] == pytest.approx(1.465e15, rel=1e-3)
    assert work["attention"] == pytest.approx(2.071e15, rel=1e-3)


def test_what_cannot_run_here_is_said() -> None:
    assert main(["dit", "--attention", "fa3", *TINY]) == 2


def test_measure_counts_runs() -> None:
    calls: list[int] = []
    timing = measure(lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert timing["runs"] == 3 and len(calls) == 5
    assert timing["best"] <= timing["seconds"] <= timing["worst"]


def test_it_imports_without_media_and_command_line_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('av', 'tyro', 'rich', 'diffusers'): sys.modules[name] = None\n"
        "from twinreel.tools.bench import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(end.code)"
    )
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stderr
