"""Step policies on CUDA: the same rows as on the CPU, bit for bit, from the same velocities."""

from __future__ import annotations

import pytest
import torch

from op_cases import euler
from twinreel.noise import Rows
from twinreel.policies import Setting, make_policy
from twinreel.policy_options import parse_policy
from twinreel.schedule import make_sigmas

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(policy_text: str, device: str) -> tuple[Rows, dict]:
    sigmas = make_sigmas(50, (12.0, 3.0))
    setting = Setting(sigmas.video.sigmas.tolist(), sigmas.audio.sigmas.tolist(), condition_video=5)
    policy = make_policy(parse_policy(policy_text), setting)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        Rows(torch.randn(4096, 96, generator=generator), torch.randn(512, 32, generator=generator)) for _ in range(2)
    )
    rows = first.to(device)
    for step in range(sigmas.calls):
        sigma = float(sigmas.video.sigmas[step])
        # made on the CPU: what is compared is the policy's arithmetic, not a device's sine
        velocity = Rows(torch.sin(3 * sigma * second.video), torch.sin(3 * sigma * second.audio)).to(device)
        update = policy.update(step, rows, lambda velocity=velocity: velocity)
        moved = update.corrected(rows)
        rows = Rows(
            euler(moved.video, update.velocity.video, sigmas.video, step),
            euler(moved.audio, update.velocity.audio, sigmas.audio, step),
        )
    return rows.to("cpu"), policy.report()


@pytest.mark.parametrize(
    "policy", ["reuse", "reuse:threshold=0.5", "forecast:fast", "forecast:fast,order=2,correct=2", "adaptive"]
)
def test_cuda_repeats_the_cpu(policy: str) -> None:
    (ours, our_report), (theirs, their_report) = run(policy, "cuda"), run(policy, "cpu")
    assert our_report["computed"] == their_report["computed"] and our_report["calls"] < 49
    assert torch.equal(ours.video, theirs.video) and torch.equal(ours.audio, theirs.audio)
