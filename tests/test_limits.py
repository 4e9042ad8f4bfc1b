"""The table of limits: ranges say themselves, and numbers are numbers."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinreel import limits
from twinreel.errors import RequestError
from twinreel.limits import Range, check_choice, check_number, check_ratio, check_text, counted, shown
from twinreel.spec import Spec, World


def test_h3_limits_are_the_model_cards() -> None:
    spec = Spec()
    assert str(limits.durations(spec.world)) == "4 to 15 s" and str(limits.clip_seconds(spec.world)) == "2 to 15 s"
    assert str(limits.PROMPT_CHARACTERS) == "1 to 7,000 characters" and str(limits.STEPS) == "2 to 1000"
    assert limits.SEEDS.high == 2**63 - 1 and limits.RATIOS == "1:4 to 4:1" and limits.sides(spec).low == 32
    assert (limits.REFERENCES_OF_A_KIND, limits.REFERENCES_IN_ALL) == ({"image": 9, "video": 3, "audio": 3}, 12)
    assert (limits.clip_frames(spec).low, limits.clip_frames(spec).high) == (48, 362)


def test_a_small_world_has_its_own() -> None:
    spec = Spec(world=World(min_seconds=0.9, max_seconds=6, min_clip_seconds=0.9, max_clip_seconds=3))
    assert str(limits.durations(spec.world)) == "0.9 to 6 s"
    assert (limits.clip_frames(spec).low, limits.clip_frames(spec).high) == (22, 73)


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.just(10**5000)))
def test_a_range_takes_numbers_inside_it_and_names_the_nearest(value: object) -> None:
    limit = Range(4, 15, "s")
    legal = type(value) in (int, float) and 4 <= value <= 15  # type: ignore[operator]
    try:
        limit.check("duration", value)
    except RequestError as error:
        assert not legal and error.field == "duration" and len(str(error)) < 300
        number = type(value) is int or (type(value) is float and math.isfinite(value))
        if number:
            assert str(error).endswith("the nearest is 4" if value < 4 else "the nearest is 15")  # type: ignore[operator]
    else:
        assert legal


@pytest.mark.parametrize("value", [True, "5", 5.0, None, float("nan")])
def test_whole_numbers_are_ints(value: object) -> None:
    with pytest.raises(RequestError):
        check_number("steps", value, whole=True)


@pytest.mark.parametrize("value", [True, 0.0, "0", None, [0]])
def test_a_choice_is_of_its_own_type(value: object) -> None:
    with pytest.raises(RequestError, match="use 0, -1"):
        check_choice("index", value, (0, -1))


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_text_without_nulls_and_surrogates_passes(text: str) -> None:
    bad = re.search("[\0\ud800-\udfff]", text)
    if bad is None:
        check_text("prompt", text)
    else:
        with pytest.raises(RequestError, match=f"at character {bad.start()}"):
            check_text("prompt", text)


@given(st.integers(1, 30_000), st.integers(1, 30_000))
def test_ratios(width: int, height: int) -> None:
    legal = width <= 4 * height and height <= 4 * width
    try:
        check_ratio("size", width, height)
    except RequestError as error:
        assert not legal and str(error).endswith("4:1" if width > height else "1:4")
    else:
        assert legal


def test_what_is_shown_is_short_and_printable() -> None:
    assert shown("\ud800\0") == r"'\ud800\x00'"
    assert len(shown("x" * 10_000)) < 100 and "10002 characters" in shown("x" * 10_000)
    assert shown(10**5000) == "a int too long to print"


def test_one_is_counted_as_one() -> None:
    assert [counted(number, "call") for number in (0, 1, 49)] == ["0 calls", "1 call", "49 calls"]
