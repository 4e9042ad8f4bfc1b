"""What everything in e4m3 is checked for, on whichever device: the interpreter's CPU or a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import op_cases as cases
from golden_dit import TINY, golden_weights
from op_model import Counting
from twinreel import Engine, EngineConfig
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.modulation import LiveModulation
from twinreel.models.quantized import quantized_kind
from twinreel.ops import Ops, quantized, select
from twinreel.ops.e4m3 import Quantized, QuantizedHeads
from twinreel.parallel import Parallel
from twinreel.weights.stream import narrow

REFERENCE = cases.REFERENCE
# rows, used, heads, head dim: one row; padding and an odd head; the released head over several chunks
HEADS = ((1, 1, 1, 8), (70, 61, 3, 40), (1300, 1201, 2, 128))


def same(a: Quantized, b: Quantized) -> bool:
    """Equal bits."""
    return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def joined(made: Quantized, apart: Quantized, device: str, dtype: torch.dtype) -> bool:
    """Equal bits in the interpreter, and compiled for the released width in bf16. At other widths the compiler may lay a
    row out otherwise in the joined kernel and sum it in another order. Then a few values are another bf16, by a last place
    of the larger ones that they are made of, or of e4m3; where a row's largest is among them, the row has another scale."""
    if device == "cpu" or (dtype, made.values.shape[1]) == (torch.bfloat16, 5376):
        return same(made, apart)
    a, b = (rows.values.float() * rows.scale for rows in (made, apart))
    moved = ((a - b).abs() > 1e-5 * b.abs()).float().mean(1) > 2e-3
    last_place = 2**-7 * 448 * apart.scale  # of a row's largest value
    return bool(moved.sum() <= max(1, 0.01 * len(a))) and bool(((a - b).abs() <= 2**-3 * b.abs() + last_place).all())


def on(device: str, rows: Quantized) -> Quantized:
    return Quantized(rows.values.to(device), rows.scale.to(device))


def check_rows(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Quantized rows equal the definition's bit for bit, and joined with the op before them equal to apart."""
    case = cases.make_case(rows, width, dtype, device)
    case.x[0, : width // 2] *= 300
    case.x[-1] = 0
    made = ops.quantize_rows(case.x)
    assert made.values.dtype == torch.float8_e4m3fn and made.scale.shape == (rows, 1)
    assert same(made, REFERENCE.quantize_rows(case.x))
    assert same(on("cpu", made), REFERENCE.quantize_rows(case.x.cpu())), "the same bits on every device"
    wide = torch.full((rows, width + 24), 7.0, dtype=dtype, device=device)
    wide[:, 8 : width + 8] = case.x
    assert same(made, ops.quantize_rows(wide[:, 8 : width + 8])), "strides change nothing"
    normed = ops.norm_modulate(case.x, case.norm, case.mod.msa)
    narrow = ops.norm_modulate_quantized(case.x, case.norm, case.mod.msa)
    assert joined(narrow, ops.quantize_rows(normed), device, dtype)
    residual, ready = ops.gate_norm_modulate(case.x, case.h, case.norm, case.mod)
    mine, narrowed = ops.gate_norm_modulate_quantized(case.x, case.h, case.norm, case.mod)
    assert torch.equal(mine, residual) and joined(narrowed, ops.quantize_rows(ready), device, dtype)
    u = cases.draw(rows, 2 * width, seed=5, dtype=dtype, device=device) * 4
    assert same(ops.swiglu_quantized(u), ops.quantize_rows(ops.swiglu(u)))


def check_not_finite(ops: Ops, device: str) -> None:
    """What is no number stays none, so that the vote of a step hears of it."""
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 40, dtype=torch.bfloat16, device=device)
        x[1, 3] = bad
        made = ops.quantize_rows(x)
        finite = (made.values.float() * made.scale).isfinite().all(1)
        assert finite.tolist() == [True, False], bad


def draw_heads(rows: int, heads: int, dim: int, device: str) -> Tensor:
    """qkv [S, H, 3, d] whose keys and values have means of their own."""
    qkv = cases.draw(rows, heads, 3, dim, seed=1, dtype=torch.bfloat16, device=device)
    means = cases.draw(1, heads, 3, dim, seed=2, dtype=torch.bfloat16, device=device)
    return qkv + 4 * means * torch.tensor([0, 1, 1], dtype=torch.bfloat16, device=device).view(1, 1, 3, 1)


def check_heads(ops: Ops, size: tuple[int, int, int, int], device: str) -> None:
    """q, k, v close to the definition, from strided views; what stands in the padding changes nothing."""
    rows, used, heads, dim = size
    qkv = draw_heads(rows, heads, dim, device)
    made, wanted = (table.quantize_heads(*qkv.unbind(2), used) for table in (ops, REFERENCE))
    assert made.rows == rows and made.parts[0].shape == (used, heads, dim)
    for name, mine, theirs in zip("qkv", made.parts, wanted.parts, strict=True):
        mine, theirs = mine.float(), theirs.float()
        # a mean whose sum ran in another order moves a value over an edge now and then, by one step
        assert (mine != theirs).sum() <= max(2, 2e-3 * mine.numel()), name
        assert ((mine - theirs).abs() <= 2**-3 * theirs.abs() + 2**-9).all(), name
    torch.testing.assert_close(made.scales, wanted.scales, rtol=1e-5, atol=0)
    torch.testing.assert_close(made.v_mean, wanted.v_mean, rtol=1e-5, atol=1e-5)
    qkv[used:] = 1e4
    again = ops.quantize_heads(*qkv.unbind(2), used)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors(made), tensors(again), strict=True))
    apart = ops.quantize_heads(*(x.contiguous() for x in qkv.unbind(2)), used)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors(made), tensors(apart), strict=True))


