"""A small DiT run on one table of ops or another, and how often our custom ops were called meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import op_cases as cases
from golden_dit import TINY, golden_weights
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.modulation import LiveModulation
from twinreel.ops import select
from twinreel.parallel import Parallel


class Counting(TorchDispatchMode):
    """Counts the calls of our custom ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "twinreel":
            self.counts[function.name().removeprefix("twinreel::")] += 1
        return function(*args, **(kwargs or {}))


def forward(table: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    spec, weights = TINY, golden_weights(TINY)
    dit = DiT(spec, select(table, device, dtype=dtype, head_dim=spec.head_dim), Parallel.single(), dtype)
    modulation = LiveModulation(spec, dtype)
    for module in (dit, modulation):
        module.load_state_dict({name: weights[name] for name in module.state_dict()})
        module.to(device).requires_grad_(False)
    rows = 30
    tags = torch.tensor([1] * 6 + [2] * 8 + [0] * 16)
    positions = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    indices = tuple((tags == tag).nonzero().flatten() for tag in (1, 0, 2))
    at = make_row_state(positions, tags, indices, spec, dtype, device)  # type: ignore[arg-type]
    sizes = ((6, spec.text_dim), (16, spec.video_row), (8, spec.audio_channels))
    text, video, audio = (cases.draw(*size, seed=size[0], dtype=torch.float32, device=device) for size in sizes)
    with torch.inference_mode():
        mod = modulation.at(torch.tensor([0.2, 0.7]), (at.tags == 2).long(), at)
        return dit(video, audio, dit.refine(text), at, mod)


def check_model(table: str, dtype: torch.dtype, device: str) -> None:
    """A whole forward engages every kernel as often as it should, and is close to the definition's."""
    wanted = forward("reference", dtype, device)
    with Counting() as seen:
        out = forward(table, dtype, device)
    layers, refiner = TINY.layers, TINY.refiner_layers
    counts = {name: count for name, count in seen.counts.items() if not name.startswith("fa")}
    assert counts == {
        "norm_modulate": layers + 1,
        "gate_norm_modulate": layers,
        "gate_add": layers,
        "qk_norm_rope": layers + refiner,
        "swiglu": layers + refiner,
        "rms_norm": 2 * refiner + 1,
    }
    for mine, theirs in zip(out, wanted, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert error < (2e-6 if dtype == torch.float32 else 5e-3), error
