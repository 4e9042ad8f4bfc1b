"""The spine on one CUDA device: every task, memory, precision. Skips where there is no device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from short_requests import ALL
from twinreel import Engine, EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(path: Path, **config: object) -> Engine:
    return Engine(EngineConfig(model=str(path), device="cuda", **config))  # type: ignore[arg-type]


def hashes(engine: Engine) -> dict[str, dict[str, str]]:
    return {task: engine.generate(request).report["sha256"] for task, request in ALL.items()}


def test_auto_choices(tiny_original: Path) -> None:
    facts = make(tiny_original).describe()
    assert facts["dtypes"]["dit"] == "bfloat16" and facts["dtypes"]["video_vae_decode"] == "float16"
    assert facts["residency"] == "all"


def test_memory_returns_to_idle(tiny_original: Path) -> None:
    engine = make(tiny_original)
    hashes(engine)
    torch.cuda.synchronize()
    idle = torch.cuda.memory_allocated()
    hashes(engine)
    engine.cancel()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == idle


@pytest.mark.parametrize("task", ALL)
def test_fp32_is_close_to_the_cpu(tiny_original: Path, task: str) -> None:
    request = replace(ALL[task], noise="sequential")
    on_cpu = Engine(EngineConfig(model=str(tiny_original), device="cpu")).generate(request)
    on_gpu = make(tiny_original, precision="fp32").generate(request)
    # fp16 products in the decoder move a byte by one here and there
    difference = np.abs(on_cpu.video.astype(int) - on_gpu.video.astype(int))
    assert difference.mean() < 0.2 and difference.max() <= 8, (difference.mean(), difference.max())
    assert np.abs(on_cpu.audio - on_gpu.audio).max() < 2e-3


def test_tf32_encode_is_a_named_choice(tiny_original: Path) -> None:
    request = ALL["fl2va"]
    exact, fast = make(tiny_original), make(tiny_original, vae_encode="tf32")
    assert exact.generate(request).report["flags"]["encode"]["convolution_tf32"] is False
    report = fast.generate(request).report
    assert report["flags"]["encode"]["convolution_tf32"] is True
    assert report["flags"]["denoise"]["convolution_tf32"] is False
    assert report["engine"]["dtypes"]["video_vae_encode"] == "tf32"
    half = make(tiny_original, vae_encode="fp16").generate(request)
    assert half.report["engine"]["dtypes"]["video_vae_encode"] == "fp16"
    assert half.report["flags"]["encode"]["convolution_tf32"] is False
