"""Same seed, same card, same configuration, same file: every mode of one CUDA device twice, the second time by an engine of
its own. Skips where there is no device; where PyAV is not installed, frames and waveform are compared and no file."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from short_requests import ALL
from tiny import tiny_spec, write_tiny
from twinreel import Engine, EngineConfig, OutputOptions, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REQUESTS = tuple(ALL.values())
CHUNK = 64  # rows: fewer than each of these requests has
MODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "reference": {"ops": "reference"},
    "live": {"adaln": "live"},
    "fp32": {"precision": "fp32"},
    "fp8": {"precision": "fp8"},
    "fp8 everywhere": {"precision": "fp8:blocks=0"},
    "fp8, first and last steps bf16": {"precision": "fp8:steps=1"},
    "tf32 encode": {"vae_encode": "tf32"},
    "fp16 encode": {"vae_encode": "fp16"},
    "row chunks": {"row_chunk": CHUNK},
} | {
    f"attention {name}": {"attention": name} for name in ("cudnn", "flash", "sdpa", "math")
} | {
    f"residency {name}": {"residency": name} for name in ("conditioner", "stages", "layers", "mapped")
}  # fmt: skip
POLICIES = ("reuse", "forecast:balanced", "forecast:fast")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_spec()
    spec = replace(spec, dit=replace(spec.dit, layers=5, head_dim=128))  # heads that fa3 takes
    return write_tiny(tmp_path_factory.mktemp("determinism") / "model", spec=spec)


def made(model: Path, folder: Path, requests: tuple[Request, ...], config: dict[str, Any]) -> list[Any]:
    """Hashes of what a fresh engine makes of `requests`: of files, or of frames and waveforms."""
    found: list[Any] = []
    with closing(Engine(EngineConfig(model=str(model), device="cuda", **config))) as engine:
        for number, request in enumerate(requests):
            if find_spec("av") is None:
                found.append(engine.generate(request).report["sha256"])
                continue
            target = folder / f"{number}.mp4"
            engine.render(request, target, OutputOptions(overwrite=True))
            found.append(hashlib.sha256(target.read_bytes()).hexdigest())
        assert engine.describe()["row_chunk"] == config.get("row_chunk", 0)  # of the last request
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_makes_the_same_files_twice(
    model: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinreel.config.ROW_UNIT", CHUNK)
    first = made(model, tmp_path, REQUESTS, MODES[mode])
    assert made(model, tmp_path, REQUESTS, MODES[mode]) == first
    assert len({str(each) for each in first}) == len(REQUESTS)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_makes_the_same_file_twice(model: Path, tmp_path: Path, policy: str) -> None:
    request = (replace(REQUESTS[0], steps=20, policy=policy),)
    assert made(model, tmp_path, request, {}) == made(model, tmp_path, request, {})
