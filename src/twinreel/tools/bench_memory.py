"""`bench memory`: a model call under caps of device memory, its layers resident or taking turns, beside what was
predicted and beside the link from host memory.

The weights are random and the same in every row, so that the results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..config import MODES
from ..layout import shard
from ..memory.choose import GIB, Asked, choose, free_memory
from ..memory.estimate import CUDA_OWN, estimate
from ..memory.estimate import Setting as Kept
from ..models.dit import DiT
from ..models.modulation import LiveModulation, Modulation
from ..ops import Ops
from ..parallel import Parallel
from ..pipeline import predictor
from ..spec import Spec
from .bench_dit import STEP, Setting, Sizes, equal, inputs, plan_of, random_modulation, time_call
from .bench_encoder import LINK_BYTES, PROMPTS, conditioner, unfilled
from .random_weights import RandomWeights, check_room, fill, weights_of
from .timing import capped, card, host_roof, release, streamed_bytes


@torch.inference_mode()
def bench_memory(spec: Spec, sizes: Sizes, table: Ops, setting: Setting, caps: Sequence[float]) -> dict[str, Any]:
    """Seconds, peaks and predictions of a call on the whole card and under each of `caps` GiB; on a CPU, which has no cap,
    resident and by layers. Plain values."""
    plan, layout = plan_of(sizes, spec)
    device = setting.device
    for module in (_unfilled(spec, table, setting), unfilled(spec.text, setting.dtype)):  # one after the other
        check_room(weights_of(module), device)
    rows = {kind: len(getattr(layout, f"{kind}_indices")) for kind in ("text", "audio", "video")}
    result: dict[str, Any] = {
        "canvas": [plan.width, plan.height], "frames": plan.frames, "rows": sum(rows.values()), "ops": table.name,
        "why": dict(table.why), "card_before": card(device), "link_gbs": host_roof(device, setting.seconds, LINK_BYTES),
    }  # fmt: skip
    steps, text, start = inputs(spec, plan, layout, setting)
    models = Models(spec, table, setting)
    kept = Kept(device.type, setting.dtype.itemsize, 2, 4, "all", setting.adaln, table.name)
    allowed: tuple[float | None, ...] = None, None  # a CPU shows that both ways run
    if device.type == "cuda":
        allowed = torch.cuda.get_device_properties(device).total_memory / GIB, *sorted(caps, reverse=True)
    calls, first = list[dict[str, Any]](), None
    for cap in allowed:
        asked = Asked("stages" if not calls else "layers" if cap is None else "auto", setting.adaln)
        choice = choose(asked, plan, rows, spec, kept, free_memory(None, None if cap is None else int(cap * GIB)))
        name = choice.residency
        with capped(device, cap):
            dit, modulation = models.get(name)
            modulation.prepare([timesteps for timesteps, _ in steps])
            call = predictor(dit, modulation, text, shard(layout, 1, 0), steps, row_chunk=choice.row_chunk)
            row, out = time_call(partial(call, STEP, start), setting)
            first = out if first is None else first
            stage = estimate(plan, rows, spec, replace(kept, residency=name, row_chunk=choice.row_chunk))["denoise"]
            row |= _predicted(row, stage) | {
                "cap_gib": cap, "residency": name, "adaln": setting.adaln, "row_chunk": choice.row_chunk,
                "why": choice.why["residency"], "equal_to_first": equal(out, first),
                "times_resident": row["seconds"] / (calls[0]["seconds"] if calls else row["seconds"]),
                "streamed_gbs": streamed_bytes(dit, modulation) / row["seconds"] / 1e9,
            }  # fmt: skip
            calls.append(row)
            shown = "no cap" if cap is None else f"{cap:.1f} GiB"
            print(
                f"{shown:>10} {name:11} {row['seconds']:7.3f} s a call, {row['times_resident']:.3f} x resident, peak "
                f"{row['peak_gib']:.2f} GiB, predicted {row['predicted_gib']:.2f}, same bits: {row['equal_to_first']}"
            )
            del dit, modulation, call, out
    models.drop()
    result |= {"calls": calls, "conditioner": conditioner(spec, PROMPTS, setting, ("all", "layers"))}
    return result | {"card_after": card(device)}


class Models:
    """The DiT and its modulation, resident or by layers; one pair at a time lies in memory."""

    def __init__(self, spec: Spec, table: Ops, setting: Setting) -> None:
        self._spec, self._table, self._setting = spec, table, setting
        self._streamed: bool | None = None
        self._pair: tuple[DiT, Modulation] | None = None

    def get(self, residency: str) -> tuple[DiT, Modulation]:
        """The pair as `residency` has it."""
        streamed = MODES[residency].streams("dit")
        if self._pair is None or streamed is not self._streamed:
            self.drop()
            modulation = _modulation(self._spec, self._setting, streamed)
            self._pair = _dit(self._spec, self._table, self._setting, streamed), modulation
            self._streamed = streamed
        return self._pair

    def drop(self) -> None:
        """Let it go."""
        self._pair = None
        release(self._setting.device)


def _unfilled(spec: Spec, table: Ops, setting: Setting) -> DiT:
    with torch.device("meta"):
        return DiT(spec.dit, table, Parallel.single(), setting.dtype)


def _dit(spec: Spec, table: Ops, setting: Setting, streamed: bool) -> DiT:
    dit = _unfilled(spec, table, setting)
    made = RandomWeights(spec, setting.device).by_layers(dit, "dit") if streamed else fill(dit, setting.device)
    return made  # type: ignore[return-value]


def _modulation(spec: Spec, setting: Setting, streamed: bool) -> Modulation:
    if setting.adaln != "live" or not streamed:
        return random_modulation(setting.adaln, spec, setting)
    with torch.device("meta"):
        live = LiveModulation(spec.dit, setting.dtype)
    return RandomWeights(spec, setting.device).by_layers(live, "modulation")  # type: ignore[return-value]


def _predicted(row: Mapping[str, Any], stage: Mapping[str, int]) -> dict[str, float]:
    """What was predicted of the allocator's peak, without what the driver keeps."""
    predicted = (stage["device"] - CUDA_OWN if "device" in stage else stage["host"]) / GIB
    return {"predicted_gib": predicted, "predicted_over_peak": predicted / row["peak_gib"] if row["peak_gib"] else 0.0}
