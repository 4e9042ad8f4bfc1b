"""The Triton kernels in Triton's interpreter: the definition, joined against apart, fakes, engagement, refusals.

`tests/gpu/test_ops.py` runs the same cases compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, library

import op_cases as cases
import winograd_cases
from op_model import Counting, check_model
from twinreel.ops import describe, select

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from twinreel.ops import winograd  # noqa: E402

OPS = select("triton", "cpu")
CPU = "cpu"


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), cases.SHAPES)
def test_row_ops(rows: int, width: int, dtype: torch.dtype) -> None:
    cases.check_rows(OPS, rows, width, dtype, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_strided_rows(dtype: torch.dtype) -> None:
    cases.check_strides(OPS, dtype, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    cases.check_heads(OPS, heads, dtype, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 24), (9, 5000)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    cases.check_swiglu(OPS, rows, width, dtype, CPU, exact=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_passes_of_the_video_decoder(dtype: torch.dtype) -> None:
    cases.check_vit(dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", cases.FRAMES, ids=str)
def test_passes_of_the_video_encoder(case: tuple[int, int, int, int, tuple[int, int]], dtype: torch.dtype) -> None:
    cases.check_frames(case, dtype, CPU)


@pytest.mark.parametrize("case", winograd_cases.CONVOLUTIONS, ids=str)
def test_convolutions_of_the_video_encoder(case: tuple[int, ...]) -> None:
    winograd_cases.check_kernels(case, CPU)
    winograd_cases.check_convolution(case, CPU)


def test_strips_have_the_bits_of_the_whole() -> None:
    winograd_cases.check_strips(winograd_cases.STRIPS, CPU)


@pytest.mark.parametrize("clip", [(1, 32, 32), (4, 32, 48)], ids=str)
def test_a_whole_video_encoder_in_fp32(clip: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "VALUES", 1 << 14)  # a program takes milliseconds here
    winograd_cases.check_encoder(winograd_cases.SPEC, clip, CPU)


def test_which_convolutions_are_transformed() -> None:
    winograd_cases.check_what_stays_plain()


def test_euler() -> None:
    cases.check_euler(OPS, CPU)
    with torch.inference_mode():
        cases.check_euler(OPS, CPU)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_swiglu_of_every_bf16_gate() -> None:
    gates = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    u = torch.cat((gates.view(64, 1024), torch.ones(64, 1024, dtype=torch.bfloat16)), dim=1)
    out, wanted = OPS.swiglu(u), cases.REFERENCE.swiglu(u)
    assert torch.equal(out.isnan(), wanted.isnan())
    number = wanted.float().abs() >= 2.0**-126  # the interpreter reads and writes subnormal bf16 wrongly
    apart = (cases.order(out[number]) - cases.order(wanted[number])).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= 3  # the interpreter's exponential is another one


def test_rounding_is_to_nearest_even_and_keeps_nan() -> None:
    from rounding_kernel import both_ways

    x = cases.every_rounding_case(CPU)
    bits, used = torch.zeros_like(x), torch.zeros_like(x)
    both_ways[(112,)](x, bits, used, BLOCK=4096)
    wanted = x.bfloat16().float()
    number = ~x.isnan()
    for out in (bits, used):
        assert torch.equal(out[number], wanted[number]) and out[~number].isnan().all()
    assert not torch.equal(x[number], wanted[number])


def test_no_rows() -> None:
    case = cases.make_case(0, 24, torch.bfloat16, CPU)
    assert OPS.norm_modulate(case.x, case.norm, case.mod.msa).shape == (0, 24)
    assert OPS.gate_norm_modulate(case.x, case.h, case.norm, case.mod)[1].shape == (0, 24)
    assert OPS.gate_add(case.x, case.h, case.mod.msa).shape == (0, 24)
    assert OPS.swiglu(case.x).shape == (0, 12)


def test_offsets_pass_two_to_the_31st() -> None:
    """Three rows, strides within int32, the last beginning 2^31 values on; only touched pages take memory."""
    width, stride = 64, 2**30
    buffer = torch.empty(2 * stride + width, dtype=torch.bfloat16)
    x = buffer.as_strided((3, width), (stride, 1))
    near = cases.make_case(3, width, torch.bfloat16, CPU)
    x.copy_(near.x)
    out = OPS.gate_add(x, near.h, near.mod.msa)
    assert torch.equal(out, cases.REFERENCE.gate_add(near.x, near.h, near.mod.msa))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_whole_model_runs_on_the_kernels(dtype: torch.dtype) -> None:
    check_model("triton", dtype, CPU)


def test_the_loop_moves_both_modalities_in_one_launch() -> None:
    from test_denoise import MOVE, SIGMAS, model, start
    from twinreel.denoise import denoise
    from twinreel.policy import EveryStep

    rows, layout = start()
    plain = denoise(rows, layout, SIGMAS, model, EveryStep(), lambda step, velocity: None, move=MOVE)
    with Counting() as seen:
        end = denoise(rows, layout, SIGMAS, model, EveryStep(), lambda step, velocity: None, move=OPS.euler)
    assert seen.counts == {"euler": SIGMAS.calls}
    assert torch.equal(end.video, plain.video) and torch.equal(end.audio, plain.audio)


def test_fakes_and_schemas_hold() -> None:
    from twinreel.ops import euler, gate_add, norm_modulate, qk_norm_rope, swiglu

    case = cases.make_case(3, 24, torch.bfloat16, CPU)
    x, h, weight, mod = case.x, case.h, case.norm.weight.detach(), case.mod
    tables = [mod.msa.gate, mod.msa.rows, mod.mlp.shift, mod.mlp.scale, mod.mlp.rows]
    qkv, eps = x.view(3, 2, 3, 4), {"q_eps": 1e-5, "k_eps": 1e-5}
    cos = torch.ones(3, 2, dtype=torch.bfloat16)
    pair = [torch.randn(4, 8), torch.randn(2, 8)]
    outs = [torch.zeros_like(p) for p in pair]
    samples: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (norm_modulate.rms_norm, (x, weight, 1e-5), {}),
        (norm_modulate.norm_modulate, (x, weight, 1e-5, mod.msa.shift, mod.msa.scale, mod.msa.rows), {}),
        (norm_modulate.gate_norm_modulate, (x, h, weight, 1e-5, tables), {}),
        (gate_add.gate_add, (x, h, mod.msa.gate, mod.msa.rows), {}),
        (swiglu.swiglu, (x,), {}),
        (qk_norm_rope.qk_norm_rope, (qkv, weight[:4], weight[:4], cos, cos), eps),
        (qk_norm_rope.qk_norm_rope, (qkv, weight[:4], weight[:4], None, None), eps),
        (euler.euler, (pair, [p.clone() for p in pair], outs, [0.5, 0.5, 0.5, 0.25, 0.75, 0.25]), {}),
    ]
    taps = torch.randn(winograd.WHOLE, 16, 8)
    samples.append((winograd.winograd, (torch.randn(1, 5, 4, 6, 16), taps, torch.randn(8)), {}))
    for op, arguments, options in samples:
        library.opcheck(op, arguments, options, test_utils=("test_schema", "test_faketensor"))


def test_compiling_meets_no_graph_break() -> None:
    case = cases.make_case(3, 24, torch.bfloat16, CPU)

    def block(x: Tensor, h: Tensor) -> Tensor:
        x, h = OPS.gate_norm_modulate(x, h, case.norm, case.mod)
        return OPS.gate_add(x, OPS.rms_norm(h, case.norm), case.mod.mlp)

    whole = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(whole(case.x, case.h), block(case.x, case.h))


def test_describe_names_the_kernels() -> None:
    names = describe(OPS)
    plain = {"attention", "attention_quantized", "scaled_product"}
    assert {name.partition(".")[0] for op, name in names.items() if op not in plain} == {"kernels"}
    assert OPS.name == "triton" and OPS.why["ops"] == "asked for"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": torch.float16}, "not torch.float16"),
        ({"head_dim": 7}, "even number of dims"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"device": "meta"}, "CUDA device, not meta"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select("triton", **({"device": "cpu"} | arguments))


def test_without_the_interpreter_a_cpu_is_refused_and_auto_is_plain() -> None:
    script = (
        "from twinreel.ops import select\n"
        "table = select('auto', 'cpu'); print(table.name, table.why['ops'])\n"
        "try: select('triton', 'cpu')\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    plain, refused = done.stdout.splitlines()
    assert plain == "reference auto: kernels are for CUDA devices"
    assert refused == "ops: triton cannot run here: Triton kernels need a CUDA device, not cpu; use auto"
