"""The kernels that quantize, in Triton's interpreter. `tests/gpu/test_fp8.py` runs the same cases compiled."""

from __future__ import annotations

import pytest
import torch

import fp8_cases as fp8
import op_cases as cases
from twinreel.ops import e4m3, select

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

OPS = select("triton", "cpu")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), cases.SHAPES)
def test_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    fp8.check_rows(OPS, rows, width, dtype, "cpu")


def test_not_finite() -> None:
    fp8.check_not_finite(OPS, "cpu")


@pytest.mark.parametrize("size", fp8.HEADS, ids=str)
def test_heads(size: tuple[int, int, int, int]) -> None:
    fp8.check_heads(OPS, size, "cpu")


def test_rounding_to_e4m3_is_that_of_torch() -> None:
    from rounding_kernel import narrow_both_ways

    x = cases.every_rounding_case("cpu")
    x = x[(x.abs() <= 464) | x.isnan()]
    x = torch.cat((x, x.new_zeros(-len(x) % 1024)))
    bits, used = (torch.zeros(len(x), dtype=torch.uint8) for _ in range(2))
    narrow_both_ways[(len(x) // 1024,)](x, bits, used, BLOCK=1024)
    wanted = x.to(torch.float8_e4m3fn).view(torch.uint8)
    number = ~x.isnan()
    for out in (bits, used):
        assert torch.equal(out[number], wanted[number]) and ((out[~number] & 0x7F) == 0x7F).all()


def test_a_whole_model_runs_on_the_kernels() -> None:
    fp8.check_model("triton", "cpu")


def test_the_constants_are_those_of_the_definition() -> None:
    from twinreel.ops.rounding import LARGEST, SMALLEST

    assert (LARGEST.value, SMALLEST.value) == (e4m3.LARGEST, e4m3.SMALLEST)
    assert torch.finfo(torch.float8_e4m3fn).max == e4m3.LARGEST


def test_fakes_have_the_shapes_of_the_results() -> None:
    from torch import library

    case = cases.make_case(5, 24, torch.bfloat16, "cpu")
    weight, eps = case.norm.weight, case.norm.eps
    tables = [case.mod.msa.gate, case.mod.msa.rows, case.mod.mlp.shift, case.mod.mlp.scale, case.mod.mlp.rows]
    q, k, v = cases.draw(9, 2, 3, 16, seed=1, dtype=torch.bfloat16, device="cpu").unbind(2)
    ops = torch.ops.twinreel
    for op, arguments in (
        (ops.quantize_rows, (case.x,)),
        (ops.norm_modulate_quantized, (case.x, weight, eps, *tables[2:])),
        (ops.gate_norm_modulate_quantized, (case.x, case.h, weight, eps, tables)),
        (ops.swiglu_quantized, (case.x,)),
        (ops.quantize_heads, (q, k, v, 7)),
    ):
        library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
