"""e4m3 on a device: the cases of `tests/test_fp8_triton.py` compiled, the real products and attention, the engine.

Skips without CUDA, or on a card whose products take no e4m3. Prints what the checks measured (`-s`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_cases as fp8
import op_cases as cases
from twinreel.ops import Ops, attention, e4m3, quantized, select
from twinreel.ops.e4m3 import Quantized

CUDA = "cuda"
BF16 = torch.bfloat16
REFUSED = e4m3.refusal(torch.device(CUDA)) if torch.cuda.is_available() else "needs a CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))]
RELEASED = ((5376, 21504), (7168, 5376), (5376, 28672), (14336, 5376))


@pytest.fixture(scope="module", name="ops")
def kernels() -> Ops:
    return select("triton", CUDA, "auto", dtype=BF16)


def has_fa3() -> bool:
    try:
        attention.choose("fa3", CUDA, BF16, 128)
    except ValueError:
        return False
    return True


needs_fa3 = pytest.mark.skipif(REFUSED is not None or not has_fa3(), reason="needs fa3_fwd on a Hopper card")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [*cases.SHAPES, (515, 7168), (131, 14336)])
def test_rows(ops: Ops, rows: int, width: int, dtype: torch.dtype) -> None:
    fp8.check_rows(ops, rows, width, dtype, CUDA)


def test_not_finite(ops: Ops) -> None:
    fp8.check_not_finite(ops, CUDA)
    fp8.check_not_finite(cases.REFERENCE, CUDA)


@pytest.mark.parametrize("size", [*fp8.HEADS, (38_010, 37_990, 4, 128)], ids=str)
def test_heads(ops: Ops, size: tuple[int, int, int, int]) -> None:
    fp8.check_heads(ops, size, CUDA)


def test_heads_have_the_same_bits_twice_and_alone(ops: Ops) -> None:
    """A head does not know how many stand beside it, so ranks that have some of them change no bit."""
    qkv = fp8.draw_heads(5000, 6, 128, CUDA)
    whole, again = (fp8.tensors(ops.quantize_heads(*qkv.unbind(2), 4990)) for _ in range(2))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(whole, again, strict=True))
    some = fp8.tensors(ops.quantize_heads(*qkv[:, 2:4].unbind(2), 4990))
    for part, every in zip(some[:3], whole[:3], strict=True):
        assert torch.equal(part.float(), every[:, 2:4].float())
    assert torch.equal(some[3], whole[3][:, 2:4]) and torch.equal(some[4], whole[4][2:4])


def test_the_hardware_rounds_as_the_arithmetic_does() -> None:
    from rounding_kernel import narrow_both_ways

    x = cases.every_rounding_case(CUDA)
    x = x[(x.abs() <= 464) | x.isnan()]
    x = torch.cat((x, x.new_zeros(-len(x) % 1024)))
    bits, used = (torch.zeros(len(x), dtype=torch.uint8, device=CUDA) for _ in range(2))
    narrow_both_ways[(len(x) // 1024,)](x, bits, used, BLOCK=1024)
    number = ~x.isnan()
    wanted = x.cpu().to(torch.float8_e4m3fn).view(torch.uint8).to(CUDA)
    for out in (bits, used):
        assert torch.equal(out[number], wanted[number]) and ((out[~number] & 0x7F) == 0x7F).all()


@pytest.mark.parametrize("shape", [(64, 48), *RELEASED], ids=str)
def test_products_are_close_to_the_definition(ops: Ops, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    x = torch.randn(1003, inputs, device=CUDA, dtype=BF16)
    x[17] *= 1000
    rows = ops.quantize_rows(x)
    weight = ops.quantize_rows(torch.randn(outputs, inputs, device=CUDA, dtype=BF16))
    out = e4m3.scaled_mm(rows, weight.values, weight.scale)
    wanted = cases.REFERENCE.scaled_product(rows, weight.values, weight.scale)
    apart = fp8.error(out, wanted)
    print(f"{inputs} -> {outputs}: fast accumulation is {apart:.1e} from fp32's")
    assert apart < 6e-3
    part = Quantized(rows.values[100:132], rows.scale[100:132])
    again = e4m3.scaled_mm(part, weight.values, weight.scale)
    assert fp8.error(again, out[100:132]) < 3e-3, "a row does not depend on its neighbours but for the kernel chosen"
    assert torch.equal(out, e4m3.scaled_mm(rows, weight.values, weight.scale)), "same bits twice"


@needs_fa3
@pytest.mark.parametrize(("rows", "used"), [(300, 300), (4096, 4001), (38_016, 38_010)])
def test_attention(ops: Ops, rows: int, used: int) -> None:
    table = quantized(ops, CUDA, "fp8")
    assert table.attention_quantized is e4m3.fa3 and table.why["fp8_attention"].startswith("fp8")
    qkv = fp8.draw_heads(rows, 4, 128, CUDA)
    out = table.attention(*qkv.unbind(2), used)
    wide = ops.attention(*qkv.unbind(2), used)
    centred = wide[:used].float() - wide[:used].float().mean(0)
    mine = out[:used].float() - wide[:used].float().mean(0)
    print(
        f"{used} rows: e4m3 attention is {fp8.error(out, wide):.1e} from bf16's, {fp8.error(mine, centred):.1e} centred"
    )
    assert out.shape == wide.shape and out.dtype == BF16 and not out[used:].any()
    assert fp8.error(out, wide) < 3e-2
    emulated = cases.REFERENCE.attention_quantized(ops.quantize_heads(*qkv[:4096].unbind(2), min(used, 4096)))
    if rows <= 4096:
        assert fp8.error(out, emulated) < 3e-2
    qkv[used:] = 1e4
    assert torch.equal(out, table.attention(*qkv.unbind(2), used)), "other padding, same bits"


@needs_fa3
def test_taking_means_out_pays(ops: Ops) -> None:
    """Keys and values with means, as they are after a bias-free qkv over real text: with and without."""
    qkv = fp8.draw_heads(4096, 4, 128, CUDA)
    wanted = cases.REFERENCE.attention(*(x.float() for x in qkv.unbind(2)), 4096)
    made = ops.quantize_heads(*qkv.unbind(2), 4096)
    scales = [x.float().abs().amax((0, 2)).clamp(min=e4m3.SMALLEST) / e4m3.LARGEST for x in qkv.unbind(2)]
    parts = [(x.float() / s.view(1, -1, 1)).to(e4m3.E4M3) for x, s in zip(qkv.unbind(2), scales, strict=True)]
    kept = e4m3.QuantizedHeads(tuple(parts), torch.stack(scales), torch.zeros(4, 128, device=CUDA), 4096)  # type: ignore[arg-type]
    with_means, without = fp8.error(e4m3.fa3(kept), wanted), fp8.error(e4m3.fa3(made), wanted)
    print(f"relative error with the means {with_means:.1e}, without {without:.1e}")
    assert without < with_means


def test_attention_stays_bf16_where_fa3_is_not(ops: Ops) -> None:
    table = quantized(select("triton", CUDA, "sdpa", dtype=BF16), CUDA)
    assert table.attention is attention.sdpa and table.why["fp8_attention"].startswith("bf16: only fa3")
    with pytest.raises(ValueError, match="attention: only fa3"):
        quantized(select("triton", CUDA, "sdpa", dtype=BF16), CUDA, "fp8")


@pytest.mark.parametrize("table", ["triton", "reference"])
def test_a_whole_model(table: str) -> None:
    fp8.check_model(table, CUDA)


def test_offsets_pass_two_to_the_31st(ops: Ops) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    width = 14336
    rows = 2**31 // width + 70
    x = torch.zeros(rows, width, dtype=BF16, device=CUDA)
    x[-3:] = torch.randn(3, width, device=CUDA, dtype=BF16)
    far, near = ops.quantize_rows(x), ops.quantize_rows(x[-3:])
    assert fp8.same(Quantized(far.values[-3:], far.scale[-3:]), near)
    del x, far
    u = torch.zeros(2**31 // (2 * width) + 70, 2 * width, dtype=BF16, device=CUDA)
    u[-3:] = torch.randn(3, 2 * width, device=CUDA, dtype=BF16)
    far, near = ops.swiglu_quantized(u), ops.swiglu_quantized(u[-3:])
    assert fp8.same(Quantized(far.values[-3:], far.scale[-3:]), near)


# ---- the engine -----------------------------------------------------------------------------------------------------


def hashes(path: Path, precision: str, **config: Any) -> tuple[dict[str, str], dict[str, Any]]:
    from twinreel import Engine, EngineConfig, Request

    made = Engine(EngineConfig(model=str(path), device=CUDA, precision=precision, **config))
    request = Request("A red circle.", steps=4, duration=0.9)
    first, second = (made.generate(request).report["sha256"] for _ in range(2))
    assert first == second, "same bits twice"
    return first, made.describe()


def test_the_engine_quantizes_at_load_as_the_command_does(tiny_original: Path, tmp_path: Path) -> None:
    from twinreel.weights.quantize import quantize

    quantize(tiny_original, tmp_path / "made", 0, print)
    ours, facts = hashes(tiny_original, "fp8:blocks=0")
    theirs, _ = hashes(tmp_path / "made", "fp8:blocks=0")
    assert ours == theirs
    assert facts["fp8"]["products"] == "e4m3, fast accumulation" and "_scaled_mm" in facts["why"]["fp8"]
    assert hashes(tiny_original, "bf16")[0] != ours
    assert hashes(tiny_original, "fp8:blocks=0,steps=2")[0] == hashes(tiny_original, "bf16")[0]


@pytest.mark.parametrize("residency", ["stages", "layers"])
def test_residency_changes_no_bit(tiny_original: Path, residency: str) -> None:
    assert hashes(tiny_original, "fp8:blocks=0", residency=residency)[0] == hashes(tiny_original, "fp8:blocks=0")[0]
