"""The process of a rank in which things go wrong when a request asks for it; stuck collectives are noticed sooner."""

from __future__ import annotations

import sys
import time
from typing import Any

from twinreel import launch, pipeline, rank
from twinreel.models.dit import DiT

PATIENCE = 4.0
REFUSED_STEPS = 4  # rank 1 refuses a request of so many before the loop
BROKEN_STEPS = 6  # in one of so many its GPU, as it were, fails for good


def main() -> int:
    """`rank.main` with faults."""
    launch.PATIENCE = PATIENCE
    here = launch.seat()
    assert here is not None
    run_steps, make_policy, forward = pipeline.run_steps, pipeline.make_policy, DiT.forward
    prompt, calls = "", 0

    def steps(work: Any, *rest: Any) -> Any:
        nonlocal prompt, calls
        prompt, calls = work.settled.plan.prompt, 0
        return run_steps(work, *rest)

    def call(dit: DiT, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if "explode" in prompt and here.rank == 1 and calls == 2:
            raise ZeroDivisionError("rank 1 divided by nothing")
        made = forward(dit, *arguments)
        if "dawdle" in prompt and here.rank == 1 and calls == 2:
            time.sleep(15 * PATIENCE)
        return made

    def policy(options: Any, setting: Any) -> Any:
        if here.rank == 1 and setting.calls + 1 == REFUSED_STEPS:
            raise PermissionError("rank 1 cannot read its profile")
        if here.rank == 1 and setting.calls + 1 == BROKEN_STEPS:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return make_policy(options, setting)

    pipeline.run_steps, pipeline.make_policy, DiT.forward = steps, policy, call
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
