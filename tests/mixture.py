"""Policies on a flow whose velocity is known in closed form: data from a mixture of Gaussians, both modalities coupled.

`python tests/mixture.py` prints the table of `docs/validation.md`. The mixture has 200 modes in 20 groups, with spreads
of 0.1, 0.3 and 0.6; 64 draws each. Noise of a given share of the mean velocity is added to every call, as a network's
rounding in bf16 would be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from op_cases import euler
from twinreel.noise import Rows
from twinreel.policies import Setting, make_policy
from twinreel.policy_options import parse_policy
from twinreel.schedule import make_sigmas

VIDEO, AUDIO = 96, 64
POLICIES = (
    "reuse", "forecast:gentle", "forecast:balanced", "forecast:fast", "forecast:fast,correct=0",
    "forecast:gentle,correct=2", "forecast:balanced,correct=2", "forecast:fast,correct=2",
    "forecast:gentle,order=2,correct=2", "forecast:balanced,order=2,correct=2", "forecast:fast,order=2,correct=2",
    "forecast:fast,order=2,correct=3", "adaptive", "adaptive:order=1,correct=1",
)  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """Modes [K, 160], their spread, and the share of noise in a velocity."""

    modes: Tensor
    spread: float
    noise: float = 0.0

    def velocity(self, rows: Rows, video: float, audio: float, step: int) -> Rows:
        """(E[data | rows] - rows) / sigma, fp32; sigma is each modality's own."""
        x = torch.cat([rows.video, rows.audio], 1).double()
        sigma = torch.cat([torch.full((VIDEO,), video), torch.full((AUDIO,), audio)]).double()
        keep, modes = 1 - sigma, self.modes.double()
        variance = (keep * self.spread) ** 2 + sigma**2
        distance = ((x[:, None] - keep * modes) ** 2 / variance).sum(-1)
        mean = torch.softmax(-0.5 * distance, -1) @ modes
        data = mean + keep * self.spread**2 / variance * (x - keep * mean)
        v = ((data - x) / sigma).float()
        generator = torch.Generator().manual_seed(step)
        v = v + self.noise * v.abs().mean() * torch.randn(v.shape, generator=generator)
        return Rows(v[:, :VIDEO].contiguous(), v[:, VIDEO:].contiguous())


def make(seed: int, spread: float, noise: float = 0.0, modes: int = 200) -> Mixture:
    """Modes in 20 groups; features fade like a power law, as those of pictures do."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(20, VIDEO + AUDIO, generator=generator).repeat_interleave(modes // 20, 0)
    centres = groups + 0.6 * torch.randn(modes, VIDEO + AUDIO, generator=generator)
    scales = [torch.arange(1, size + 1) ** -0.5 for size in (VIDEO, AUDIO)]
    return Mixture(centres * torch.cat([scale / scale.pow(2).mean().sqrt() for scale in scales]), spread, noise)


def run(policy: str, mixture: Mixture, draws: int = 64, steps: int = 50) -> tuple[Rows, int]:
    """Final rows of `draws` samples under one policy, and its calls."""
    sigmas = make_sigmas(steps, (12.0, 3.0))
    video, audio = sigmas.video.sigmas.tolist(), sigmas.audio.sigmas.tolist()
    made = make_policy(parse_policy(policy), Setting(video, audio))
    x = torch.randn(draws, VIDEO + AUDIO, generator=torch.Generator().manual_seed(1))
    rows = Rows(x[:, :VIDEO].contiguous(), x[:, VIDEO:].contiguous())
    for step in range(sigmas.calls):

        def call(step: int = step, rows: Rows = rows) -> Rows:
            return mixture.velocity(rows, video[step], audio[step], step)

        update = made.update(step, rows, call)
        moved = update.corrected(rows)
        rows = Rows(
            euler(moved.video, update.velocity.video, sigmas.video, step),
            euler(moved.audio, update.velocity.audio, sigmas.audio, step),
        )
    return rows, made.report()["calls"]


def decibels(base: Rows, test: Rows) -> tuple[Tensor, Tensor]:
    """Signal-to-noise ratio of each draw, video and audio."""
    pairs = ((base.video, test.video), (base.audio, test.audio))
    video, audio = (10 * torch.log10(a.pow(2).sum(1) / (a - b).pow(2).sum(1).clamp(min=1e-12)) for a, b in pairs)
    return video, audio


def main() -> None:
    """Print the Markdown table."""
    print("| noise | policy | calls | video dB, median (10 %) | audio dB, median (10 %) |\n|---|---|---|---|---|")
    for noise in (0.0, 0.01):
        mixtures = [make(seed, spread, noise) for seed, spread in enumerate((0.1, 0.3, 0.6))]
        bases = [run("every-step", mixture)[0] for mixture in mixtures]
        for policy in POLICIES:
            ends = [run(policy, mixture) for mixture in mixtures]
            table = [decibels(base, end) for base, (end, _) in zip(bases, ends, strict=True)]
            values = [torch.cat(column) for column in zip(*table, strict=True)]
            words = [f"{value.median():.1f} ({value.quantile(0.1):.1f})" for value in values]
            calls = sum(count for _, count in ends) / len(ends)
            print(f"| {noise:g} | `{policy}` | {calls:.1f} | {' | '.join(words)} |")


if __name__ == "__main__":
    main()
