"""The calibration profile that `adaptive:profile=FILE` names: what it is good for, and whether it fits a request."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from .errors import RequestError
from .limits import shown
from .plan import Plan
from .policy_options import PolicyOptions
from .small_files import read_small_json, why

PROFILE_SCHEMA = "twinreel-profile/1"
RATIOS = ("steps", "video", "audio")
DEGREE = 1  # of the polynomials whose errors a profile holds


def identity(plan: Plan, weights: str | None) -> dict[str, Any]:
    """What a profile of a run of `plan` is good for; `weights` tells them from others, None says nothing of them."""
    size = [plan.width, plan.height, plan.frames]
    facts = {"steps": plan.steps, "shifts": list(plan.shifts), "task": plan.task, "size": size}
    return facts if weights is None else facts | {"weights": weights}


def profile_of(policy: PolicyOptions) -> str | None:
    """The profile's file that `policy` names."""
    return getattr(policy, "profile", None)


def read_profile(path: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The profile in `path`, alone or inside a run's report. RequestError when it is absent, damaged or of another
    request than `identity`'s."""
    try:
        data = read_small_json(path)
    except (OSError, ValueError) as error:
        raise RequestError(
            "policy", f"profile {shown(path)} cannot be read: {why(error)}; name a run's report"
        ) from None
    policy = data.get("policy", {}) if isinstance(data, dict) else {}
    profile = policy.get("profile", data) if isinstance(policy, dict) else data
    if not isinstance(profile, dict) or profile.get("schema") != PROFILE_SCHEMA:
        raise RequestError("policy", f"{path} holds no profile; it is in the report of a run with --policy calibrate")
    for name, value in identity.items():
        # through JSON once, as the profile went
        if profile.get(name) != json.loads(json.dumps(value)):
            got = shown(profile.get(name))
            raise RequestError(
                "policy", f"profile {path} was made for {name} {got}, this request has {value}; calibrate anew"
            )
    if not _are_ratios(profile.get("ratios"), range(DEGREE + 1, identity["steps"] - 1)):
        raise RequestError(
            "policy", f"profile {path} is damaged: its ratios are not one number for each step; calibrate anew"
        )
    return profile


def _are_ratios(ratios: Any, steps: range) -> bool:
    """Whether there is an error of both modalities for each of `steps`, which are all that a polynomial can foretell."""
    lists: list[Any] = [ratios.get(name) for name in RATIOS] if isinstance(ratios, dict) else [None]
    if not all(isinstance(each, list) and len(each) == len(steps) for each in lists):
        return False
    return (
        all(type(step) is int for step in lists[0])
        and lists[0] == list(steps)
        and all(map(_is_ratio, lists[1] + lists[2]))
    )


def _is_ratio(value: Any) -> bool:
    """-1 stands for what was not finite (`policies.forecast.errors_to_json`)."""
    return type(value) in (int, float) and (value == -1 or 0 <= value <= sys.float_info.max)
