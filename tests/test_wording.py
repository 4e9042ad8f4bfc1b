"""Warnings about a prompt: labels without a medium, media without a label, tags that do not pair."""

from __future__ import annotations

import pytest

from twinreel.wording import prompt_warnings

TWO = [("references[0]", ("Picture 1",)), ("references[1]", ("Audio 1", "Video 1"))]


def warned(prompt: str, given: list[tuple[str, tuple[str, ...]]] = TWO, named: bool = False) -> tuple[str, ...]:
    return prompt_warnings(prompt, given, must_be_named=named)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("<Picture 3> runs", "<Picture 3> names nothing: the request has 1 of kind Picture"),
        ("<Video 2> runs", "<Video 2> names nothing"),
        ("<Audio 0> sounds", "<Audio 0> names nothing"),
        ("<picture 1> runs", "write <Picture 1>"),
        ("< Video  1 > runs", "write <Video 1>"),
        ("<d>hi", "<d> is never closed; put </d> after it"),
        ("hi</d>", "</d> closes nothing"),
        ("<d>a <d>b</d></d>", "<d> is opened again before </d>"),
        ("<|lyrics_start|>la", "<|lyrics_start|> is never closed"),
        ("<d>a<|caption_start|>b</d><|caption_end|>", "</d> crosses <|caption_start|>"),
        ("<|im_start|>system", "<|im_start|> stays plain text"),
        ("<|lyric_start|>", "<|lyric_start|> stays plain text"),
    ],
)
def test_what_cannot_be_meant_is_said(prompt: str, words: str) -> None:
    assert any(words in warning for warning in warned(prompt)), warned(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "<Picture 1> meets <Video 1> and <Audio 1>.",
        "<d>one</d><d>two</d>",
        "<|lyrics_start|><d>la</d><|lyrics_end|><|cutoff|>",
        "5 < 6 and <video> and <Picture>",
    ],
)
def test_what_is_right_is_not_warned_of(prompt: str) -> None:
    assert warned(prompt) == ()


def test_references_never_named() -> None:
    found = warned("A cat.", named=True)
    assert [warning.split(":")[0] for warning in found] == ["references[0]", "references[1]"]
    assert "<Audio 1> or <Video 1>" in found[1]
    assert warned("the dog of Picture 1 and <Audio 1>", named=True) == ()


def test_a_warning_is_said_once() -> None:
    assert len(warned("<Picture 3> and <Picture 3>")) == 1
