"""What is said of a step policy before a run is what the run does: calls made, and policies that so few calls rule out."""

from __future__ import annotations

import pytest

from test_policy import curved, run
from twinreel.policy_options import Adaptive, parse_policy
from twinreel.policy_windows import computed_calls, meaningless

POLICIES = [
    "every-step", "reuse", "reuse:refresh_interval=3,max_consecutive_reuse=2", "reuse:max_consecutive_reuse=0",
    "reuse:start_ratio=0,end_ratio=1", "reuse:start_ratio=0.5,end_ratio=0.5", "reuse:mode=off", "reuse:mode=probe",
    "reuse:threshold=0.1", "reuse:refresh_interval=1", "forecast:balanced", "forecast:fast",
    "forecast:pattern=1,head=0,tail=1,order=0,correct=0",
    "forecast:pattern=8,order=3", "adaptive", "adaptive:most=3",
]  # fmt: skip


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6, 9, 14, 31, 50])
@pytest.mark.parametrize("text", POLICIES)
def test_a_run_makes_the_calls_that_were_foretold(text: str, steps: int) -> None:
    options, calls = parse_policy(text), steps - 1
    _, report, called = run(text, curved, steps)
    foretold, why = computed_calls(calls, options), meaningless(calls, options)
    measured = isinstance(options, Adaptive) or "threshold" in text
    assert foretold is None if measured and why is None else foretold == len(called)
    assert why is None or (len(called) == calls and report["warning"] == why)
    assert why is not None or "warning" not in report or measured
    assert why is None or f"has no meaning for {calls} call" in why


def test_all_kinds_of_answers_are_among_them() -> None:
    found = [(computed_calls(calls, parse_policy(text)), meaningless(calls, parse_policy(text))) for text in POLICIES
             for calls in (2, 49)]  # fmt: skip
    assert {None, 2, 49} < {calls for calls, _ in found} and any(why for _, why in found)
    assert sum(1 for calls, why in found if calls not in (None, 2, 49) and why is None) >= 4
