"""The JSON schema and the parser agree: what one takes, the other takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinreel.errors import RequestError
from twinreel.request import check_request
from twinreel.request_json import KEYFRAME, REFERENCE, REFUSED, TARGET, TOP, request_from_json
from twinreel.schema import request_schema
from twinreel.spec import Spec, World

jsonschema = pytest.importorskip("jsonschema")
SPEC = Spec()
SCHEMA = request_schema(SPEC)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

NUMBERS = [0, 1, 2, 4, 5.5, 15, 15.5, 32, 33, 96, 768, 1000, 1001, -1, 2**63 - 1, 2**63, 0.001, 12.0, True]
WORDS = ["", " ", "a", "A cat.", "a\0b", "x.png", "auto", "16:9", "5:3", "wide", "1:1:1", "reuse", "official", "t2va"]
ANY = st.sampled_from([*NUMBERS, *WORDS, None, [], {}, "image", "video", "keyframe", "reference", "cover"])
ADDRESS = st.sampled_from(["x.png", "", " ", 3])
KEY = st.fixed_dictionaries(
    {"type": st.just("image"), "uri": ADDRESS, "role": st.just("keyframe"), "frame_index": st.sampled_from([0, -1, 1])},
    optional={"fit": ANY},
)
REF = st.fixed_dictionaries(
    {"type": st.sampled_from(["image", "video", "audio", "pdf"]), "uri": ADDRESS, "role": st.just("reference")},
    optional={"start_time_seconds": ANY, "end_time_seconds": ANY, "weight": ANY},
)
SIDE = st.sampled_from([32, 64, 512, 768, 770, 0, 40_000, 96.5])
BODIES = st.fixed_dictionaries(
    {"prompt": st.sampled_from(WORDS)},
    optional={
        "task": ANY,
        "conditions": st.one_of(st.lists(st.one_of(KEY, REF), max_size=3), ANY),
        "target": st.fixed_dictionaries(
            {},
            optional={
                "short_edge": st.one_of(SIDE, ANY),
                "aspect_ratio": ANY,
                "duration_seconds": ANY,
                "width": SIDE,
                "height": SIDE,
            },
        ),
        "seed": ANY,
        "num_inference_steps": ANY,
        "flow_shift": ANY,
        "audio_flow_shift": ANY,
        "noise": ANY,
        "fps": ANY,
    },
)


def test_it_is_a_schema_of_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    json.dumps(SCHEMA, allow_nan=False)
    assert set(SCHEMA["properties"]) == set(TOP)
    assert set(SCHEMA["properties"]["target"]["properties"]) == set(TARGET)
    keyframe, reference = SCHEMA["properties"]["conditions"]["items"]["oneOf"]
    assert set(keyframe["properties"]) == set(KEYFRAME) and set(reference["properties"]) == set(REFERENCE)
    assert not set(REFUSED) & set(TOP)


def test_the_numbers_are_those_of_the_world() -> None:
    small = request_schema(Spec(world=World(min_seconds=1, max_seconds=6)))["properties"]["target"]["properties"]
    assert (small["duration_seconds"]["minimum"], small["duration_seconds"]["maximum"]) == (1, 6)
    assert SCHEMA["properties"]["prompt"]["maxLength"] == 7000 and SCHEMA["properties"]["seed"]["maximum"] == 2**63 - 1


def accepted(body: Any) -> bool:
    try:
        check_request(request_from_json(body), SPEC)
    except RequestError:
        return False
    return True


@settings(max_examples=1500, deadline=None)
@given(BODIES)
def test_what_the_parser_takes_the_schema_takes(body: Any) -> None:
    if accepted(body):
        VALIDATOR.validate(body)


@settings(max_examples=1500, deadline=None)
@given(BODIES)
def test_what_the_schema_takes_the_parser_refuses_only_for_what_a_schema_cannot_say(body: Any) -> None:
    if not VALIDATOR.is_valid(body):
        assert not accepted(body)
        return
    try:
        check_request(request_from_json(body), SPEC)
    except RequestError as error:
        # which things go together, shapes, and whole numbers written as 5.0
        together = error.field in ("keyframes", "references", "size", "aspect", "policy", "prompt")
        assert together or ".end" in error.field or ".start" in error.field or "whole number" in str(error), error
