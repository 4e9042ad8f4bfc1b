"""`bench dit`: whole model calls on random weights, beside a floor from roofs of the same run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import PackedLayout, build_layout, shard
from ..limits import PROMPT_CHARACTERS, Range, durations
from ..models.dit import DiT
from ..models.modulation import LiveModulation, Modulation
from ..models.quantized import quantized_kind
from ..noise import Rows
from ..ops import Ops, describe
from ..parallel import Parallel
from ..pipeline import predictor
from ..plan import Plan, make_plan
from ..precision import Fp8
from ..request import Request, check_request
from ..schedule import make_sigmas, step_timesteps
from ..spec import FPS, Spec
from .bench_fp8 import attention_rates, product_rate, product_shapes
from .random_weights import RandomWeights, check_room, fill, weights_of
from .timing import card, device_memory, digits, kernels, measure, product_roof, release

Steps = list[tuple[Tensor, Tensor]]
STEP = 1  # the first step at which video and audio have timesteps of their own


@dataclass(frozen=True)
class Sizes:
    """What is asked of the model."""

    frames: int
    size: tuple[int, int] | None
    text: int


@dataclass(frozen=True)
class Way:
    """One way to run the model: the precision as it was asked for, its table of ops, and what of it is in e4m3, with the
    table that these blocks have."""

    precision: str
    ops: Ops
    fp8: Fp8 | None = None
    narrow: Ops | None = None

    @property
    def why(self) -> dict[str, str]:
        """How the tables were chosen."""
        return dict((self.narrow or self.ops).why)

    def blocks(self, layers: int) -> range:
        """The blocks in e4m3."""
        return range(0) if self.fp8 is None else range(self.fp8.blocks, layers - self.fp8.blocks)


@dataclass(frozen=True)
class Setting:
    """Where and how the calls run. `adaln`: `live`, `precompute`, or `both`, which compares them. `against`: whether
    diffusers runs on the same weights and inputs afterwards, `compiled`: also with its blocks compiled."""

    device: torch.device
    dtype: torch.dtype
    adaln: str
    seconds: float
    profile: bool = False
    against: bool = False
    compiled: bool = False


def request_of(sizes: Sizes, **more: Any) -> Request:
    """A T2VA request whose prompt has as many words as `RandomWeights` is to make tokens of; `more` fields of it."""
    prompt = " ".join(chr(ord("a") + number % 26) for number in range(sizes.text))
    return Request(prompt, size=sizes.size, duration=sizes.frames / FPS, **more)


def check_sizes(sizes: Sizes, spec: Spec) -> None:
    """Refuse what no request of this model has, by the names and in the units of a bench's flags. Raises RequestError."""
    seconds = durations(spec.world)
    frames = math.ceil(seconds.low * FPS), math.floor(seconds.high * FPS)
    Range(*frames, "frames", whole=True, owned=True).check("frames", sizes.frames)
    words = (int(PROMPT_CHARACTERS.high) + 1) // 2  # of a letter each, with spaces between
    Range(1, words, "rows", whole=True).check("text", sizes.text)
    check_request(request_of(sizes), spec)


def plan_of(sizes: Sizes, spec: Spec) -> tuple[Plan, PackedLayout]:
    """The plan of a T2VA request and its layout with `text` prompt rows. Raises RequestError."""
    check_sizes(sizes, spec)
    plan = make_plan(request_of(sizes), spec)
    return plan, build_layout(plan, torch.ones(sizes.text, dtype=torch.int64), spec)


def random_modulation(kind: str, spec: Spec, setting: Setting) -> Modulation:
    """`live`, or tables made from the very same weights, which then never lie in memory together."""
    if kind != "live":
        return RandomWeights(spec, setting.device).tables(setting.dtype)
    with torch.device("meta"):
        live = LiveModulation(spec.dit, setting.dtype)
    return fill(live, setting.device)  # type: ignore[return-value]


