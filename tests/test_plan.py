"""Sizes: golden canvases and durations (SPEC 13.2, 13.3), reference geometry, and what is cut is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinreel.errors import RequestError
from twinreel.limits import ASPECTS, aligned_frames, max_frames, tail_frames
from twinreel.plan import canvas, latent_frames, make_plan, resampled_length, sound_latents
from twinreel.request import Keyframe, Reference, Request
from twinreel.sources import Clip, Picture, Sound
from twinreel.spec import FPS, Spec

SPEC = Spec()

DURATIONS = {
    4: (96, 107, 32, 178, 142400),
    5: (120, 124, 37, 207, 165600),
    6: (144, 158, 47, 263, 210400),
    7: (168, 175, 52, 292, 233600),
    8: (192, 192, 57, 320, 256000),
    9: (216, 226, 67, 377, 301600),
    10: (240, 243, 72, 405, 324000),
    11: (264, 277, 82, 462, 369600),
    12: (288, 294, 87, 490, 392000),
    13: (312, 328, 97, 547, 437600),
    14: (336, 345, 102, 575, 460000),
    15: (360, 362, 107, 603, 482400),
}
CANVASES = [
    ((16, 9), (768, 1344), 1008),
    ((9, 16), (1344, 768), 1008),
    ((1, 1), (768, 768), 576),
    ((21, 9), (672, 1536), 1008),
    ((9, 21), (1536, 672), 1008),
    ((4, 3), (768, 1024), 768),
    ((3, 4), (1024, 768), 768),
    ((3, 2), (768, 1152), 864),
    ((5, 4), (768, 960), 720),
    ((7, 4), (768, 1344), 1008),
    ((4, 1), (512, 2016), 1008),
    ((1, 4), (2016, 512), 1008),
    ((1000, 777), (768, 992), 744),
    ((736, 992), (1024, 768), 768),
]


def picture(width: int, height: int) -> Picture:
    return Picture(np.zeros((height, width, 3), np.uint8))


def clip(frames: int, height: int = 768, width: int = 1344, sound: Sound | None = None) -> Clip:
    # a broadcast view: only the shape is read
    return Clip(np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (frames, height, width, 3)), 24.0, sound)


def silence(seconds: float, rate: int = 48000, channels: int = 2) -> Sound:
    return Sound(np.zeros((channels, round(seconds * rate)), np.float32), rate)


@pytest.mark.parametrize("seconds", DURATIONS)
def test_golden_durations(seconds: int) -> None:
    plan = make_plan(Request("a", duration=seconds), SPEC)
    asked, frames, latents, audio, samples = DURATIONS[seconds]
    assert round(seconds * FPS) == asked
    assert (plan.frames, plan.latents, plan.audio_latents, plan.samples) == (frames, latents, audio, samples)
    assert (frames != asked) == any("17n+5" in note for note in plan.notes)


@pytest.mark.parametrize(("ratio", "size", "rows"), CANVASES)
def test_golden_canvases(ratio: tuple[int, int], size: tuple[int, int], rows: int) -> None:
    assert canvas(*ratio, SPEC) == size
    assert size[0] // 32 * (size[1] // 32) == rows


@settings(max_examples=2000, deadline=None)
@given(st.integers(32, 20000), st.integers(32, 20000))
def test_canvas_is_legal_for_every_shape(width: int, height: int) -> None:
    if not 0.25 <= width / height <= 4:
        return
    rows, columns = canvas(width, height, SPEC)
    assert rows % 32 == columns % 32 == 0
    assert rows * columns <= SPEC.world.area_cap * 1.06
    assert canvas(columns, rows, SPEC) is not None and (columns >= rows) == (width >= height or rows == columns)


@given(st.integers(5, 5000))
def test_frame_arithmetic(frames: int) -> None:
    aligned = aligned_frames(frames, SPEC.video)
    assert aligned % 17 == 5 and 0 <= aligned - frames < 17
    assert latent_frames(aligned, SPEC.video) == 5 * ((aligned - 5) // 17) + 2
    assert abs(sound_latents(aligned) / 40 - aligned / 24) <= 1 / 80


def test_constants_follow_from_the_configuration() -> None:
    assert tail_frames(SPEC.video) == 5 and max_frames(SPEC) == 362 and SPEC.multiple == 32
    assert latent_frames(1, SPEC.video) == 1


def test_steps_and_defaults() -> None:
    plan = make_plan(Request("a"), SPEC)
    assert (plan.steps, plan.calls, plan.frames, plan.width, plan.height) == (50, 49, 124, 1344, 768)
    assert plan.shifts == (12.0, 3.0) and plan.task == "t2va" and plan.partition == "fl2va"
    assert any("not given" in note for note in plan.notes)
    assert make_plan(Request("a", short_edge=384), SPEC).height == 384
    assert set(ASPECTS) == {"21:9", "16:9", "4:3", "1:1", "3:4", "9:16"}


def test_explicit_size() -> None:
    plan = make_plan(Request("a", size=(1024, 512)), SPEC)
    assert (plan.width, plan.height) == (1024, 512)
    with pytest.raises(RequestError, match=r"^size: .*the nearest of this shape is 1440x704"):
        make_plan(Request("a", size=(2048, 1024)), SPEC)
    for ratio in ((4, 1), (1, 4), (16, 9), (21, 9)):
        height, width = canvas(*ratio, SPEC)
        assert make_plan(Request("a", size=(width, height)), SPEC).height == height


def test_keyframes_bind_the_canvas_and_say_when_they_are_stretched() -> None:
    request = Request("a", keyframes=(Keyframe("x", 0), Keyframe("y", -1)))
    plan = make_plan(request, SPEC, [picture(1000, 777), picture(50, 50)])
    assert (plan.height, plan.width) == (768, 992)
    first, last = plan.conditions
    assert (first.anchor, first.cover, last.anchor, last.cover) == ("first", False, "last", True)
    assert (first.latents, first.vae_frames, first.height, first.width) == (1, 1, 768, 992)
    only_last = make_plan(Request("a", keyframes=(Keyframe("y", -1),)), SPEC, [picture(777, 1000)])
    assert only_last.conditions[0].anchor == "last" and not only_last.conditions[0].cover
    assert (only_last.height, only_last.width) == (992, 768)
    squeezed = make_plan(Request("a", keyframes=(Keyframe("x"),), aspect="1:1"), SPEC, [picture(1600, 900)])
    assert any("ratio 1.778, the canvas's 1.000" in warning for warning in squeezed.warnings)
    with pytest.raises(RequestError, match=r"^keyframes\[0\]\.image"):
        make_plan(Request("a", keyframes=(Keyframe("x"),)), SPEC, [picture(500, 100)])


@pytest.mark.parametrize(
    ("size", "expected"), [((500, 500), (2048, 2048)), ((1000, 562), (3648, 2048)), ((400, 100), (8192, 2048))]
)
def test_reference_images(size: tuple[int, int], expected: tuple[int, int]) -> None:
    plan = make_plan(Request("a", references=(Reference("image", "x"),)), SPEC, [picture(*size)])
    condition = plan.conditions[0]
    assert (condition.width, condition.height) == expected
    assert plan.partition == "ref2va" and (plan.height, plan.width) == (768, 1344)
    with pytest.raises(RequestError, match=r"^references\[0\]\.source"):
        make_plan(Request("a", references=(Reference("image", "x"),)), SPEC, [picture(401, 100)])


def test_reference_clips_are_cut_to_the_contract_and_it_is_said() -> None:
    request = Request("a", references=(Reference("video", "x"),), duration=5)
    plan = make_plan(request, SPEC, [clip(200, sound=silence(200 / 24))])
    condition = plan.conditions[0]
    assert (condition.frames, condition.vae_frames, condition.latents) == (124, 124, 37)
    assert (condition.samples, condition.rate) == (int(124 / 24 * 48000), 48000)
    assert condition.audio_latents == 207
    assert any("longer than the target" in note for note in plan.notes)
    short = make_plan(request, SPEC, [clip(50)]).conditions[0]
    assert (short.frames, short.vae_frames, short.latents, short.audio_latents) == (50, 39, 12, 0)


def test_a_soundtrack_can_be_insisted_on() -> None:
    request = Request("a", references=(Reference("video_audio", "x"),), duration=5)
    with pytest.raises(RequestError, match="no soundtrack"):
        make_plan(request, SPEC, [clip(60)])
    assert make_plan(request, SPEC, [clip(60, sound=silence(2.5))]).conditions[0].audio_latents == 100


def test_the_only_sound_sets_the_duration() -> None:
    request = Request("a", references=(Reference("image", "x"), Reference("audio", "y")))
    plan = make_plan(request, SPEC, [picture(100, 100), silence(8.0)])
    assert plan.frames == 192 and plan.conditions[1].audio_latents == 320
    with pytest.raises(RequestError, match=r"^duration"):
        make_plan(request, SPEC, [picture(100, 100), silence(2.0)])
    # a soundtrack that was cut where reading ends is longer than it looks
    whole, cut = (replace(silence(15.0, 32000), cut=cut) for cut in (False, True))
    only = Request("a", references=(Reference("video", "x"),))
    assert make_plan(only, SPEC, [clip(100, sound=whole)]).asked_seconds == 15.0
    with pytest.raises(RequestError, match=r"^duration: .* goes on after 15.00 s; .* so give a duration"):
        make_plan(only, SPEC, [clip(100, sound=cut)])
    assert make_plan(replace(only, duration=5), SPEC, [clip(100, sound=cut)]).frames == 124
    # our own longest sound is 15.075 s
    assert make_plan(request, SPEC, [picture(100, 100), silence(15.075, 32000)]).frames == 362
    two = Request("a", references=(*request.references, Reference("audio", "z")))
    assert make_plan(two, SPEC, [picture(100, 100), silence(8.0), silence(7.0)]).frames == 124


@given(st.sampled_from([8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000, 96000]), st.integers(1, 200_000))
def test_resampled_length(rate: int, samples: int) -> None:
    length = resampled_length(samples, rate)
    assert (length - 1) * rate < samples * 32000 <= length * rate


VIDEO, AUDIO, IMAGE = Reference("video", "x"), Reference("audio", "y"), Reference("image", "z")


@pytest.mark.parametrize(
    ("references", "sources", "said"),
    [
        ((VIDEO,), [clip(47)], r"^references\[0\]\.source: lasts 1.96 s; a clip lasts 2 to 15 s, so give at least 2 s"),
        ((VIDEO,), [clip(363)], r"^references\[0\]\.source: goes on after 15.08 s"),
        ((VIDEO,), [Clip(clip(362).frames, 24.0, cut=True)], r"^references\[0\]\.source: goes on after"),
        ((IMAGE, AUDIO), [picture(64, 64), silence(1.9)], r"^references\[1\]\.source: lasts 1.90 s"),
        ((IMAGE, AUDIO), [picture(64, 64), silence(15.2)], r"^references\[1\]\.source: goes on after"),
        ((VIDEO, VIDEO), [clip(200), clip(163)], r"^references\[1\]\.source: .* video to 15.12 s; at most 15 s"),
        ((IMAGE, AUDIO, AUDIO), [picture(64, 64), silence(9), silence(7)], r"^references\[2\]\..*cut 0.92 s off"),
    ],
)
def test_clips_of_the_wrong_length_are_refused(references: tuple, sources: list, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        make_plan(Request("a", references=references, duration=5), SPEC, sources)


def test_the_longest_output_is_a_legal_reference_and_soundtracks_count_apart() -> None:
    own = clip(362, sound=silence(15.075, 32000))
    plan = make_plan(Request("a", references=(VIDEO, AUDIO), duration=15), SPEC, [own, silence(15.075, 32000)])
    assert [condition.frames for condition in plan.conditions] == [362, 0]
    assert [condition.audio_latents for condition in plan.conditions] == [603, 603]


def test_fit_is_the_released_rule_unless_it_is_named() -> None:
    def covers(*fits: str) -> tuple[list[bool], tuple[str, ...], tuple[str, ...]]:
        keyframes = tuple(Keyframe("x", index, fit) for index, fit in zip((0, -1), fits, strict=True))
        request = Request("a", keyframes=keyframes, aspect="1:1")
        plan = make_plan(request, SPEC, [picture(1600, 900), picture(900, 1600)])
        return [condition.cover for condition in plan.conditions], plan.warnings, plan.notes

    released, warnings, notes = covers("auto", "auto")
    assert released == [False, True] and len(warnings) == 1 and "fit=cover" in warnings[0]
    assert "44% of its height is cropped off" in " ".join(notes)
    named, warnings, notes = covers("cover", "stretch")
    assert named == [True, False] and "its ratio 0.562, the canvas's 1.000" in warnings[0]
    assert "44% of its width is cropped off" in " ".join(notes)


def test_the_prompts_labels_are_counted_as_the_model_counts_them() -> None:
    request = Request("<Video 1> and <Audio 2> but <Picture 2>", references=(IMAGE, VIDEO, AUDIO), duration=5)
    plan = make_plan(request, SPEC, [picture(64, 64), clip(60, sound=silence(2.5)), silence(3)])
    assert plan.warnings == (
        "prompt: <Picture 2> names nothing: the request has 1 of kind Picture",
        "references[0]: the prompt never names it; write <Picture 1> where it belongs",
    )


@pytest.mark.parametrize(
    ("asked", "notes", "warnings"),
    [
        ({"short_edge": 768}, (), ()),
        ({"short_edge": 780}, ("short_edge: 780 asked, 768 made (sides are multiples of 32)",), ()),
        ({"short_edge": 500}, ("short_edge: 500 asked, 512 made (sides are multiples of 32)",), ()),
        ({"short_edge": 1000}, (), ("short_edge: 1000 asked, 768 made (at most 1,032,192 pixels in all)",)),
        (
            {"short_edge": 790, "aspect": "4:1"}, (),
            ("short_edge: 790 asked, 512 made (at most 1,032,192 pixels in all)",),
        ),
        ({"aspect": "4:3"}, (), ()),
        ({"aspect": "16:9"}, (), ()),
        ({"aspect": "21:9"}, ("aspect: 21:9 asked, 1536x672 made, 2.29:1 (sides are multiples of 32)",), ()),
        (
            {"aspect": "3.2:1", "short_edge": 100},
            ("short_edge: 100 asked, 96 made (sides are multiples of 32)",
             "aspect: 3.2:1 asked, 320x96 made, 3.33:1 (sides are multiples of 32)"), (),
        ),
        ({"size": (320, 96)}, (), ()),
        ({"duration": 5.1}, ("duration: 122 frames asked, 124 made (lengths are 17n+5 frames at 24 fps)",), ()),
        ({"duration": 124 / 24}, (), ()),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_asked_and_is_not_what_is_made_is_said(
    asked: dict[str, Any], notes: tuple[str, ...], warnings: tuple[str, ...]
) -> None:
    plan = make_plan(Request("a", **{"duration": 124 / 24} | asked), SPEC)
    assert (plan.notes, plan.warnings) == (notes, warnings)


SIDES = st.integers(1, 8000)


@settings(max_examples=1500, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.floats(4, 15), st.sampled_from(["auto", "16:9", "1:1", "2.39:1", "1:4"]))
def test_every_pair_of_keyframes_makes_a_legal_plan_or_is_refused(
    w: int, h: int, w2: int, h2: int, seconds: float, aspect: str
) -> None:
    request = Request("a", keyframes=(Keyframe("x"), Keyframe("y", -1)), duration=seconds, aspect=aspect)
    sources = [Picture(np.broadcast_to(np.uint8(0), (*size, 3))) for size in ((h, w), (h2, w2))]
    legal = all(a <= 4 * b and b <= 4 * a for a, b in ((w, h), (w2, h2)))
    try:
        plan = make_plan(request, SPEC, sources)
    except RequestError as error:
        assert not legal and error.field.startswith("keyframes")
        return
    assert legal and plan.height % 32 == plan.width % 32 == 0 and plan.frames % 17 == 5
    assert round(seconds * FPS) <= plan.frames < round(seconds * FPS) + 17 and plan.frames <= 362
    assert plan.latents == 5 * ((plan.frames - 5) // 17) + 2
    change = plan.width / w * h / plan.height
    assert any("keyframes[0]" in warning for warning in plan.warnings) == (abs(change - 1) > 0.02)


@settings(max_examples=1000, deadline=None)
@given(st.integers(1, 1300), st.integers(1, 1300), st.floats(4, 15))
def test_every_explicit_size_is_taken_as_it_is_or_refused(columns: int, rows: int, seconds: float) -> None:
    size = columns * 32, rows * 32
    try:
        plan = make_plan(Request("a", size=size, duration=seconds), SPEC)
    except RequestError as error:
        assert error.field.split(".")[0] == "size"
    else:
        assert (plan.width, plan.height) == size and size[0] * size[1] <= SPEC.world.area_cap * 1.06
