"""Two ranks of an engine on two GPUs: pushed exchanges at work, and what goes wrong on a rank ends its request alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from test_engine import ALL, T2VA
from test_launch import (  # noqa: F401
    good_one_after,
    test_a_gpu_that_fails_for_good_costs_its_process,
    test_a_killed_rank,
    test_a_rank_killed_between_requests_costs_none,
    test_a_rank_stuck_while_weights_are_loaded,
    test_a_rank_that_is_late_for_a_vote,
    test_a_stuck_rank,
    test_an_error_of_one_rank_before_the_loop_is_everyones,
    test_an_error_of_the_watch_ends_the_run,
    test_an_exception_on_rank_1_in_the_middle_of_a_step,
    test_cancel_in_mid_run,
    test_corrupt_media_is_everyones_request_error,
    test_latents_that_are_kept_are_named_with_what_finishes_them,
    test_the_file_is_written_by_rank_0,
    test_twenty_bad_requests_around_a_good_one,
    test_who_follows_the_values_may_be_slow,
    with_faults,
)
from twinreel import Engine, EngineConfig
from twinreel.demo.tiny import tiny_spec, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With as many heads as two ranks need for chunks."""
    spec = tiny_spec()
    return str(write_tiny(tmp_path_factory.mktemp("eight"), spec=replace(spec, dit=replace(spec.dit, heads=8))))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with with_faults(EngineConfig(model=model, device="cuda", gpus=2)) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> dict[str, str]:
    """What these ranks make of the good request while nothing is wrong; `test_ranks` compares ranks with one GPU."""
    sha256: dict[str, str] = engine.generate(T2VA).report["sha256"]
    return sha256


@pytest.mark.parametrize("task", ALL)
def test_every_task_pushes_and_says_so(engine: Engine, task: str) -> None:
    report = engine.generate(ALL[task]).report
    topology = report["engine"]["topology"]
    assert (topology["ranks"], topology["sp"], topology["attend"]) == (2, 2, "overlapped"), topology
    for mine in report["ranks"]:
        for step in mine["communication"]["denoise"]:
            # two blocks; two chunks there, and each back in two pieces
            assert step["collectives"]["sp.all_to_all"]["calls"] == 2 * (2 + 4)
    assert engine.generate(ALL[task]).report["sha256"] == report["sha256"]