@torch.inference_mode()
def bench_dit(spec: Spec, sizes: Sizes, ways: list[Way], setting: Setting) -> dict[str, Any]:
    """Seconds of one call in each way, peak memory, share of its floor. Plain values."""
    plan, layout = plan_of(sizes, spec)
    device, rows = setting.device, layout.tags_S.shape[0]
    models = [_unfilled(spec, way, setting.dtype) for way in ways]
    weights = {way.precision: weights_of(model) for way, model in zip(ways, models, strict=True)}
    check_room(sum(weights.values()), device)  # before anything is measured
    result: dict[str, Any] = {
        "canvas": [plan.width, plan.height], "frames": plan.frames, "rows": rows, "text": sizes.text,
        "dtype": str(setting.dtype).removeprefix("torch."), "card_before": card(device),
    }  # fmt: skip
    result["petaflop"] = {name: value / 1e15 for name, value in call_work(spec, rows).items()}
    result["roofs_tflops"] = roofs = _roofs(spec, rows, ways, setting)
    floors = {way.precision: floor_seconds(spec, rows, way, roofs) for way in ways}
    result["floor_seconds"] = floors
    rates = ", ".join(f"{name} {digits(rate)}" for name, rate in roofs.items())
    print(f"{rows} rows; TFLOP/s {rates}; floors {', '.join(f'{name} {s:.3f} s' for name, s in floors.items())}")
    given = inputs(spec, plan, layout, setting)
    result["calls"], first = _calls(spec, layout, list(zip(ways, models, strict=True)), setting, given)
    for call in result["calls"]:
        call["share_of_floor"] = floors[call["precision"]] / call["seconds"]
    if setting.against:
        from .bench_peer import bench_peer

        models.clear()  # ours make room for theirs
        release(device)
        result["peer"] = bench_peer(spec, layout, given, setting, (first, result["calls"][0]["seconds"]))
    return result | {"card_after": card(device)}


def floor_seconds(spec: Spec, rows: int, way: Way, roofs: Mapping[str, float]) -> float:
    """The products' and attention's time of one call at the measured rates."""
    work, layers = call_work(spec, rows), spec.dit.layers
    share = len(way.blocks(layers)) / layers
    attention = "fp8_attention" if way.why.get("fp8_attention", "").startswith("fp8") else "attention"
    rates = (("products", "fp8_products"), ("attention", attention))
    return sum(
        work[wide] / 1e12 * ((1 - share) / roofs[wide] + (share / roofs[narrowed] if share else 0))
        for wide, narrowed in rates
    )


def inputs(spec: Spec, plan: Plan, layout: PackedLayout, setting: Setting) -> tuple[Steps, Tensor, Rows]:
    """The timesteps of every step, and random prompt embeddings and rows."""
    sigmas = make_sigmas(plan.steps, plan.shifts)
    text = torch.randn(len(layout.text_indices), spec.dit.text_dim, device=setting.device, dtype=setting.dtype)
    sizes = ((layout.video_indices, spec.dit.video_row), (layout.audio_indices, spec.dit.audio_channels))
    start = Rows(*(torch.randn(len(indices), width, device=setting.device) for indices, width in sizes))
    return [step_timesteps(layout, sigmas, step) for step in range(sigmas.calls)], text, start


def _calls(
    spec: Spec, layout: PackedLayout, made: list[tuple[Way, DiT]], setting: Setting, given: tuple[Steps, Tensor, Rows]
) -> tuple[list[dict[str, Any]], Rows]:
    """A row for each way, and the first one's velocities."""
    _fill(made, setting.device)
    steps, text, start = given
    found, outputs = list[dict[str, Any]](), list[Rows]()
    for kind in ("precompute", "live") if setting.adaln == "both" else (setting.adaln,):
        modulation = random_modulation(kind, spec, setting)
        adaln = modulation.prepare([timesteps for timesteps, _ in steps])
        for way, model in made:
            call = predictor(model, modulation, text, shard(layout, 1, 0), steps)
            row, out = time_call(partial(call, STEP, start), setting)
            outputs.append(out)
            row |= {
                "precision": way.precision,
                "ops": way.ops.name,
                "implementations": describe(way.ops),
                "why": way.why,
                "adaln": adaln,
                "equal_to_first": equal(out, outputs[0]),
                "distance_to_first": distance(out, outputs[0])["video"],
            }
            found.append(row)
            print(
                f"{kind:10} {way.ops.name:10} {way.precision:14} {row['seconds']:7.3f} s a call, "
                f"peak {row['peak_gib']:.2f} GiB, distance to the first {row['distance_to_first']:.1e}"
            )
            del call
        del modulation
        release(setting.device)
    return found, outputs[0]


