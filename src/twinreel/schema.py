"""The JSON schema (draft 2020-12) of a request, made from the table of limits (SPEC 11).

What it cannot say stays with `check_request`: what goes together, what needs the media, 5.0 being no whole number.
"""

from __future__ import annotations

from typing import Any

from . import limits
from .limits import Range
from .request import Request
from .spec import Spec

Schema = dict[str, Any]
ADDRESS = {"type": "string", "minLength": 1, "pattern": r"^[^\u0000]*\S[^\u0000]*$"}


def request_schema(spec: Spec | None = None) -> Schema:
    """Schema of the body that `request_json.parse_json` takes, for weights of sizes `spec` (None: H3's)."""
    spec = spec or Spec()
    prompt = limits.PROMPT_CHARACTERS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "twinreel request",
        "type": "object",
        "additionalProperties": False,
        "required": ["prompt"],
        "properties": {
            "task": _choice(("auto", *limits.TASKS), "auto", "auto follows from the conditions"),
            "prompt": {
                **ADDRESS,
                "minLength": prompt.low,
                "maxLength": prompt.high,
                "description": "used verbatim",
            },
            "conditions": {
                "type": "array",
                "maxItems": limits.REFERENCES_IN_ALL,
                "items": {"oneOf": [_keyframe(), _reference()]},
                "description": f"keyframes, or references in the order of their labels: at most {_counts()}",
            },
            "target": _target(spec),
            "seed": _number(limits.SEEDS, "of every random draw", Request.seed),
            "num_inference_steps": _number(limits.STEPS, "N steps are N-1 model calls", Request.steps),
            "flow_shift": _number(limits.SHIFTS, "sigma shift of the video", spec.world.shifts[0]),
            "audio_flow_shift": _number(limits.SHIFTS, "sigma shift of the sound", spec.world.shifts[1]),
            "policy": {"type": "string", "default": Request.policy, "description": "which steps call the model"},
            "noise": _choice(limits.NOISE_SCHEMES, Request.noise, "order of the random draws"),
        },
        "dependentRequired": {"flow_shift": ["audio_flow_shift"], "audio_flow_shift": ["flow_shift"]},
    }


def _counts() -> str:
    kinds = ", ".join(f"{most} of kind {kind}" for kind, most in limits.REFERENCES_OF_A_KIND.items())
    return f"{kinds}, {limits.REFERENCES_IN_ALL} in all"


def _target(spec: Spec) -> Schema:
    side = _number(limits.sides(spec), f"pixels, instead of aspect_ratio; {limits.RATIOS}") | {
        "multipleOf": spec.multiple
    }
    number = r"\d{1,9}(\.\d{1,9})?"
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "short_edge": _number(
                limits.sides(spec), "pixels of the shorter side before the area cap", spec.world.short_edge
            ),
            "aspect_ratio": {
                "type": "string",
                "pattern": f"^(auto|{number}:{number})$",
                "default": "auto",
                "description": limits.ASPECT_WORDS,
            },
            "duration_seconds": _number(
                limits.durations(spec.world),
                f"default: the length of the only sound, otherwise {limits.DEFAULT_SECONDS:g}",
            ),
            "width": side,
            "height": side,
        },
        "dependentRequired": {"width": ["height"], "height": ["width"]},
        "dependentSchemas": {
            "width": {"properties": {"aspect_ratio": {"const": "auto"}, "short_edge": False}},
        },
    }


def _keyframe() -> Schema:
    indices = sorted({index for choice in limits.KEYFRAME_INDICES for index in choice}, reverse=True)
    return _condition(
        "keyframe",
        ("image",),
        {
            "frame_index": {"enum": indices, "description": "0 first, -1 last"},
            "fit": _choice(limits.FITS, "auto", "how the picture takes the canvas's shape"),
        },
        ["frame_index"],
    )


def _reference() -> Schema:
    times = {
        f"{name}_time_seconds": _number(limits.TIMES, f"{name} inside a video or sound") for name in ("start", "end")
    }
    return _condition("reference", limits.REFERENCE_KINDS, times, [])


def _condition(role: str, kinds: tuple[str, ...], more: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["type", "uri", "role", *required],
        "properties": {"type": {"enum": list(kinds)}, "uri": ADDRESS, "role": {"const": role}, **more},
    }


def _choice(allowed: tuple[str, ...], default: str, text: str) -> Schema:
    return {"enum": list(allowed), "default": default, "description": text}


def _number(limit: Range, text: str, default: float | None = None) -> Schema:
    made: Schema = {"type": "integer" if limit.whole else "number", "minimum": limit.low, "maximum": limit.high}
    made["description"] = text
    return made if default is None else made | {"default": default}
