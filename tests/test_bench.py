"""The benches at tiny sizes: they run, check what they time, and end with one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinreel import cli, finish
from twinreel.machine import Memory
from twinreel.ops import vit
from twinreel.spec import Spec
from twinreel.tools import bench, bench_e2e, bench_scaling, paper, random_weights, timing
from twinreel.tools.bench import main
from twinreel.tools.bench_dit import Sizes, call_work
from twinreel.tools.bench_vae import Asked, bench_vae
from twinreel.tools.random_weights import shape_spec
from twinreel.tools.timing import digits, measure

TINY = ["--shape", "tiny", "--device", "cpu", "--seconds", "0.001"]


def result(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, *TINY]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "ops", "--rows", "4")
    assert found["rows"] == 4 and found["copy_gbs"] > 0
    names = {row["op"]: row for row in found["ops"]}
    assert set(names) == {
        "rms_norm", "norm_modulate", "gate_norm_modulate", "gate_add", "qk_norm_rope", "swiglu", "euler",
        "quantize_rows", "norm_modulate_quantized", "gate_norm_modulate_quantized", "swiglu_quantized", "quantize_heads",
    }  # fmt: skip
    for row in names.values():
        assert row["reference"]["gbs"] > 0 and row["reference"]["runs"] >= 3
        assert row["apart"]["share"] < 0.01, "the kernels are checked before they are timed"
    # q, k and v read and written in e4m3, beside q and k read and written
    assert names["quantize_heads"]["megabytes"] == pytest.approx(names["qk_norm_rope"]["megabytes"] * 1.5 / (4 / 3))
    assert found["attention"]["sdpa"]["tflops"] > 0 and "needs a CUDA device" in found["attention"]["fa3"]
    assert set(found["products_tflops"]) == set(found["fp8"]["products_tflops"]) == {"qkv", "out", "fc1", "fc2"}
    assert set(found["fp8"]["attention_tflops"]) == {"kernel", "with_quantize_heads"}
    assert "emulated" in found["fp8"]["why"]["fp8"]


def test_dit_compares_live_with_precompute(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(
        capsys, "dit", "--frames", "22", "--text", "5", "--ops", "reference", "--adaln", "both", "--layers", "2"
    )
    assert [call["adaln"]["adaln"] for call in found["calls"]] == ["precompute", "live"]
    for call in found["calls"]:
        assert call["equal_to_first"] and call["repeats"] and call["finite"] and call["share_of_floor"] > 0
    assert found["rows"] > 100 and found["floor_seconds"]["bf16"] > 0


def test_dit_compares_precisions_on_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--frames", "22", "--text", "5", "--ops", "reference", "--precision", "bf16", "fp8:blocks=0")
    found = result(capsys, "dit", *words, "--layers", "2")
    wide, narrow = found["calls"]
    assert (wide["precision"], narrow["precision"]) == ("bf16", "fp8:blocks=0")
    assert 1e-3 < narrow["distance_to_first"] < 0.1 and narrow["repeats"] and narrow["finite"]
    assert set(found["roofs_tflops"]) == {"products", "attention", "fp8_products", "fp8_attention"}
    assert set(found["floor_seconds"]) == {"bf16", "fp8:blocks=0"}


def test_vae_compares_passes_and_times_what_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--fewest", "1", "--passes", "auto", "reference")
    found = result(capsys, "vae", *words, "--frames", "22", "--only", "decode", "--tile-batch", "1", "2")
    assert [(row["passes"], row["tile_batch"], row["runs"]) for row in found["decode"]] == [
        ("reference", 1, 1),
        ("reference", 2, 1),
    ]
    assert all(row["equal_to_first"] for row in found["decode"]) and "encode" not in found
    found = result(capsys, "vae", *words, "--only", "encode", "--encode-frames", "5")
    assert [(row["kind"], row["passes"], row["frames"], row["runs"]) for row in found["encode"]] == [
        ("fp32", "reference", 5, 1)
    ]
    assert all(row["repeats"] is True for row in found["encode"])
    assert "decode" not in found


def test_passes_are_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of passes that is not the plain one is found out."""
    plain = vit.PLAIN
    other = replace(plain, name="triton", swiglu=lambda u: plain.swiglu(u) * 1.001)
    monkeypatch.setattr(vit, "choose", lambda name, device: other if name == "triton" else plain)
    asked = Asked(("decode",), ("reference", "triton"), (1,), (), 5, 1, 0.0)
    found = bench_vae(shape_spec("tiny"), Sizes(22, None, 1), torch.device("cpu"), asked)
    assert [row["equal_to_first"] for row in found["decode"]] == [True, False]