def _unfilled(spec: Spec, way: Way, dtype: torch.dtype) -> DiT:
    kinds = {}
    if way.narrow is not None:
        kinds = dict.fromkeys(way.blocks(spec.dit.layers), quantized_kind(way.narrow))
    with torch.device("meta"):
        return DiT(spec.dit, way.ops, Parallel.single(), dtype, kinds)


def _fill(made: list[tuple[Way, DiT]], device: torch.device) -> None:
    """The models of one precision over one set of weights."""
    first = dict[str, nn.Module]()
    for way, model in made:
        if way.precision in first:
            model.load_state_dict(first[way.precision].state_dict(), assign=True)
        else:
            first[way.precision] = fill(model, device)
        model.requires_grad_(False).eval()


def call_work(spec: Spec, rows: int) -> dict[str, int]:
    """Floating-point operations of one call's block products and of its attention."""
    dit = spec.dit
    width = dit.hidden * 3 * dit.inner + dit.inner * dit.hidden + dit.hidden * 2 * dit.ffn + dit.ffn * dit.hidden
    return {"products": 2 * rows * width * dit.layers, "attention": 4 * rows * rows * dit.inner * dit.layers}


def _roofs(spec: Spec, rows: int, ways: list[Way], setting: Setting) -> dict[str, float]:
    dit, device, table = spec.dit, setting.device, ways[0].ops
    shapes = list(product_shapes(dit).values())
    like = torch.empty(0, device=device, dtype=setting.dtype)
    # the time of all four together: their rates, weighted by their work
    spent = sum(a * b / product_roof(rows, a, b, like, setting.seconds / 2) for a, b in shapes)
    qkv = torch.randn(rows, dit.heads, 3, dit.head_dim, device=device, dtype=setting.dtype)
    q, k = (x.contiguous() for x in qkv.unbind(2)[:2])
    attend = measure(lambda: table.attention(q, k, qkv[:, :, 2], rows), device, setting.seconds)["seconds"]
    roofs = {
        "products": sum(a * b for a, b in shapes) / spent,
        "attention": 4 * rows * rows * dit.inner / attend / 1e12,
    }
    narrow_tables = [way.narrow for way in ways if way.narrow is not None]
    if narrow_tables:
        table = narrow_tables[0]
        spent = sum(a * b / product_rate(table, rows, (a, b), device, setting.seconds / 2) for a, b in shapes)
        roofs["fp8_products"] = sum(a * b for a, b in shapes) / spent
        roofs["fp8_attention"] = attention_rates(table, qkv, setting.seconds)["kernel"]
    return roofs


def time_call(call: Any, setting: Setting) -> tuple[dict[str, Any], Rows]:
    """Seconds and peak memory of `call`, whether it repeats its bits and is finite; and what it gives."""
    out = call()
    with device_memory(setting.device) as memory:
        row: dict[str, Any] = dict(measure(call, setting.device, setting.seconds))
    row |= memory
    again = call()
    row["repeats"] = equal(out, again)
    row["finite"] = all(bool(x.isfinite().all()) for x in vars(out).values())
    if setting.profile:
        row["kernels"] = kernels(call, setting.device)
    return row, out


def equal(a: Rows, b: Rows) -> bool:
    """Whether all bits are the same."""
    return torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)


def distance(out: Rows, first: Rows) -> dict[str, float]:
    """Relative distances of the velocities of both modalities."""
    pairs = ((name, getattr(out, name), getattr(first, name)) for name in ("video", "audio"))
    return {name: float((a - b).norm() / b.norm()) for name, a, b in pairs}
