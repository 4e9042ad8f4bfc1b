"""The request: its checks, its JSON form, and that both refuse by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinreel.errors import RequestError
from twinreel.limits import ASPECTS
from twinreel.request import Keyframe, Reference, Request, check_request, parse_aspect
from twinreel.request_json import (
    json_place,
    named_in_json,
    named_in_request,
    parse_json,
    parse_object,
    request_from_json,
    request_to_json,
)
from twinreel.schema import request_schema
from twinreel.spec import Partition, Spec

SPEC = Spec()


def refused(request: Request, field: str, spec: Spec = SPEC) -> str:
    with pytest.raises(RequestError) as caught:
        check_request(request, spec)
    assert caught.value.field == field, caught.value
    return str(caught.value)


IMAGE = Reference("image", "x.png")
BAD = [
    (Request(""), "prompt"),
    (Request("   "), "prompt"),
    (Request("a" * 7001), "prompt"),
    (Request("a\0b"), "prompt"),
    (Request("a\ud800b"), "prompt"),
    (Request(7), "prompt"),  # type: ignore[arg-type]
    (Request("a", task="t2v"), "task"),
    (Request("a", task="fl2va"), "keyframes"),
    (Request("a", task="ref2va"), "references"),
    (Request("a", task="t2va", keyframes=(Keyframe("x.png"),)), "keyframes"),
    (Request("a", task="t2va", references=(IMAGE,)), "references"),
    (Request("a", keyframes=(Keyframe("x.png", -1), Keyframe("y.png", 0))), "keyframes"),
    (Request("a", keyframes=(Keyframe("x.png", 3),)), "keyframes"),
    (Request("a", keyframes=("x.png",)), "keyframes[0]"),  # type: ignore[arg-type]
    (Request("a", references=(Reference("gif", "x"),)), "references[0].kind"),
    (Request("a", references=(Reference("audio", "x"),)), "references"),
    (Request("a", references=(IMAGE,) * 10), "references"),
    (Request("a", references=(Reference("video", "x"),) * 4), "references"),
    (Request("a", references=(Reference("video", "x"), Reference("video_audio", "x")) * 2), "references"),
    (Request("a", references=(IMAGE, *(Reference("audio", "x"),) * 4)), "references"),
    (Request("a", references=(Reference("image", "x", start=1.0),)), "references[0].start"),
    (Request("a", references=(IMAGE, Reference("video", "x", start=2.0, end=1.0))), "references[1].end"),
    (Request("a", references=(Reference("video", "x", start=-1.0),)), "references[0].start"),
    (Request("a", references=(Reference("video", "x", start=float("nan")),)), "references[0].start"),
    (Request("a", aspect="5:1"), "aspect"),
    (Request("a", aspect="wide"), "aspect"),
    (Request("a", aspect="1:0"), "aspect"),
    (Request("a", size=(1344, 760)), "size.height"),
    (Request("a", size=(1344, 768), aspect="16:9"), "size"),
    (Request("a", size=(3200, 32)), "size"),
    (Request("a", size=(1344.0, 768)), "size.width"),  # type: ignore[arg-type]
    (Request("a", short_edge=0), "short_edge"),
    (Request("a", duration=3.9), "duration"),
    (Request("a", duration=15.1), "duration"),
    (Request("a", duration=float("nan")), "duration"),
    (Request("a", duration="5"), "duration"),  # type: ignore[arg-type]
    (Request("a", steps=1), "steps"),
    (Request("a", steps=1001), "steps"),
    (Request("a", steps=50.0), "steps"),  # type: ignore[arg-type]
    (Request("a", steps=True), "steps"),
    (Request("a", seed=-1), "seed"),
    (Request("a", seed=2**63), "seed"),
    (Request("a", shifts=(12.0,)), "shifts"),  # type: ignore[arg-type]
    (Request("a", shifts=(12.0, 0.0)), "shifts.audio"),
    (Request("a", noise="random"), "noise"),
    (Request("a", task=["t2va"]), "task"),  # type: ignore[arg-type]
    (Request("a", aspect=["16:9"]), "aspect"),  # type: ignore[arg-type]
    (Request("a", aspect="16:9\0"), "aspect"),
    (Request("a", aspect="inf:inf"), "aspect"),
    (Request("a", size=(64, 64, 64)), "size"),  # type: ignore[arg-type]
    (Request("a", size=(10**400, 32)), "size.width"),
    (Request("a", short_edge=10**400), "short_edge"),
    (Request("a", duration=10**400), "duration"),
    (Request("a", shifts=(10**400, 1)), "shifts.video"),
    (Request("a", keyframes="x.png"), "keyframes"),  # type: ignore[arg-type]
    (Request("a", references=IMAGE), "references"),  # type: ignore[arg-type]
    (Request("a", keyframes=(Keyframe("x.png", 0.0),)), "keyframes[0].index"),  # type: ignore[arg-type]
    (Request("a", keyframes=(Keyframe("x.png", False),)), "keyframes[0].index"),
    (Request("a", keyframes=(Keyframe("x.png", 0, "crop"),)), "keyframes[0].fit"),
    (Request("a", keyframes=(Keyframe("x\0.png"),)), "keyframes[0].image"),
    (Request("a", keyframes=(Keyframe("\udfff.png"),)), "keyframes[0].image"),
    (Request("a", keyframes=(Keyframe(" "),)), "keyframes[0].image"),
    (Request("a", references=(Reference("image", "s3://bucket/x.png"),)), "references[0].source"),
    (Request("a", references=(Reference("image", "tar:a.tar#x.png"),)), "references[0].source"),
    (Request("a", references=(Reference("image", "ftp://a/x.png"),)), "references[0].source"),
    (Request("a", references=(Reference("image", "https://a/x.png"),)), "references[0].source"),
    (Request("a", references=(Reference("video", "x", end=10**400),)), "references[0].end"),
    (Request("a", references=(Reference("video", "x", end=0),)), "references[0].end"),
    *(
        (Request("a", references=(IMAGE, Reference(kind, "x", *part))), "references[1].end")
        for kind, part in (("video", (1, 1.01)), ("video_audio", (None, 1.97)), ("audio", (7.5, 9.47)))
    ),
]


@pytest.mark.parametrize(("request_", "field"), BAD)
def test_refused_by_name(request_: Request, field: str) -> None:
    refused(request_, field)


def test_messages_name_the_nearest_legal_value() -> None:
    assert "4" in refused(Request("a", duration=3.0), "duration")
    assert "768" in refused(Request("a", size=(1344, 760)), "size.height")
    short = Request("a", references=(Reference("video", "x", 1.5, 1.51),))
    assert "1.51 is 0.01 s after start 1.5; a clip lasts 2 to 15 s, the nearest is 3.5" in refused(
        short, "references[0].end"
    )


PARTS = ((0, 2), (None, 1.98), (1 / 3, 7 / 3), (1, 143 / 48), (2**0.5, 2**0.5 + 2), (5, None))


@pytest.mark.parametrize(
    "limit",
    [
        Request("a" * 7000),
        Request("日" * 7000),
        Request("a", steps=2, seed=2**63 - 1),
        *(Request("a", references=(Reference("video", "x", *part),)) for part in PARTS),
    ],
)
def test_the_limits_themselves_are_legal(limit: Request) -> None:
    check_request(limit, SPEC)


def test_task_follows_from_what_is_given() -> None:
    assert Request("a").resolved_task == "t2va"
    assert Request("a", keyframes=(Keyframe("x"),)).resolved_task == "fl2va"
    assert Request("a", references=(IMAGE,)).resolved_task == "ref2va"


def test_a_task_the_weights_do_not_declare_is_refused() -> None:
    spec = Spec(partitions=(Partition("fl2va", ("t2va", "fl2va")),))
    assert "t2va, fl2va" in refused(Request("a", references=(IMAGE,)), "task", spec)


def test_aspects() -> None:
    assert {name: parse_aspect(name) for name in ASPECTS} == ASPECTS
    assert parse_aspect("2.39:1") == (2.39, 1.0)


FULL = Request(
    prompt="a ball",
    task="ref2va",
    references=(
        IMAGE,
        Reference("video", "y.mp4", 1.0, 4.5),
        Reference("video_audio", "z.mp4"),
        Reference("audio", "a.wav"),
    ),
    duration=6.0,
    aspect="4:3",
    short_edge=512,
    steps=20,
    seed=7,
    shifts=(10.0, 2.0),
    noise="sequential",
    policy="forecast:balanced",
)


def test_json_round_trip_reaches_every_field() -> None:
    assert request_from_json(json.loads(json.dumps(request_to_json(FULL)))) == FULL
    keyframes = Request("a", "fl2va", (Keyframe("x.png"), Keyframe("y.png", -1, "stretch")), size=(96, 64))
    assert request_from_json(request_to_json(keyframes)) == keyframes
    changed = {f.name for f in fields(Request) if getattr(FULL, f.name) != getattr(Request("-"), f.name)}
    changed |= {f.name for f in fields(Request) if getattr(keyframes, f.name) != getattr(Request("-"), f.name)}
    assert changed == {f.name for f in fields(Request)}


@pytest.mark.parametrize("scheme", ["data", "DATA", "Data"])
def test_media_that_stand_in_an_address_are_not_repeated(scheme: str) -> None:
    address = f"{scheme}:image/png;base64," + "A" * 100_000
    request = Request("a", "fl2va", (Keyframe(address), Keyframe(f"{scheme}.png", -1)))
    uris = [condition["uri"] for condition in request_to_json(request)["conditions"]]
    assert uris == [f"data: ({len(address)} characters)", f"{scheme}.png"]


def test_the_published_examples_parse() -> None:
    request = request_from_json(
        {
            "task": "fl2va",
            "prompt": "p",
            "conditions": [{"type": "image", "uri": "file:///a.png", "role": "keyframe", "frame_index": 0}],
            "target": {"short_edge": 768, "aspect_ratio": "auto", "duration_seconds": 8},
            "seed": 0,
        }
    )
    assert request == Request("p", "fl2va", (Keyframe("file:///a.png", 0),), (), 8, "auto", None, 768, seed=0)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "request"),
        ("[]", "request"),
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "seed": NaN}', "request"),
        ('{"prompt": "a", "guidance_scale": 3}', "guidance_scale"),
        ('{"prompt": "a", "negative_prompt": "b"}', "negative_prompt"),
        ('{"prompt": "a", "fps": 24}', "fps"),
        ('{"prompt": "a", "sed": 3}', "sed"),
        ('{"prompt": "a", "target": 3}', "target"),
        ('{"prompt": "a", "target": {"width": 64}}', "target.height"),
        ('{"prompt": "a", "target": {"frames": 64}}', "target.frames"),
        ('{"prompt": "a", "conditions": {}}', "conditions"),
        ('{"prompt": "a", "conditions": [3]}', "conditions[0]"),
        ('{"prompt": "a", "conditions": [{"role": "style"}]}', "conditions[0].role"),
        ('{"prompt": "a", "conditions": [{"role": "keyframe", "type": "video", "uri": "x"}]}', "conditions[0].type"),
        ('{"prompt": "a", "conditions": [{"role": "keyframe", "type": "image", "uri": ""}]}', "conditions[0].uri"),
        (
            '{"prompt": "a", "conditions": [{"role": "keyframe", "type": "image", "uri": "x", "frame_index": 5}]}',
            "conditions[0].frame_index",
        ),
        ('{"prompt": "a", "conditions": [{"role": "reference", "type": "pdf", "uri": "x"}]}', "conditions[0].type"),
        (
            '{"prompt": "a", "conditions": [{"role": "reference", "type": "image", "uri": "x", "weight": 1}]}',
            "conditions[0].weight",
        ),
        ('{"prompt": "a", "flow_shift": 3}', "audio_flow_shift"),
        ("[" * 100_000, "request"),
        ('{"prompt": ' + "[" * 900 + "]" * 900 + "}", "prompt"),
        ('{"prompt": "a", "target": {"aspect_ratio": ' + '{"a":' * 600 + "1" + "}" * 600 + "}}", "target.aspect_ratio"),
        ('{"prompt": "a", "target": {"width": 64, "height": 60}}', "target.height"),
        ('{"prompt": "a", "target": {"width": 0, "height": 64}}', "target.width"),
        ('{"prompt": "a", "target": {"width": 32, "height": 640}}', "target.width"),
        ('{"prompt": "a", "target": {"duration_seconds": 99}}', "target.duration_seconds"),
        ('{"prompt": "a", "target": {"aspect_ratio": "9:1"}}', "target.aspect_ratio"),
        ('{"prompt": "a", "target": {"short_edge": 1.5}}', "target.short_edge"),
        ('{"prompt": "a", "flow_shift": 3, "audio_flow_shift": -3}', "audio_flow_shift"),
        ('{"prompt": "a", "flow_shift": -3, "audio_flow_shift": 3}', "flow_shift"),
        (
            '{"prompt": "a", "conditions": [{"role": "reference", "type": "video", "uri": "x", "start_time_seconds": -1}]}',
            "conditions[0].start_time_seconds",
        ),
        (
            '{"prompt": "a", "conditions": [{"role": "reference", "type": "image", "uri": "x"}, '
            '{"role": "reference", "type": "image", "uri": "s3://x"}]}',
            "conditions[1].uri",
        ),
        (
            '{"prompt": "a", "conditions": [{"role": "keyframe", "type": "image", "uri": "ftp://x", "frame_index": 0}]}',
            "conditions[0].uri",
        ),
        ('{"prompt": "a", "task": "fl2va"}', "conditions"),
        ('{"prompt": "a", "seed": null}', "seed"),
        ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "request"),
        ('{"prompt": "a", "conditions": [' + "[]," * 20_000 + "[]]}", "request"),
        ('{"prompt": "a", "num_inference_steps": 1e999}', "num_inference_steps"),
        ('{"seed": 1}', "prompt"),
        ('{"prompt": "a", "num_frames": 81}', "num_frames"),
        ('{"prompt": "a", "n": 2}', "n"),
        ('{"prompt": "a", "quality": "hd"}', "quality"),
        ('{"prompt": "a", "duration_seconds": 5}', "duration_seconds"),
        ('{"prompt": "a", "\\ud800": 3}', r"'\ud800'"),
        ('{"prompt": "a", "policy": 3}', "policy"),
        (
            '{"prompt": "a", "conditions": [{"role": "reference", "type": "image", "uri": "x\\u0000"}]}',
            "conditions[0].uri",
        ),
        (
            '{"prompt": "a", "conditions": [{"role": "keyframe", "type": "image", "uri": "x", "frame_index": 0.0}]}',
            "conditions[0].frame_index",
        ),
    ],
)
def test_json_is_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(parse_json(text), SPEC)
    str(caught.value).encode()  # printable whatever was given
    told = named_in_json(caught.value)
    assert told.field == field, told


def test_json_of_the_longest_prompt_and_much_media_is_read() -> None:
    item = {"role": "reference", "type": "image", "uri": "data:image/png;base64," + "+/Zz" * 200_000}
    body = {"prompt": ",[{" * 2333, "conditions": [item] * 9}
    assert parse_object(json.dumps(body)) == body


@pytest.mark.parametrize("field", sorted({field for _, field in BAD}))
def test_every_field_has_a_place_in_the_json(field: str) -> None:
    schema: Any = request_schema()
    for name in re.findall(r"\w+", json_place(field)):
        choices = schema.get("items", {}).get("oneOf", [])
        known = [schema.get("properties", {}), *(choice["properties"] for choice in choices)]
        schema = schema if name.isdecimal() else next(found[name] for found in known if name in found)


@pytest.mark.parametrize("role", ["keyframes", "references"])
@pytest.mark.parametrize("rest", ["", "[0]", "[1].medium", "[1].other"])
def test_a_servers_words_are_turned_back(role: str, rest: str) -> None:
    items = {"keyframes": (Keyframe("a"), Keyframe("b", -1)), "references": (IMAGE, Reference("video", "x"))}
    medium, other = {"keyframes": ("image", "index"), "references": ("source", "start")}[role]
    field = (role + rest).replace("medium", medium).replace("other", other)
    for name in (field, "steps", "size.height", "shifts.audio", "duration", "prompt", "policy"):
        request = Request("a", **{role: items[role]})  # type: ignore[arg-type]
        error = RequestError(name, "is wrong; mend it")
        error.add_note("kept")
        back = named_in_request(named_in_json(error), request)
        assert (back.field, str(back), back.__notes__) == (name, str(error), ["kept"])


@pytest.mark.parametrize(
    ("name", "roles", "place"),
    [
        ("references[1].source", ["reference", "keyframe", "reference"], "conditions[2].uri"),
        ("keyframes[0].fit", ["reference", "keyframe"], "conditions[1].fit"),
        ("references[1]", ["reference"], "conditions"),
        ("keyframes[0]", None, "conditions[0]"),
        ("keyframes[0].image", 5, "conditions"),
    ],
)
def test_places_among_conditions_of_both_roles(name: str, roles: Any, place: str) -> None:
    assert json_place(name, [{"role": role} for role in roles] if isinstance(roles, list) else roles) == place


def test_unknown_fields_are_pointed_at_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean num_inference_steps"):
        request_from_json({"prompt": "a", "num_inference_step": 3})


def test_numbers_and_paths_of_other_libraries_are_pythons_own() -> None:
    clip = Reference("video", "x", np.float32(1.5), np.int64(4))
    made = Request("a", references=(clip,), duration=np.float32(4), steps=np.int16(5), seed=np.int64(3),
                   size=(np.int32(1344), np.int64(768)), shifts=[np.float64(12), Fraction(3)])  # type: ignore[arg-type]  # fmt: skip
    check_request(made, SPEC)
    assert request_to_json(made) == request_to_json(
        Request(
            "a",
            references=(Reference("video", "x", 1.5, 4),),
            duration=4.0,
            steps=5,
            seed=3,
            size=(1344, 768),
            shifts=(12.0, 3.0),
        )  # fmt: skip
    )
    json.dumps(request_to_json(made))
    refused(Request("a", seed=np.float64(3)), "seed")  # type: ignore[arg-type]
    refused(Request("a", seed=np.bool_(True)), "seed")  # type: ignore[arg-type]


LISTS = st.lists(st.integers(), max_size=3)
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), LISTS)


@settings(max_examples=1500, deadline=None)
@given(st.dictionaries(st.sampled_from([f.name for f in fields(Request)]), ODD, max_size=4))
def test_nothing_of_a_wrong_type_passes_or_breaks(values: dict[str, object]) -> None:
    request = Request(**({"prompt": "a"} | values))  # type: ignore[arg-type]
    try:
        check_request(request, SPEC)
    except RequestError as error:
        assert re.split(r"[.\[]", error.field)[0] in {f.name for f in fields(Request)} and len(str(error)) < 600
    else:
        assert type(request.seed) is int and type(request.steps) is int and isinstance(request.prompt, str)


@pytest.mark.parametrize("thing", [None, "a cat", {"prompt": "a cat"}])
def test_what_is_no_request_is_refused(thing: object) -> None:
    with pytest.raises(RequestError, match="a Request is needed"):
        check_request(thing, SPEC)  # type: ignore[arg-type]
