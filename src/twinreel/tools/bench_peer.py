"""`bench dit --against diffusers`: the public class on the weights and inputs that ours has just run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import PackedLayout
from ..noise import Rows
from ..spec import Spec
from .bench_dit import STEP, Setting, Steps, distance, time_call
from .oracle import check_diffusers, public_dit
from .random_weights import random_tensor


def bench_peer(
    spec: Spec, layout: PackedLayout, given: tuple[Steps, Tensor, Rows], setting: Setting, ours: tuple[Rows, float]
) -> list[dict[str, Any]]:
    """Seconds of its call, eager and, where `setting.compiled`, with its blocks compiled; how many times ours that is,
    and how far its velocities are from ours. `ours`: our first call's velocities and seconds. Raises ConfigError."""
    version, device = check_diffusers(), setting.device

    def weights(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return random_tensor(name, shape, device, dtype)

    model: Any = public_dit(spec, weights, setting.dtype, device)
    steps, text, start = given
    timesteps, indices = (x.to(device) for x in steps[STEP])
    names = {"token_tags": layout.tags_S, "position_ids": layout.positions_S3}
    names |= {f"{kind}_indices": getattr(layout, f"{kind}_indices") for kind in ("video", "audio", "text")}
    rows = {name: value.to(device) for name, value in names.items()}

    def call() -> Rows:
        out = model(
            hidden_states=start.video[None], audio_hidden_states=start.audio[None], encoder_hidden_states=text[None],
            timestep=timesteps, timestep_indices=indices, return_dict=False, **rows,
        )  # fmt: skip
        return Rows(*(part[0] for part in out))

    found = []
    for mode in ("eager", "compiled") if setting.compiled else ("eager",):
        if mode == "compiled":
            model.compile_repeated_blocks()
        row, velocities = time_call(call, setting)
        row |= {"against": f"diffusers {version}", "mode": mode, "times_ours": row["seconds"] / ours[1]}
        row["distance_to_ours"] = distance(velocities, ours[0])
        found.append(row)
        print(
            f"diffusers {version}, {mode}: {row['seconds']:.3f} s a call, {row['times_ours']:.3f} x ours, peak "
            f"{row['peak_gib']:.2f} GiB, distance to ours {row['distance_to_ours']}"
        )
    return found
