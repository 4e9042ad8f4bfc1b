"""`bench encoder`: a text prompt through the conditioner, resident and layer by layer, beside products and the link.

The vision tower is left out: text alone passes, and the tower's share of the weights is not worth their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.text_encoder import TextEncoder
from ..spec import Spec, TextSpec
from .bench_dit import Setting
from .random_weights import NO_VISION, RandomWeights, check_room, weights_of
from .timing import card, device_memory, host_roof, measure, product_roof, release, streamed_bytes

PROMPTS = (300, 1500)  # tokens
LINK_BYTES = 1 << 30


@torch.inference_mode()
def bench_encoder(spec: Spec, tokens: Sequence[int], setting: Setting, stream: bool) -> dict[str, Any]:
    """Seconds of prompts of `tokens` tokens, with `stream` also layer by layer; floors of the same run. Plain values."""
    spec = replace(spec, text=replace(spec.text, vision={**spec.text.vision, **NO_VISION}))
    device, seconds = setting.device, setting.seconds
    check_room(weights_of(unfilled(spec.text, setting.dtype)), device)  # before anything is measured
    result: dict[str, Any] = {"dtype": str(setting.dtype).removeprefix("torch."), "card_before": card(device)}
    like = torch.empty(0, device=device, dtype=setting.dtype)
    floors = {count: products_seconds(spec.text, count, like, seconds / 4) for count in tokens}
    link = host_roof(device, seconds, LINK_BYTES) if stream else {}
    rows = conditioner(spec, tokens, setting, ("all", "layers") if stream else ("all",))
    for row in rows:
        row["products_seconds"] = floors[row["tokens"]]
        row["share_of_products"] = row["products_seconds"] / row["seconds"]
        if row["streamed_bytes"] and link:
            row["link_seconds"] = row["streamed_bytes"] / link["pinned"] / 1e9
            row["share_of_link"] = row["link_seconds"] / row["seconds"]
            print(f"  the link alone: {row['link_seconds']:.3f} s at {link['pinned']:.1f} GB/s")
    return result | {"link_gbs": link, "prompts": rows, "card_after": card(device)}


def products_seconds(text: TextSpec, tokens: int, like: Tensor, seconds: float) -> float:
    """The time of the products of all layers at the rates that they alone reach, each measured for `seconds`."""
    heads, pairs = text.heads * text.head_dim, text.kv_heads * text.head_dim
    shapes = [(text.hidden, heads), (text.hidden, pairs), (text.hidden, pairs), (heads, text.hidden)]
    shapes += [(text.hidden, text.intermediate)] * 2 + [(text.intermediate, text.hidden)]
    rates = {shape: product_roof(tokens, *shape, like, seconds) for shape in dict.fromkeys(shapes)}
    return text.hidden_layer * sum(2 * tokens * a * b / rates[a, b] / 1e12 for a, b in shapes)


def unfilled(text: TextSpec, dtype: torch.dtype) -> TextEncoder:
    """A conditioner on the meta device."""
    with torch.device("meta"):
        return TextEncoder(text, dtype)


def conditioner(
    spec: Spec, tokens: Sequence[int], setting: Setting, residencies: Sequence[str]
) -> list[dict[str, Any]]:
    """Seconds and peak memory of prompts under each of `residencies`, `all` or `layers`, and whether their bits are the
    same. The vision tower is as `spec` has it."""
    found: list[dict[str, Any]] = []
    outputs: dict[int, Tensor] = {}
    device, weights = setting.device, RandomWeights(spec, setting.device)
    for residency in residencies:
        encoder = unfilled(spec.text, setting.dtype)
        if residency == "layers":
            made: Any = weights.by_layers(encoder, "text_encoder")
        else:
            made = weights.load(encoder, "text_encoder", device)
        for count in tokens:
            ids, types = torch.arange(count) % spec.text.vocab, torch.zeros(count, dtype=torch.int64)
            with device_memory(device) as memory:
                spent = measure(partial(made, ids, types), device, setting.seconds)
            out = made(ids, types)
            streamed = streamed_bytes(made)
            row = {"tokens": count, "residency": residency, **spent, **memory, "streamed_bytes": streamed}
            row["streamed_gbs"] = streamed / spent["seconds"] / 1e9
            row["equal_to_first"] = torch.equal(out, outputs.setdefault(count, out))
            row["finite"] = bool(out.isfinite().all())
            found.append(row)
            print(
                f"conditioner, {count} tokens, {residency:6}: {spent['seconds']:.3f} s, "
                f"peak {row['peak_gib']:.2f} GiB, same bits: {row['equal_to_first']}"
            )
        del made, encoder
        release(device)
    return found
