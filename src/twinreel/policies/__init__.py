"""The step policies: `make_policy(options, setting)`. One file a kind; `motion` has their arithmetic."""

from __future__ import annotations

from ..policy import EveryStep, StepPolicy
from ..policy_options import Adaptive, Calibrate, Forecast, PolicyOptions, Reuse
from ..policy_windows import pattern_skips
from .adaptive import Calibrating, make_adaptive
from .forecast import Forecasting
from .motion import Setting
from .reuse import Reusing

__all__ = ["Setting", "make_policy"]


def make_policy(options: PolicyOptions, setting: Setting) -> StepPolicy:
    """The policy of one request. Raises RequestError for a profile that cannot be read or is another request's."""
    if isinstance(options, Reuse):
        return Reusing(options, setting)
    if isinstance(options, Forecast):
        skips = pattern_skips(setting.calls, options)
        return Forecasting(options, setting, skips.__contains__)
    if isinstance(options, Adaptive):
        return make_adaptive(options, setting)
    return Calibrating(setting) if isinstance(options, Calibrate) else EveryStep()
