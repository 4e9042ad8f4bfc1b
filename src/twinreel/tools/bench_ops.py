"""`bench ops`: every op of the kernel table and of the definition, checked, timed, beside a copy of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.layers import RMSNorm
from ..models.modulation import BlockModulation, Gated
from ..ops import Ops, e4m3, select
from ..ops.attention import KINDS, choose
from ..spec import DiTSpec
from .bench_fp8 import bench_fp8, product_shapes, values_of
from .random_weights import check_room, weights_of
from .timing import card, copy_roof, digits, host_roof, measure, product_roof

TIMESTEPS = 2
WARPS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Inputs:
    """Random inputs of one packed sequence of `rows` rows."""

    x: Tensor
    h: Tensor
    norm: RMSNorm
    mod: BlockModulation
    qkv: Tensor
    head_norms: tuple[RMSNorm, RMSNorm]
    rope: tuple[Tensor, Tensor]
    u: Tensor
    streams: list[tuple[Tensor, Tensor, Tensor, tuple[float, float, float]]]


def draw_inputs(spec: DiTSpec, rows: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs as a block of `spec` sees them."""

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=kind)

    def norm(size: int) -> RMSNorm:
        module = RMSNorm(size, spec.norm_eps, dtype).to(device).requires_grad_(False)
        module.weight.copy_(1 + draw(size) / 10)
        return module

    table = draw(3 * TIMESTEPS, 6 * spec.hidden) / 4
    parts = table.chunk(6, dim=-1)
    # most rows are video and read one row of the table, as in a request
    reads = torch.zeros(rows, dtype=torch.int64, device=device)
    reads[: max(1, rows // 50)] = 1
    mod = BlockModulation(
        msa=Gated(parts[0], parts[1], reads, parts[2]), mlp=Gated(parts[3], parts[4], reads, parts[5])
    )
    angles = draw(rows, 3 * spec.rope_freqs, kind=torch.float32)
    streams = []
    for count, width in ((rows, spec.video_row), (max(1, rows // 90), spec.audio_channels)):
        x, velocity = (draw(count, width, kind=torch.float32) for _ in range(2))
        streams.append((x, velocity, torch.empty_like(x), (0.9, 0.99, 0.01)))
    return Inputs(
        x=draw(rows, spec.hidden),
        h=draw(rows, spec.hidden),
        norm=norm(spec.hidden),
        mod=mod,
        qkv=draw(rows, spec.heads, 3, spec.head_dim),
        head_norms=(norm(spec.head_dim), norm(spec.head_dim)),
        rope=(angles.cos().to(dtype), angles.sin().to(dtype)),
        u=draw(rows, 2 * spec.ffn),
        streams=streams,
    )


def _bytes(values: Any) -> int:
    """Of all tensors in them."""
    if isinstance(values, Tensor):
        return values.nbytes
    if isinstance(values, nn.Module):
        return weights_of(values)
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return sum(map(_bytes, parts))


def bench_ops(spec: DiTSpec, rows: int, device: torch.device, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Rates of every op at `rows` rows, of attention, of the block's products and of the host link. Plain values."""
    need = _bytes(vars(draw_inputs(spec, rows, torch.device("meta"), dtype)))
    check_room(2 * need, device, "inputs and outputs")
    inputs = draw_inputs(spec, rows, device, dtype)
    roof = copy_roof(device, seconds, max(1 << 20, inputs.x.nbytes))
    print(f"{card(device)['device']}: {rows} rows, copy roof {digits(roof)} GB/s")
    tables = [select("reference", device, "sdpa", dtype=dtype, head_dim=spec.head_dim)]
    try:
        tables.insert(0, select("triton", device, "sdpa", dtype=dtype, head_dim=spec.head_dim))
    except ValueError as error:
        print(f"no Triton kernels: {error}")
    found = [_rows_of(name, run, moved, tables, (device, seconds, roof)) for name, (run, moved) in _ops(inputs).items()]
    result = {"rows": rows, "dtype": str(dtype).removeprefix("torch."), "copy_gbs": roof, "ops": found}
    if tables[0].name == "triton" and device.type == "cuda":
        result["warps"] = _sweep(tables[0], inputs, device, seconds)
    result["attention"] = bench_attention(inputs.qkv, seconds)
    del tables
    result["products_tflops"] = {
        name: product_roof(rows, inputs_, outputs, inputs.x, seconds)
        for name, (inputs_, outputs) in product_shapes(spec).items()
    }
    result["fp8"] = _fp8(spec, inputs.qkv, seconds)
    result["host_link_gbs"] = host_roof(device, seconds, 1 << 29)
    return result | {"card": card(device)}


def _fp8(spec: DiTSpec, qkv_SH3d: Tensor, seconds: float) -> dict[str, Any]:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": spec.head_dim}
    try:
        table = select("triton", qkv_SH3d.device, "auto", **how)
    except ValueError:
        table = select("reference", qkv_SH3d.device, "auto", **how)
    return bench_fp8(spec, table, "auto", qkv_SH3d.to(torch.bfloat16), seconds)


Run = Callable[[Ops], Any]


def _ops(i: Inputs) -> dict[str, tuple[Run, int]]:
    """Op -> how to run it on a table, and the fewest bytes it must move: inputs read once, outputs written once."""
    row, qk = i.x.nbytes, i.qkv.nbytes // 3 * 2
    moves = sum(3 * x.nbytes for x, *_ in i.streams)
    byte = 1 / i.x.element_size()  # of what a value takes in e4m3
    return {
        "rms_norm": (lambda t: t.rms_norm(i.x, i.norm), 2 * row),
        "norm_modulate": (lambda t: t.norm_modulate(i.x, i.norm, i.mod.msa), 2 * row),
        "gate_norm_modulate": (lambda t: t.gate_norm_modulate(i.x, i.h, i.norm, i.mod), 4 * row),
        "gate_add": (lambda t: t.gate_add(i.x, i.h, i.mod.mlp), 3 * row),
        "qk_norm_rope": (lambda t: t.qk_norm_rope(i.qkv, *i.head_norms, i.rope)[:2], 2 * qk),
        "swiglu": (lambda t: t.swiglu(i.u), i.u.nbytes * 3 // 2),
        "euler": (lambda t: t.euler(i.streams) or [out for _, _, out, _ in i.streams], moves),
    } | ({
        "quantize_rows": (lambda t: t.quantize_rows(i.x), int((1 + byte) * row)),
        "norm_modulate_quantized": (
            lambda t: t.norm_modulate_quantized(i.x, i.norm, i.mod.msa), int((1 + byte) * row)
        ),
        "gate_norm_modulate_quantized": (
            lambda t: t.gate_norm_modulate_quantized(i.x, i.h, i.norm, i.mod), int((3 + byte) * row)
        ),
        "swiglu_quantized": (lambda t: t.swiglu_quantized(i.u), int(i.u.nbytes * (1 + byte / 2))),
        "quantize_heads": (
            lambda t: t.quantize_heads(*i.qkv.unbind(2), len(i.qkv)), int(i.qkv.nbytes * (1 + byte))
        ),
    } if e4m3.fits(i.x.device) else {})  # fmt: skip


def _rows_of(
    name: str, run: Run, moved: int, tables: list[Ops], how: tuple[torch.device, float, float]
) -> dict[str, Any]:
    device, seconds, roof = how
    row: dict[str, Any] = {"op": name, "megabytes": moved / 1e6}
    if len(tables) > 1:
        row["apart"] = _apart(run(tables[0]), run, tables[1])
    for table in tables:
        timing = measure(partial(run, table), device, seconds)
        rate = moved / timing["seconds"] / 1e9
        row[table.name] = timing | {"gbs": rate, "share_of_copy": rate / roof}
        spent = f"{timing['seconds'] * 1e3:9.3f} ms"
        print(f"{name:20} {table.name:10} {spent} {digits(rate):>6} GB/s, {rate / roof:.0%} of a copy")
    return row


def _apart(out: Any, run: Run, definition: Ops) -> dict[str, float]:
    """How far from the definition: share of elements that differ, largest difference. Checked before it is timed."""
    mine = [x.clone() for x in values_of(out)]
    theirs = values_of(run(definition))
    differ = sum(int((a != b).sum()) for a, b in zip(mine, theirs, strict=True))
    largest = max(float((a.float() - b.float()).abs().max()) for a, b in zip(mine, theirs, strict=True))
    return {"share": differ / sum(x.numel() for x in mine), "largest": largest}


@contextmanager
def _warps(module: Any, name: str, count: int) -> Iterator[None]:
    """Launch with `count` warps a program, which the module's function `name` says otherwise, for a sweep only."""
    before = getattr(module, name)
    setattr(module, name, lambda *_: count)
    try:
        yield
    finally:
        setattr(module, name, before)


def _sweep(table: Ops, i: Inputs, device: torch.device, seconds: float) -> dict[str, dict[int, float]]:
    """GB/s of each kernel over the number of warps: whether the one that is built in is the best."""
    from ..ops import gate_add, norm_modulate, qk_norm_rope, quantize_heads, quantize_rows, swiglu

    row, usual = (swiglu, "row_warps_for"), "warps_for"
    modules = {
        "norm_modulate": (norm_modulate, usual), "gate_norm_modulate": (norm_modulate, usual),
        "gate_add": (gate_add, usual), "qk_norm_rope": (qk_norm_rope, usual), "swiglu": (swiglu, usual),
        "norm_modulate_quantized": (norm_modulate, usual), "gate_norm_modulate_quantized": (norm_modulate, usual),
        "swiglu_quantized": row, "quantize_rows": (quantize_rows, usual), "quantize_heads": (quantize_heads, usual),
    }  # fmt: skip
    found: dict[str, dict[int, float]] = {}
    ops = _ops(i)
    for name in [name for name in modules if name in ops]:
        (module, function), (run, moved) = modules[name], ops[name]
        for warps in WARPS:
            with _warps(module, function, warps):
                spent = measure(partial(run, table), device, seconds / 4)["seconds"]
            found.setdefault(name, {})[warps] = round(moved / spent / 1e9, 1)
        print(f"{name:20} GB/s by warps: {found[name]}")
    return found


def bench_attention(qkv_SH3d: Tensor, seconds: float) -> dict[str, Any]:
    """TFLOP/s of every attention kernel that works here, and why the others do not; what `auto` takes."""
    rows, heads, _, dim = qkv_SH3d.shape
    device, found = qkv_SH3d.device, dict[str, Any]()
    work = 4 * rows * rows * heads * dim
    for name in KINDS:
        if name == "math" and rows > 8192:
            found[name] = "left out: its matrix would not fit"
            continue
        try:
            function, _ = choose(name, device, qkv_SH3d.dtype, dim)
        except ValueError as error:
            found[name] = str(error)
            continue
        q, k = (x.contiguous() for x in qkv_SH3d.unbind(2)[:2])  # as qk_norm_rope leaves them
        timing = measure(partial(function, q, k, qkv_SH3d[:, :, 2], rows), device, seconds)
        found[name] = timing | {"tflops": work / timing["seconds"] / 1e12}
        print(f"attention {name:10} {timing['seconds'] * 1e3:9.3f} ms {digits(found[name]['tflops']):>6} TFLOP/s")
    return found | {"auto": choose("auto", device, qkv_SH3d.dtype, dim)[1]}
