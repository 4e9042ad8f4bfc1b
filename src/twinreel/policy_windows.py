"""Which calls a step policy may skip, and how many it will make, where that is known before a run. Imports no torch."""

from __future__ import annotations

import math

from .limits import counted
from .policy_options import Adaptive, Forecast, PolicyOptions, Reuse


def reuse_window(calls: int, options: Reuse) -> range:
    """Steps that may reuse: never the first, never the last."""
    start = max(1, math.floor(calls * options.start_ratio))
    return range(start, min(calls - 1, math.ceil(calls * options.end_ratio)))


def is_refreshed(step: int, window: range, options: Reuse) -> bool:
    """Whether a step of the window is one that is computed whatever the rows say."""
    return (step - window.start) % options.refresh_interval == 0


def skip_window(calls: int, options: Forecast | Adaptive) -> range:
    """Steps that may be skipped: not the first `head`, enough for a fit, and not the last `tail`."""
    return range(max(options.order + 1, math.ceil(calls * options.head)), max(0, calls - options.tail))


def pattern_skips(calls: int, options: Forecast) -> frozenset[int]:
    """The skipped steps of a pattern; none where the window has no room for one whole round of it."""
    window, skips = skip_window(calls, options), set[int]()
    if len(window) < _round(options):
        return frozenset()
    step, turn = window.start, 0
    while step < window.stop:
        length = options.pattern[turn % len(options.pattern)]
        skips.update(range(step, min(step + length, window.stop)))
        step, turn = step + length + 1, turn + 1
    return frozenset(skips)


def computed_calls(calls: int, options: PolicyOptions) -> int | None:
    """How many of `calls` calls the model makes; None where it depends on what is measured meanwhile."""
    if meaningless(calls, options) or (isinstance(options, Reuse) and options.mode != "reuse"):
        return calls
    if isinstance(options, Forecast):
        return calls - len(pattern_skips(calls, options))
    if isinstance(options, Reuse) and options.threshold is None:
        return calls - _most_reused(calls, options)
    return None if isinstance(options, Reuse | Adaptive) else calls


def meaningless(calls: int, options: PolicyOptions) -> str | None:
    """Why `options` cannot skip any of so few calls, or None."""
    told = f"has no meaning for {counted(calls, 'call')}"
    if isinstance(options, Reuse):
        window = reuse_window(calls, options)
        if options.mode == "off" or _most_reused(calls, options):
            return None
        steps = f", its fields refresh all of its window, steps {window.start} to {window.stop - 1}" if window else ""
        return f"reuse {told}{steps}: all are computed"
    if isinstance(options, Forecast | Adaptive):
        window = skip_window(calls, options)
        if isinstance(options, Adaptive) and options.profile is None:  # which decides by an error measured before
            window = range(max(window.start, options.order + 2), window.stop)
        if len(window) < _round(options):
            return f"{type(options).__name__.lower()} {told}, its window is too short: all are computed"
    return None


def _most_reused(calls: int, options: Reuse) -> int:
    """Steps that reuse where no threshold forbids it."""
    window, reused, run = reuse_window(calls, options), 0, 0
    for step in window:
        run = 0 if is_refreshed(step, window, options) or run >= options.max_consecutive_reuse else run + 1
        reused += run > 0
    return reused


def _round(options: Forecast | Adaptive) -> int:
    """Steps of one round of the pattern, the computed ones included; of none, one."""
    pattern = getattr(options, "pattern", ())
    return max(1, sum(pattern) + len(pattern))
