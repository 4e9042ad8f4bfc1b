"""The benches at tiny sizes: they run, check what they time, and end with one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinreel import cli
from twinreel.errors import ConfigError
from twinreel.ops import vit
from twinreel.spec import Spec
from twinreel.tools import bench_e2e, bench_scaling, paper
from twinreel.tools.bench import main
from twinreel.tools.bench_dit import Sizes, call_work
from twinreel.tools.bench_vae import Asked, bench_vae
from twinreel.tools.random_weights import shape_spec
from twinreel.tools.scaling_record import Record
from twinreel.tools.timing import measure

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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dit_against_diffusers_is_equal(capsys: pytest.CaptureFixture[str], precision: str) -> None:
    pytest.importorskip("diffusers")
    words = ("--frames", "22", "--text", "12", "--ops", "reference", "--precision", precision, "--against", "diffusers")
    (peer,) = result(capsys, "dit", *words)["peer"]
    assert peer["distance_to_ours"] == {"video": 0.0, "audio": 0.0} and peer["mode"] == "eager"
    assert peer["times_ours"] > 0 and peer["repeats"] and peer["finite"]


def test_vae_compares_passes_and_times_what_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--frames", "22", "--fewest", "1", "--passes", "auto", "reference")
    found = result(capsys, "vae", *words, "--only", "decode", "--tile-batch", "1", "2")
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
    assert reused["policy"] == "reuse:threshold=1" and not exact.get("faults")


def test_memory_compares_layers_with_resident(capsys: pytest.CaptureFixture[str]) -> None:
    words = "memory --frames 22 --text 5 --ops reference --precision fp32 --layers 5 --caps 1"
    found = result(capsys, *words.split())
    assert [call["residency"] for call in found["calls"]] == ["stages", "layers"]
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
    ("text", "names"),
    [
        ("sp1", ["sp1"]),
        ("sp2", ["sp2:plain", "sp2:packed", "sp2:overlapped"]),
        ("sp2:overlap", ["sp2:overlapped"]),
        ("sp2tp2:plain", ["sp2tp2:plain"]),
        ("tp4", ["tp4"]),
        ("sp4:vae", ["sp4:vae"]),
        ("sp2:whole-balanced", ["sp2:overlapped:whole-balanced"]),
    ],
)
def test_cases_of_scaling(text: str, names: list[str]) -> None:
    cases = bench_scaling.parse_case(text)
    assert [case.name for case in cases] == names
    assert all(bench_scaling.parse_case(case.name) == [case] for case in cases)


def test_scaling_measures_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    words = ["scaling", str(out), "--shape", "wide", "--device", "cpu", "--frames", "22", "--text", "5"]
    words += ["--seconds", "0.01", "--calls", "2", "--only", "sp1,sp2:plain,sp2:overlap,sp2:whole"]
    assert main(words) == 0
    cases = json.loads(out.read_text())["cases"]
    calls = [cases[name] for name in ("sp1", "sp2:plain", "sp2:overlapped")]
    assert len({case["sha256"] for case in calls}) == 1
    assert calls[1]["distance_to_one"] == {"video": 0.0, "audio": 0.0}
    assert calls[1]["ranks"][1]["exposed_seconds"] > 0
    assert {"encode", "denoise", "decode"} <= cases["sp2:overlapped:whole"]["ranks"][0]["stages"].keys()
    capsys.readouterr()
    assert main([*words, "--seconds", "9", "--gpus", "2", "--budget", "5"]) == 0  # everything is there
    assert capsys.readouterr().out.startswith("{")
    before, base = out.read_bytes(), tmp_path / "scaling.one.safetensors"
    for other, told in (("--text 6 --calls 3", "text 5, calls 2"), ("--shape tiny --only sp1", "shape wide")):
        assert main([*words, *other.split()]) == 3 and told in capsys.readouterr().err
    base.write_bytes(b"mine")
    assert main(words) == 3 and str(base) in capsys.readouterr().err
    assert out.read_bytes() == before and base.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["dit", "--attention", "fa3", *TINY], 3),
        (["dit", "--precision", "fp8:blocks=9", *TINY], 3),
        (["dit", "--precision", "fp32", "fp8", *TINY], 3),
        (["dit", "--compile", *TINY], 3),
        (["dit", "--layers", "0", *TINY], 3),
        (["dit", "--layers", "1001", *TINY], 3),
        (["vae", "--encode", "tf32", *TINY], 3),
        (["dit", *TINY, "--seconds", "nan"], 3),
        (["ops", *TINY, "--seconds", "inf"], 3),
        (["vae", "--tile-batch", "4", "0", *TINY], 3),
        (["memory", "--caps", "24", "nan", *TINY], 3),
        (["memory", "--caps", "-1", *TINY], 3),
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


def pool_is_wrong(*_: object) -> None:
    raise AssertionError("a process was about to be started")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("--only sp3x", 3),
        ("--only sp0", 3),
        ("--only sp1,tp0", 3),
        ("--only sp1:plain", 3),
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
    assert main([*words, *more.split()]) == code
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
    record.keep("sp1", {"line": "fine"}, None, 1.0)
    again = Record(tmp_path / "a.json", {"text": 5})
    assert again.has("sp1") and not again.values["errors"] and mine.read_text() == "mine"
    other = Record(tmp_path / "b.json", {})
    (tmp_path / "b.json").write_text("came meanwhile")
    with pytest.raises(ConfigError, match="File exists"):
        other.keep("sp1", {"line": "fine"}, None, 1.0)
    assert (tmp_path / "b.json").read_text() == "came meanwhile"


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
