"""Forecast: skipped steps move by an extrapolated velocity, and the next computed call corrects them.

In each modality's own sigma, float32: the polynomial through the last computed velocities gives the skipped step's
velocity; once the next one is computed, a polynomial that also goes through it gives a better value for the skipped
step, and the rows move by (sigma_i - sigma_(i+1)) x (better - used), which is what the Euler step would have moved
them by in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..limits import counted
from ..noise import Rows
from ..policy import Update
from ..policy_options import Adaptive, Forecast, format_policy
from ..policy_windows import meaningless
from .motion import MODALITIES, History, Setting


class Forecasting:
    """State of one request. `skips(step)` decides; it is asked at every step in order."""

    name = "forecast"

    def __init__(self, options: Forecast | Adaptive, setting: Setting, skips: Callable[[int], bool]) -> None:
        self.options, self.setting, self.skips = options, setting, skips
        self.history = History(setting, max(options.order, options.correct) + 1)
        self.computed: list[int] = []
        self.forecast: list[int] = []
        self.corrected: list[int] = []
        self.errors: dict[int, tuple[float, float]] = {}
        self._pending: list[tuple[int, Rows]] = []

    def update(self, step: int, rows: Rows, call: Callable[[], Rows]) -> Update:
        """A forecast where the step is skipped; otherwise the model's velocity and the rows corrected for the skips."""
        if self.ready and self.skips(step):
            velocity = self.history.at(step, self.options.order)
            self.forecast.append(step)
            self._pending.append((step, velocity))
            return Update(velocity)
        self.computed.append(step)
        velocity = call()
        if self.ready:
            self.measure(step, velocity)
        self.history.add(step, velocity)
        return Update(velocity, self._correct(rows))

    @property
    def ready(self) -> bool:
        """There are enough velocities for a forecast."""
        return len(self.history.steps) > self.options.order

    def measure(self, step: int, velocity: Rows) -> None:
        """The error signal: relative L1 distance of the forecast from the velocity that was computed."""
        self.errors[step] = self.setting.change(velocity, self.history.at(step, self.options.order))

    def _correct(self, rows: Rows) -> Rows | None:
        """`rows` with every pending skip made good; None when there is none."""
        pending, self._pending = self._pending, []
        if not pending or not self.options.correct:
            return None
        moved = {name: getattr(rows, name).clone() for name in MODALITIES}
        for step, used in pending:
            better = self.history.at(step, self.options.correct)
            for name, start in (("video", self.setting.condition_video), ("audio", self.setting.condition_audio)):
                sigmas = getattr(self.setting, name)
                difference = getattr(better, name)[start:] - getattr(used, name)[start:]
                moved[name][start:] += (sigmas[step] - sigmas[step + 1]) * difference
            self.corrected.append(step)
        return Rows(moved["video"], moved["audio"])

    def report(self) -> dict[str, Any]:
        """Computed, forecast and corrected steps, and the error signal at each computed step that had a forecast."""
        facts: dict[str, Any] = {
            "name": self.name,
            "options": format_policy(self.options),
            "calls": len(self.computed),
            "computed": self.computed,
            "forecast": self.forecast,
            "corrected": self.corrected,
            "error": errors_to_json(self.errors),
        }
        if not self.forecast:
            never = f"{self.name} never engaged: every one of {counted(self.setting.calls, 'call')} was computed"
            facts["warning"] = meaningless(self.setting.calls, self.options) or never
        return facts


def errors_to_json(errors: dict[int, tuple[float, float]]) -> dict[str, list[float]]:
    """`{"steps": [...], "video": [...], "audio": [...]}`; what is not finite is no JSON number and becomes -1."""

    def plain(value: float) -> float:
        return value if math.isfinite(value) else -1.0

    return {
        "steps": list(errors),
        "video": [plain(video) for video, _ in errors.values()],
        "audio": [plain(audio) for _, audio in errors.values()],
    }