def tensors(heads: QuantizedHeads) -> list[Tensor]:
    return [*heads.parts, heads.scales, heads.v_mean]


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def forward(table: str, device: str, narrows: bool) -> tuple[Tensor, Tensor]:
    """A small DiT in bf16, its second block in e4m3 if `narrows`; padded rows."""
    spec, weights = TINY, golden_weights(TINY)
    ops = select(table, device, dtype=torch.bfloat16, head_dim=spec.head_dim)
    kinds = {1: quantized_kind(quantized(ops, device, head_dim=spec.head_dim))} if narrows else {}
    dit, modulation = DiT(spec, ops, Parallel.single(), torch.bfloat16, kinds), LiveModulation(spec, torch.bfloat16)
    state: dict[str, Any] = dict(weights)
    for name in [name for name in dit.state_dict() if name.endswith("_scale")]:
        name = name.removesuffix("_scale")
        state |= narrow(name, weights[name].bfloat16())
    for module in (dit, modulation):
        module.load_state_dict({name: state[name] for name in module.state_dict()})
        module.to(device).requires_grad_(False)
    tags = torch.tensor([1] * 6 + [2] * 8 + [0] * 18)
    indices = tuple((tags[:30] == tag).nonzero().flatten() for tag in (1, 0, 2))
    positions = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    at = make_row_state(positions, tags, indices, spec, torch.bfloat16, device, used=30)  # type: ignore[arg-type]
    sizes = ((6, spec.text_dim), (16, spec.video_row), (8, spec.audio_channels))
    text, video, audio = (cases.draw(*size, seed=size[0], dtype=torch.float32, device=device) for size in sizes)
    with torch.inference_mode():
        mod = modulation.at(torch.tensor([0.2, 0.7]), (at.tags == 2).long(), at)
        return dit(video, audio, dit.refine(text), at, mod)


def check_model(table: str, device: str) -> None:
    """Only the block named runs in e4m3, through every joined op once, and the result is close to bf16's."""
    wanted = forward(table, device, narrows=False)
    with Counting() as seen:
        out = forward(table, device, narrows=True)
    if table == "triton":
        refiner = TINY.refiner_layers
        assert {name: seen.counts[name] for name in seen.counts if not name.startswith("fa")} == {
            "norm_modulate": TINY.layers, "gate_norm_modulate": TINY.layers - 1, "gate_add": TINY.layers,
            "qk_norm_rope": TINY.layers + refiner, "swiglu": TINY.layers - 1 + refiner, "rms_norm": 2 * refiner + 1,
            "norm_modulate_quantized": 1, "gate_norm_modulate_quantized": 1, "swiglu_quantized": 1,
            "quantize_rows": 1,
        } | ({"quantize_heads": 1} if device == "cpu" else {})  # fmt: skip
    for mine, theirs in zip(out, wanted, strict=True):
        assert 1e-4 < error(mine, theirs) < 8e-2, error(mine, theirs)


def engine(path: Path, precision: str, **config: Any) -> Engine:
    return Engine(EngineConfig(model=str(path), device="cpu", precision=precision, **config))


def dit_of(made: Engine) -> Any:
    """The DiT that a request would be made with."""
    return made.parts._load("dit:fl2va")


def same_weights(a: Any, b: Any) -> bool:
    """Equal names, dtypes and bits, in layers that take turns too."""
    ours, theirs = (
        {f"{i}.{name}": x.clone() for i, block in enumerate(dit.blocks) for name, x in block.state_dict().items()}
        for dit in (a, b)
    )
    assert ours.keys() == theirs.keys() and len(ours) >= 2 * 12
    return all(
        x.dtype == theirs[name].dtype and torch.equal(x.float(), theirs[name].float()) for name, x in ours.items()
    )
