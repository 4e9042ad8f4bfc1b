"""`bench dit`: whole model calls on random weights, beside a floor from roofs of the same run."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import PackedLayout, build_layout, shard
from ..models.dit import DiT
from ..models.modulation import LiveModulation, Modulation
from ..models.modulation_tables import PrecomputedModulation
from ..noise import Rows
from ..ops import Ops, describe
from ..parallel import Parallel
from ..pipeline import predictor
from ..plan import Plan, make_plan
from ..request import Request
from ..schedule import make_sigmas, step_timesteps
from ..spec import Spec
from .timing import card, kernels, measure, product_roof

STEP = 1  # the first step at which video and audio have timesteps of their own


@dataclass(frozen=True)
class Sizes:
    """What is asked of the model."""

    frames: int
    size: tuple[int, int] | None
    text: int


@dataclass(frozen=True)
class Setting:
    """Where and how the calls run. `adaln`: `live`, `precompute`, or `both`, which compares them."""

    device: torch.device
    dtype: torch.dtype
    adaln: str
    seconds: float
    profile: bool


def plan_of(sizes: Sizes, spec: Spec) -> tuple[Plan, PackedLayout]:
    """The plan of a T2VA request and its layout with `text` prompt rows."""
    plan = make_plan(Request("a", size=sizes.size, duration=sizes.frames / 24), spec)
    return plan, build_layout(plan, torch.ones(sizes.text, dtype=torch.int64), spec)


def random_tensor(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values that keep a forward's variance, the same for the same name."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    if name.endswith("norm.weight") or ".norm" in name and len(shape) == 1:
        return drawn.mul_(0.1).add_(1)
    return drawn.mul_(shape[-1] ** -0.5 if len(shape) > 1 else 0.02)


def fill(module: nn.Module, device: torch.device) -> nn.Module:
    """A module from the meta device, filled with `random_tensor` in the dtypes it was built with."""
    for name, meta in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        tensor = random_tensor(name, tuple(meta.shape), device, meta.dtype)
        setattr(module.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))
    return module.eval()


def random_modulation(kind: str, spec: Spec, setting: Setting) -> Modulation:
    """`live`, or tables made from the very same weights, which then never lie in memory together."""
    with torch.device("meta"):
        live = LiveModulation(spec.dit, setting.dtype)
    if kind == "live":
        return fill(live, setting.device)  # type: ignore[return-value]

    def source(prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, meta in live.named_parameters():
            if name.startswith(prefix):
                yield name, random_tensor(name, tuple(meta.shape), setting.device, meta.dtype)

    return PrecomputedModulation(spec.dit, setting.dtype, setting.device, source, lambda: "random")


@torch.inference_mode()
def bench_dit(spec: Spec, sizes: Sizes, tables: list[Ops], setting: Setting) -> dict[str, Any]:
    """Seconds of one call for each table of ops, peak memory, share of the floor. Plain values."""
    plan, layout = plan_of(sizes, spec)
    device, rows = setting.device, layout.tags_S.shape[0]
    result: dict[str, Any] = {
        "canvas": [plan.width, plan.height], "frames": plan.frames, "rows": rows, "text": sizes.text,
        "dtype": str(setting.dtype).removeprefix("torch."), "card_before": card(device),
    }  # fmt: skip
    work = call_work(spec, rows)
    result["petaflop"] = {name: value / 1e15 for name, value in work.items()}
    result["roofs_tflops"] = roofs = _roofs(spec, rows, tables[0], setting)
    floor = work["products"] / roofs["products"] / 1e12 + work["attention"] / roofs["attention"] / 1e12
    result["floor_seconds"] = floor
    print(f"{rows} rows; floor {floor:.3f} s from {roofs['products']:.0f} and {roofs['attention']:.0f} TFLOP/s")
    result["calls"] = _calls(spec, plan, layout, tables, setting, floor)
    return result | {"card_after": card(device)}


def _calls(
    spec: Spec, plan: Plan, layout: PackedLayout, tables: list[Ops], setting: Setting, floor: float
) -> list[dict[str, Any]]:
    device, models = setting.device, _models(spec, tables, setting)
    sigmas = make_sigmas(plan.steps, plan.shifts)
    steps = [step_timesteps(layout, sigmas, step) for step in range(sigmas.calls)]
    text = torch.randn(len(layout.text_indices), spec.dit.text_dim, device=device, dtype=setting.dtype)
    sizes = ((layout.video_indices, spec.dit.video_row), (layout.audio_indices, spec.dit.audio_channels))
    start = Rows(*(torch.randn(len(indices), width, device=device) for indices, width in sizes))
    found, outputs = list[dict[str, Any]](), list[Rows]()
    for kind in ("precompute", "live") if setting.adaln == "both" else (setting.adaln,):
        modulation = random_modulation(kind, spec, setting)
        made = modulation.prepare([timesteps for timesteps, _ in steps])
        for table in tables:
            call = predictor(models[table.name], modulation, text, shard(layout, 1, 0), steps)
            row, out = _time(partial(call, STEP, start), setting)
            outputs.append(out)
            row |= {
                "ops": table.name,
                "implementations": describe(table),
                "why": dict(table.why),
                "adaln": made,
                "share_of_floor": floor / row["seconds"],
                "equal_to_first": _equal(out, outputs[0]),
                "distance_to_first": _distance(out, outputs[0]),
            }
            found.append(row)
            print(
                f"{kind:10} {table.name:10} {row['seconds']:7.3f} s a call, {row['share_of_floor']:.1%} of the floor, "
                f"peak {row['peak_gib']:.2f} GiB, distance to the first {row['distance_to_first']:.1e}"
            )
            del call
        del modulation
        gc.collect()
    return found


def _models(spec: Spec, tables: list[Ops], setting: Setting) -> dict[str, DiT]:
    """One DiT for each table, all of them over one set of weights."""
    with torch.device("meta"):
        models = {table.name: DiT(spec.dit, table, Parallel.single(), setting.dtype) for table in tables}
    first = next(iter(models.values()))
    fill(first, setting.device)
    for model in models.values():
        model.load_state_dict(first.state_dict(), assign=True)
        model.requires_grad_(False)
    return models


def call_work(spec: Spec, rows: int) -> dict[str, int]:
    """Floating-point operations of one call's block products and of its attention."""
    dit = spec.dit
    width = dit.hidden * 3 * dit.inner + dit.inner * dit.hidden + dit.hidden * 2 * dit.ffn + dit.ffn * dit.hidden
    return {"products": 2 * rows * width * dit.layers, "attention": 4 * rows * rows * dit.inner * dit.layers}


