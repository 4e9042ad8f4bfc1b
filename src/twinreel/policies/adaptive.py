"""Adaptive: skips decided by the error signal of forecasts, while running or beforehand from a calibration profile.

A line through two velocities errs in proportion to the velocity's bend and to the product of the sigma distances to
both (one factor more for a parabola). The last measured error, less what no forecast can foretell (the rounding of the
model, seen as the least error so far, but never more than the tolerance), gives the bend, and the bend the error
to expect of a forecast further on. Both ways of deciding use this one estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..calibration import DEGREE, PROFILE_SCHEMA, read_profile
from ..noise import Rows
from ..policy import Update
from ..policy_options import Adaptive
from ..policy_windows import skip_window
from .forecast import Forecasting, errors_to_json
from .motion import MODALITIES, History, Setting


def expected_error(measured: float, floor: float, stretch: float) -> float:
    """Error of a forecast whose distance is `stretch` times that of one measured with error `measured`."""
    return max(0.0, measured - floor) * stretch


class Adapting(Forecasting):
    """`Forecasting` that decides while it runs. What it decides on has been agreed on by all ranks."""

    name = "adaptive"

    def __init__(self, options: Adaptive, setting: Setting) -> None:
        super().__init__(options, setting, self._decide)
        self._most = options.most
        self._window = skip_window(setting.calls, options)
        self._tolerance = {"video": options.video, "audio": options.audio}
        self._floor = dict(self._tolerance)
        self._distance: dict[str, float] = {}

    def measure(self, step: int, velocity: Rows) -> None:
        """Measure, and remember over which distance."""
        super().measure(step, velocity)
        for name, error in zip(MODALITIES, self.errors[step], strict=True):
            self._floor[name] = min(self._floor[name], error)
            self._distance[name] = self.history.distance(name, step, self.options.order)

    def _decide(self, step: int) -> bool:
        if step not in self._window or not self.errors or step - self.history.steps[-1] > self._most:
            return False
        last = self.errors[self.computed[-1]]
        for name, error in zip(MODALITIES, last, strict=True):
            stretch = self.history.distance(name, step, self.options.order) / self._distance[name]
            if not expected_error(error, self._floor[name], stretch) < self._tolerance[name]:
                return False
        return True


class _Planned(Forecasting):
    name = "adaptive"

    def __init__(self, options: Adaptive, setting: Setting, skips: frozenset[int]) -> None:
        super().__init__(options, setting, skips.__contains__)
        self._plan = sorted(skips)

    def report(self) -> dict[str, Any]:
        return super().report() | {"profile": self.options.profile, "planned": self._plan}  # type: ignore[union-attr]


class Calibrating:
    """Every step is computed, and how well a line through the two before it foretold each is the profile."""

    name = "calibrate"

    def __init__(self, setting: Setting) -> None:
        self.setting, self.history = setting, History(setting, DEGREE + 1)
        self.computed: list[int] = []
        self.errors: dict[int, tuple[float, float]] = {}

    def update(self, step: int, rows: Rows, call: Callable[[], Rows]) -> Update:
        """Call the model and measure."""
        self.computed.append(step)
        velocity = call()
        if len(self.history.steps) > DEGREE:
            self.errors[step] = self.setting.change(velocity, self.history.at(step, DEGREE))
        self.history.add(step, velocity)
        return Update(velocity)

    def report(self) -> dict[str, Any]:
        """The profile, with what it is good for."""
        profile = {"schema": PROFILE_SCHEMA, **self.setting.identity(), "ratios": errors_to_json(self.errors)}
        return {"name": self.name, "calls": len(self.computed), "computed": self.computed, "profile": profile}


def make_adaptive(options: Adaptive, setting: Setting) -> Forecasting:
    """Decide while running, or by the plan that follows from `options.profile`. Raises RequestError."""
    if options.profile is None:
        return Adapting(options, setting)
    profile = read_profile(options.profile, setting.identity())
    return _Planned(options, setting, plan_skips(profile["ratios"], options, setting))


def plan_skips(ratios: Mapping[str, Any], options: Adaptive, setting: Setting) -> frozenset[int]:
    """Skip each step whose forecast from the steps computed before it is expected to be good enough, in order."""
    known = {
        name: {
            step: error if error >= 0 else math.inf for step, error in zip(ratios["steps"], ratios[name], strict=True)
        }
        for name in MODALITIES
    }
    window, skips = skip_window(setting.calls, options), set[int]()
    computed: list[int] = []

    def good(name: str, step: int) -> bool:
        errors, tolerance = known[name], getattr(options, name)
        measured, planned = History(setting, DEGREE + 1), History(setting, DEGREE + 1)
        measured.steps, planned.steps = [step - 2, step - 1], computed[-2:]
        stretch = planned.distance(name, step, DEGREE) / measured.distance(name, step, DEGREE)
        # the floor as a run knows it at this step
        floor = min([tolerance, *(error for other, error in errors.items() if other <= step)])
        return step in errors and expected_error(errors[step], floor, stretch) < tolerance

    for step in range(setting.calls):
        ready = len(computed) > max(DEGREE, options.order) and step in window
        if ready and step - computed[-1] <= options.most and all(good(name, step) for name in MODALITIES):
            skips.add(step)
        else:
            computed.append(step)
    return frozenset(skips)
