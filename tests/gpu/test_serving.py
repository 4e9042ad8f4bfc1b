"""The server with an engine on one GPU and on two, by what it keeps on a CPU."""

# ruff: noqa: E402 what is not installed skips these tests before it is imported

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

for name in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
    pytest.importorskip(name)

from test_serve_engine import (  # noqa: F401
    site,
    test_a_killed_engine_resumes_at_decode,
    test_a_policy_that_skips_nothing_is_warned_of,
    test_an_engine_that_ends_between_jobs_is_replaced,
    test_both_partitions_give_the_bits_of_an_engine_at_home,
    test_cancel_ends_within_a_step,
    test_the_cache_is_used_and_changes_nothing,
    test_variants_of_the_content,
)
from twinreel import EngineConfig
from twinreel.demo.tiny import tiny_spec, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=[1, 2])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Of as many GPUs; the model has heads for the chunks of two."""
    if request.param > torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    spec = tiny_spec()
    model = write_tiny(tmp_path_factory.mktemp("served"), spec=replace(spec, dit=replace(spec.dit, heads=8)))
    return EngineConfig(model=str(model), device="cuda", gpus=request.param)
