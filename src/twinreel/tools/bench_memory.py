"""`bench memory`: a model call under caps of device memory, its layers resident or taking turns, beside what was
predicted and beside the link from host memory.

The weights are random and the same in every row, so that the results can be compared bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MODES
from ..layout import shard
from ..memory.choose import GIB, Asked, choose, free_memory
from ..memory.estimate import CUDA_OWN, estimate
from ..memory.estimate import Setting as Kept
from ..models.dit import DiT
from ..models.modulation import LiveModulation, Modulation
from ..models.streamed import Hosted, Shelf, Streamed
from ..models.text_encoder import TextEncoder
from ..ops import Ops
from ..parallel import Parallel
from ..pipeline import predictor
from ..spec import Spec
from ..weights.keymap import LAYERS
from .bench_dit import (
    STEP,
    Setting,
    Sizes,
    equal,
    fill,
    inputs,
    plan_of,
    random_modulation,
    random_tensor,
    time_call,
)
from .timing import card, host_roof, measure

PROMPTS = (300, 1500)  # tokens of the conditioner's rows
LINK_BYTES = 1 << 30
# Of the released conditioner; text alone passes here, but its weights count.
VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 5120,
    "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def by_layers(module: nn.Module, part: str, device: torch.device) -> nn.Module:
    """A `part` from the meta device, filled like `fill`, with its layers in host memory."""
    prefix = LAYERS[part]
    path, _, leaf = prefix.removesuffix(".").rpartition(".")
    owner = module.get_submodule(path)
    layers = getattr(owner, leaf)

    def write(index: int, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(random_tensor(f"{prefix}{index}.{name}", tuple(tensor.shape), device, tensor.dtype))

    source = Hosted([Shelf.of(layer) for layer in layers], write, device)
    setattr(owner, leaf, Streamed(layers, source, device))
    return fill(module, device, prefix)


@torch.inference_mode()
def bench_memory(spec: Spec, sizes: Sizes, table: Ops, setting: Setting, caps: Sequence[float]) -> dict[str, Any]:
    """Seconds, peaks and predictions of a call on the whole card and under each of `caps` GiB. Plain values."""
    if not spec.text.vision:
        spec = replace(spec, text=replace(spec.text, vision=VISION))
    plan, layout = plan_of(sizes, spec)
    device = setting.device
    rows = {kind: len(getattr(layout, f"{kind}_indices")) for kind in ("text", "audio", "video")}
    result: dict[str, Any] = {
        "canvas": [plan.width, plan.height], "frames": plan.frames, "rows": sum(rows.values()), "ops": table.name,
        "why": dict(table.why), "card_before": card(device), "link_gbs": host_roof(device, setting.seconds, LINK_BYTES),
    }  # fmt: skip
    steps, text, start = inputs(spec, plan, layout, setting)
    models = Models(spec, table, setting)
    kept = Kept(device.type, setting.dtype.itemsize, 2, 4, "all", setting.adaln, table.name)
    whole = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 0.0
    calls, first = list[dict[str, Any]](), None
    for cap in (whole, *sorted(caps, reverse=True)):
        asked = Asked("auto" if calls else "stages", setting.adaln)
        choice = choose(asked, plan, rows, spec, kept, free_memory(None, int(cap * GIB) if whole else None))
        name = choice.residency if whole else "layers" if calls else "stages"  # a CPU shows that it runs
        if whole:
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / whole), device)
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
            "streamed_gbs": _streamed_bytes(dit, modulation) / row["seconds"] / 1e9,
        }  # fmt: skip
        calls.append(row)
        print(
            f"{cap:6.1f} GiB {name:11} {row['seconds']:7.3f} s a call, {row['times_resident']:.3f} x resident, peak "
            f"{row['peak_gib']:.2f} GiB, predicted {row['predicted_gib']:.2f}, same bits: {row['equal_to_first']}"
        )
        del dit, modulation, call, out
    models.drop()
    if whole:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return result | {"calls": calls, "conditioner": _conditioner(spec, setting), "card_after": card(device)}


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


def release(device: torch.device) -> None:
    """What nobody holds goes back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _dit(spec: Spec, table: Ops, setting: Setting, streamed: bool) -> DiT:
    with torch.device("meta"):
        dit = DiT(spec.dit, table, Parallel.single(), setting.dtype)
    made = by_layers(dit, "dit", setting.device) if streamed else fill(dit, setting.device)
    return made  # type: ignore[return-value]


def _modulation(spec: Spec, setting: Setting, streamed: bool) -> Modulation:
    if setting.adaln != "live" or not streamed:
        return random_modulation(setting.adaln, spec, setting)
    with torch.device("meta"):
        live = LiveModulation(spec.dit, setting.dtype)
    return by_layers(live, "modulation", setting.device)  # type: ignore[return-value]


def _predicted(row: Mapping[str, Any], stage: Mapping[str, int]) -> dict[str, float]:
    """What was predicted of the allocator's peak, without what the driver keeps."""
    predicted = (stage["device"] - CUDA_OWN if "device" in stage else stage["host"]) / GIB
    return {"predicted_gib": predicted, "predicted_over_peak": predicted / row["peak_gib"] if row["peak_gib"] else 0.0}


def _streamed_bytes(*modules: Any) -> int:
    """Bytes that one call brings to the device."""
    layers = [child for module in modules if isinstance(module, nn.Module) for child in module.modules()]
    return sum(child.pass_bytes for child in layers if isinstance(child, Streamed))


def _conditioner(spec: Spec, setting: Setting) -> list[dict[str, Any]]:
    """Seconds of a prompt, resident and layer by layer, and the link's share of the latter."""
    found: list[dict[str, Any]] = []
    outputs: dict[int, Tensor] = {}
    for streamed in (False, True):
        with torch.device("meta"):
            encoder = TextEncoder(spec.text, setting.dtype)
        made: Any = by_layers(encoder, "text_encoder", setting.device) if streamed else fill(encoder, setting.device)
        made.init_buffers(setting.device)
        for tokens in PROMPTS:
            ids, types = torch.arange(tokens) % spec.text.vocab, torch.zeros(tokens, dtype=torch.int64)
            spent = measure(partial(made, ids, types), setting.device, setting.seconds)
            out = outputs.setdefault(tokens, made(ids, types))
            found.append(
                {"tokens": tokens, "residency": "layers" if streamed else "all", **spent}
                | {"streamed_gbs": _streamed_bytes(made) / spent["seconds"] / 1e9}
                | {"equal_to_first": torch.equal(out, made(ids, types))}
            )
            print(f"conditioner, {tokens} tokens, {found[-1]['residency']:6}: {spent['seconds']:.3f} s")
        del made, encoder
        release(setting.device)
    return found