def test_encoder_compares_layers_with_resident(capsys: pytest.CaptureFixture[str]) -> None:
    rows = result(capsys, "encoder", "--tokens", "3", "9", "--stream")["prompts"]
    assert [(row["tokens"], row["residency"]) for row in rows] == [(3, "all"), (9, "all"), (3, "layers"), (9, "layers")]
    assert all(row["equal_to_first"] and row["finite"] and row["share_of_products"] > 0 for row in rows)
    assert rows[0]["streamed_bytes"] == 0 < rows[2]["streamed_bytes"]
    assert len(result(capsys, "encoder", "--tokens", "3")["prompts"]) == 1


@pytest.mark.parametrize("av", [True, False])
def test_e2e(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, av: bool) -> None:
    if av:
        pytest.importorskip("av")
    monkeypatch.setattr(bench_e2e, "find_spec", lambda name: av or None)
    words = "e2e --frames 22 --text 5 --steps 4 --precision fp32 --policy reuse:threshold=1 --shape tiny --device cpu"
    assert main([*words.split(), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    exact, reused = found["requests"]
    assert ("an MP4" if av else "host memory") in found["ends_in"]
    assert {"read", "encode", "denoise", "decode"} <= exact["stages"].keys() and ("mux" in exact["stages"]) is av
    assert (exact["policy"], exact["calls"], exact["frames"]) == ("every-step", 3, 22)
    assert sum(stage["seconds"] for stage in exact["stages"].values()) < exact["seconds"], "one after the other"
    assert reused["policy"] == "reuse:threshold=1" and not exact.get("faults")


def test_a_request_of_one_call_is_told_as_one() -> None:
    row = {"policy": "every-step", "seconds": 1.0, "canvas": [64, 64], "frames": 22, "calls": 1, "stages": {}}
    assert "22 frames, 1 call:" in bench_e2e.told(row | {"times_exact": 1.0})


def test_memory_compares_layers_with_resident(capsys: pytest.CaptureFixture[str]) -> None:
    words = "memory --frames 22 --text 5 --ops reference --precision fp32 --layers 5"
    found = result(capsys, *words.split())
    assert [call["cap_gib"] for call in found["calls"]] == [None, None], "a CPU has no cap"
    assert [call["residency"] for call in found["calls"]] == ["stages", "layers"]
    assert [call["why"] for call in found["calls"]] == ["asked for"] * 2, "nothing was chosen"
    assert all(call["equal_to_first"] for call in (*found["calls"], *found["conditioner"]))
    assert found["calls"][0]["streamed_gbs"] == 0 < found["calls"][1]["streamed_gbs"]
    assert [row["residency"] for row in found["conditioner"]] == ["all", "all", "layers", "layers"]


def test_the_work_of_one_released_call_is_the_known_one() -> None:
    work = call_work(Spec(), 38_010)
    assert work["products"] == pytest.approx(1.465e15, rel=1e-3)
    assert work["attention"] == pytest.approx(2.071e15, rel=1e-3)


def test_the_paper_model_is_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs/performance.md").read_text()
    assert paper.table() in page
    one, two, pushed = paper.predict(1, 1), paper.predict(2, 1), paper.predict(2, 1, 2)
    assert one.seconds == pytest.approx(5.415, abs=1e-3) and not one.bytes
    assert two.bytes / 50 == pytest.approx(409e6 + 136e6, rel=2e-3)  # bytes of one block
    assert two.exposed == two.exchange and two.compute < pushed.seconds < two.seconds
    assert pushed.hidden == pytest.approx(7 / 8)  # all but half of the way back


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["dit", "--attention", "fa3", *TINY], 3),
        (["dit", "--precision", "fp8:blocks=9", *TINY], 3),
        (["dit", "--precision", "fp32", "fp8", *TINY], 3),
        (["dit", "--compile", *TINY], 2),
        (["dit", "--size", "64x99999", *TINY], 2),
        (["e2e", "--text", "9999", *TINY[:4]], 2),
        (["ops", "--rows", "9" * 30, *TINY], 3),
        (["vae", "--encode-frames", "1000000000", "--only", "encode", "--device", "cpu"], 3),  # 12 PB
        (["dit", "--layers", "0", *TINY], 3),
        (["dit", "--layers", "1001", *TINY], 3),
        (["vae", "--fewest", "1001", *TINY], 3),
        (["vae", "--encode", "tf32", *TINY], 3),
        (["dit", *TINY[:4], "--seconds", "nan"], 3),
        (["ops", *TINY[:4], "--seconds", "inf"], 3),
        (["vae", "--tile-batch", "4", "0", *TINY], 3),
        (["memory", "--caps", "24", "nan", *TINY], 3),
        (["memory", "--caps", "-1", *TINY], 3),
        (["memory", "--caps", "24", *TINY], 3),
        (["e2e", "--cap", "0", *TINY[:4]], 3),
        (["e2e", "--cap", "24", *TINY[:4]], 3),
        (["encoder", "--tokens", "0", *TINY], 3),
        (["encoder", "--tokens", "3", "7001", *TINY], 2),
        (["memory", "--size", "64", *TINY], 2),
        (["e2e", "--device", "cpu", "--policy", "sometimes"], 2),
        (["e2e", "--device", "cpu", "--residency", "attic"], 3),
        (["ops", "--frames", "9999", *TINY], 2),
        (["ops", "--device", "gpu"], 3),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_what_cannot_run_here_is_said(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (main, lambda words: cli.main(["bench", *words])):  # one program under two names
        assert run(words) == code
        told = capsys.readouterr()
        assert len(told.err.splitlines()) == 3 and told.err.startswith("twinreel: ") and not told.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("vae --only decode --encode fp32", ("--encode", "means nothing beside --only decode")),
        ("vae --only decode --encode-frames 5", ("--encode-frames", "means nothing beside --only decode")),
        ("vae --only encode --tile-batch 2", ("--tile-batch", "means nothing beside --only encode")),
        ("vae --only=encode --frames=22", ("--frames", "means nothing beside --only encode")),
        ("ops --rows 4 --frames 22", ("--frames", "means nothing beside --rows")),
        ("ops --rows 4 --size 64x64", ("--size", "means nothing beside --rows")),
        ("dit --compile", ("--compile", "means nothing without --against")),
        ("scaling a.json --only sp1 --whole", ("--whole", "means nothing beside --only")),
        ("ops --frames 9999", ("--frames", "got 9999")),
        ("dit --frames 1 --text 5", ("--frames", "got 1")),
        ("e2e --text 9999", ("--text", "got 9999")),
        ("scaling a.json --text 9999 --shape tiny", ("--text", "got 9999")),
        ("encoder --tokens 7001", ("--tokens", "got 7001")),
        ("ops --rows 5 --rows 6", ("--rows", "was given twice")),
        ("e2e --policy forecast:fast --policy=reuse", ("--policy", "was given twice")),
        ("scaling a.json --only sp1 --only sp2", ("--only", "was given twice")),
        ("scaling a.json --only=", ("--only", "is empty")),
        ("nope", ("WHAT", "invalid choice: 'nope'")),
        ("ops --only", ("--only", "'--only' means nothing to it")),
        ("vae --only", ("--only", "expected one argument")),
        ("vae --only x", ("--only", "invalid choice: 'x'")),
        ("ops --rows x", ("--rows", "invalid int value: 'x'")),
        ("scaling a.json --only", ("--only", "expected one argument")),
        ("scaling", ("out", "is missing")),
        ("scaling a.json b.json", ("b.json", "'b.json' means nothing to it")),
        ("scaling / --shape tiny --only sp1", ("out", "/ is a folder")),
        (f"scaling {'x' * 300} --shape tiny --only sp1", ("out", "'xxx")),
    ],
)
def test_a_flag_is_refused_by_its_own_name(
    words: str, told: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for run in (main, lambda given: cli.main(["bench", *given])):
        assert run([*words.split(), "--device", "cpu"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"twinreel: bench cannot be run: {told[0]}" and lines[1].strip().startswith(told[1])
        assert len(lines) == 3
    assert not list(tmp_path.iterdir())


CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 72.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
)
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ("ops --rows 4000", CUDA, "--shape tiny --rows 4000: memory has no room for this (CUDA out of memory. Tried"),
        ("vae --encode-frames 90 --size 64x64", CPU, "--encode-frames 90 --size 64x64: memory has no room for this (can't"),
        ("encoder --tokens 3 9", MemoryError(), "--tokens 3 9: memory has no room for this (MemoryError)"),
        ("e2e --steps 9", CUDA, "--frames 124 --text 300: memory has no room for this (CUDA"),
    ],
)  # fmt: skip
def test_memory_that_ends_names_what_was_asked_for(
    words: str, error: Exception, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise error

    what, *more = words.split()
    monkeypatch.setitem(bench.RUNS, what, run)
    assert main([what, *more, "--shape", "tiny", "--device", "cpu"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and told in lines[1] and "give less" in lines[2]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("dit", "weights"),
        ("vae --only decode --frames 22", "weights"),
        ("encoder --tokens 3", "weights"),
        ("e2e --frames 22", "weights"),
        ("memory", "weights"),
        ("ops --rows 99", "inputs and outputs"),
        ("vae --only encode", "pixels"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_drawn_or_anything_measured(
    words: str, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_weights, "host_memory", lambda: Memory(1 << 40, 1 << 10))
    monkeypatch.setattr(random_weights, "_drawn", lambda *_: pytest.fail("a weight was drawn"))
    monkeypatch.setattr(timing, "measure", lambda *_, **more: pytest.fail("something was measured"))
    assert main([*words.split(), "--shape", "tiny", "--device", "cpu"]) == 3
    lines = capsys.readouterr().err.splitlines()
    told = re.search(rf"\((\S+) GiB of {what}, and (0\.0+) GiB of host memory are free\)", lines[1])
    assert len(lines) == 3 and told is not None and told[1] != told[2], lines


@pytest.mark.parametrize("what", [*bench.TEXTS, "scaling"])
def test_help_shows_every_default(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = bench_scaling.parser()
    if what != "scaling":
        (kinds,) = (action for action in bench.parser()._actions if isinstance(action, argparse._SubParsersAction))
        flags = kinds.choices[what]
    told = " ".join(flags.format_help().split())
    for action in flags._actions:
        assert action.help, action.dest
        if action.default not in (None, False, [], argparse.SUPPRESS):
            words = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
            assert f"{' '.join(action.help.split())} (default {words})" in told, action.dest
    assert what in ("e2e", "scaling") or f"in at most {timing.MOST_RUNS} runs" in told
    precise = any(action.dest == "precision" for action in flags._actions)
    assert not precise or "on a CPU too, where the engine's is fp32" in told


@pytest.mark.parametrize(("rate", "told"), [(1318.4, "1318"), (99.96, "100"), (1.5, "1.5"), (0.001234, "0.00123")])
def test_rates_show_digits_that_say_something(rate: float, told: str) -> None:
    assert digits(rate) == told


def test_rates_of_a_cpu_are_not_told_as_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["ops", "--rows", "4"], ["dit", "--frames", "22", "--text", "5", "--layers", "1"]):
        assert main([*words, *TINY]) == 0
        assert not re.findall(r"(?<![\d.])0 (?:TFLOP|GB)/s|(?:products|attention|qkv) 0[,;\n]", capsys.readouterr().out)


def test_other_errors_of_a_bench_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("a kernel is at fault")

    monkeypatch.setitem(bench.RUNS, "ops", run)
    with pytest.raises(RuntimeError, match="a kernel"):
        main(["ops", *TINY])


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, "the keyboard"), (signal.SIGTERM, "SIGTERM")])
def test_a_bench_that_is_stopped_speaks_of_itself(
    number: signal.Signals, by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.RUNS, "ops", lambda *_: os.kill(os.getpid(), number))
    for run in (main, lambda words: cli.main(["bench", *words])):
        assert run(["ops", *TINY]) == 128 + number
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"twinreel: stopped by {by}" and len(lines) == 3
        assert "seed" not in lines[2] and "bench" in lines[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_is_stopped_sends_nobody_to_a_folder_that_goes(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    monkeypatch.setattr(finish, "_write", lambda *_: os.kill(os.getpid(), number))
    words = "e2e --frames 22 --text 5 --steps 2 --ops reference --shape tiny --device cpu"
    assert main(words.split()) == 128 + number
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "run it again: bench scaling" in lines[2]


def test_the_command_line_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "encoder", "--tokens", "2", "--json", *TINY]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "encoder", "one line"
    assert cli.main(["bench", "vae", "--encode", "fp16", "--json", *TINY]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"


def test_measure_counts_runs() -> None:
    calls: list[int] = []
    timing = measure(lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert timing["runs"] == 3 and len(calls) == 5
    assert timing["best"] <= timing["seconds"] <= timing["worst"]
    warm: list[int] = []
    once = measure(lambda: calls.append(1), torch.device("cpu"), 0.0, fewest=1, warm_up=lambda: warm.append(1))
    assert once["runs"] == 1 and len(calls) == 6 and len(warm) == 1


def test_it_imports_without_media_and_command_line_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('av', 'tyro', 'rich', 'diffusers'): sys.modules[name] = None\n"
        "from twinreel.tools.bench import main\n"
        "from twinreel.tools import bench_e2e, bench_encoder, bench_memory, bench_peer, bench_vae, scaling_cases\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(end.code)"
    )
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stderr