def _roofs(spec: Spec, rows: int, table: Ops, setting: Setting) -> dict[str, float]:
    dit, device = spec.dit, setting.device
    shapes = ((dit.hidden, 3 * dit.inner), (dit.inner, dit.hidden), (dit.hidden, 2 * dit.ffn), (dit.ffn, dit.hidden))
    like = torch.empty(0, device=device, dtype=setting.dtype)
    # the time of all four together: their rates, weighted by their work
    spent = sum(a * b / product_roof(rows, a, b, like, setting.seconds / 2) for a, b in shapes)
    qkv = torch.randn(rows, dit.heads, 3, dit.head_dim, device=device, dtype=setting.dtype)
    q, k = (x.contiguous() for x in qkv.unbind(2)[:2])
    attend = measure(lambda: table.attention(q, k, qkv[:, :, 2], rows), device, setting.seconds)["seconds"]
    return {
        "products": sum(a * b for a, b in shapes) / spent,
        "attention": 4 * rows * rows * dit.inner / attend / 1e12,
    }


def _time(call: Any, setting: Setting) -> tuple[dict[str, Any], Rows]:
    cuda = setting.device.type == "cuda"
    out = call()
    if cuda:
        torch.cuda.synchronize(setting.device)
        resting = torch.cuda.memory_allocated(setting.device)
        torch.cuda.reset_peak_memory_stats(setting.device)
    row: dict[str, Any] = dict(measure(call, setting.device, setting.seconds))
    row["peak_gib"] = torch.cuda.max_memory_allocated(setting.device) / 2**30 if cuda else 0.0
    row["resting_gib"] = resting / 2**30 if cuda else 0.0
    again = call()
    row["repeats"] = _equal(out, again)
    row["finite"] = all(bool(x.isfinite().all()) for x in vars(out).values())
    if setting.profile:
        row["kernels"] = kernels(call, setting.device)
    return row, out


def _equal(a: Rows, b: Rows) -> bool:
    return torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)


def _distance(out: Rows, first: Rows) -> float:
    """Relative distance of the video velocities."""
    return float((out.video - first.video).norm() / first.video.norm())
