"""What all policies share: the setting of a request, the fitted velocity, the measured change. All in float32.

Weights and sigma differences are Python floats (float64) of the stored float32 sigmas, rounded to float32 once when
they meet a tensor. A fit is the newest velocity plus weighted differences to it: each difference, product and sum
rounds once, and velocities that agree are forecast exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..noise import Rows

MODALITIES = ("video", "audio")


def alone(ballot: Tensor) -> Tensor:
    """The agreement of one rank with itself."""
    return ballot


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Setting:
    """What a policy knows of its request.

    Args:
        video, audio: the stored sigmas, one more than there are calls, as floats.
        condition_video, condition_audio: leading rows that never move and are not measured.
        agree: elementwise largest of all ranks' float64 ballots [2]; every decision uses its result, never the local
            value, so that all ranks act alike.
        identity: what a calibration profile is good for (steps, shifts, task, size, weights); asked for only when
            a profile is written or read, because hashing weights takes time.
    """

    video: Sequence[float]
    audio: Sequence[float]
    condition_video: int = 0
    condition_audio: int = 0
    agree: Callable[[Tensor], Tensor] = alone
    identity: Callable[[], Mapping[str, Any]] = field(default=_nothing)

    @property
    def calls(self) -> int:
        """Model calls without a policy."""
        return len(self.video) - 1

    def targets(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Video and audio rows that move."""
        return rows.video[self.condition_video :], rows.audio[self.condition_audio :]

    def change(self, before: Rows, after: Rows) -> tuple[float, float]:
        """Relative L1 change of the moving rows, video and audio: sum |after - before| / sum |before|, largest rank."""
        pairs = zip(self.targets(before), self.targets(after), strict=True)
        # float64 sums: the order of a float32 sum over millions of rows would decide close calls
        ratios = [
            _ratio((new - old).abs().sum(dtype=torch.float64), old.abs().sum(dtype=torch.float64)) for old, new in pairs
        ]
        video, audio = self.agree(torch.stack(ratios)).tolist()
        return video, audio


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    # a rank may hold no row of a modality, and nothing has not changed
    return torch.where(part > 0, part / whole.clamp(min=torch.finfo(torch.float64).tiny), torch.zeros_like(part))


class History:
    """The last `depth` computed velocities, and polynomials through the newest of them in each modality's sigma.

    A polynomial of degree d goes through d + 1 velocities, or through as many as there are.
    """

    def __init__(self, setting: Setting, depth: int) -> None:
        self.setting, self.depth = setting, depth
        self.steps: list[int] = []
        self._velocities: list[Rows] = []

    def add(self, step: int, velocity: Rows) -> None:
        """Remember a computed velocity, as a copy: its memory may be the model's, to be written again."""
        self.steps.append(step)
        self._velocities.append(Rows(velocity.video.clone(), velocity.audio.clone()))
        if len(self.steps) > self.depth:
            del self.steps[0], self._velocities[0]

    def at(self, step: int, degree: int) -> Rows:
        """The polynomial's value at a step's sigmas."""
        return Rows(*(self._fit(name, getattr(self.setting, name), step, degree) for name in MODALITIES))

    def distance(self, name: str, step: int, degree: int) -> float:
        """Product of a step's sigma distances to the polynomial's velocities: its error grows with it."""
        sigmas = getattr(self.setting, name)
        product = 1.0
        for known in self.steps[-degree - 1 :]:
            product *= abs(sigmas[step] - sigmas[known])
        return product

    def _fit(self, name: str, sigmas: Sequence[float], step: int, degree: int) -> Tensor:
        steps, velocities = self.steps[-degree - 1 :], self._velocities[-degree - 1 :]
        newest = getattr(velocities[-1], name)
        value = newest
        for i, known in enumerate(steps[:-1]):
            weight = 1.0
            for other in steps[:i] + steps[i + 1 :]:
                weight *= (sigmas[step] - sigmas[other]) / (sigmas[known] - sigmas[other])
            value = value + weight * (getattr(velocities[i], name) - newest)
        return value
