"""Progress lines and bars: what is said, when, and where."""

from __future__ import annotations

import io
import threading
import time

import pytest

from twinreel.progress import SILENCE, Bars, Lines, Quiet, line, progress, spoken, still
from twinreel.watch import Event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_spoken(seconds: float, text: str):
    assert spoken(seconds) == text


def test_a_step_says_calls_pace_and_time_left():
    assert line(Event("denoise", 12, 49, 14.4, 44.4)) == "denoise: call 12/49, 1.2 s each, 44.4 s left"
    assert line(Event("denoise", 0, 49, 0.0)) == "denoise, 49 calls"
    assert line(Event("denoise", 49, 49, 59.1, 0.0)) == "denoise: 49 calls in 59.1 s"
    assert line(Event("load", 1, 2, 3.0, 3.0, "text_encoder")) == "load: part 1/2, 3 s each, 3.0 s left (text_encoder)"
    assert line(Event("load", 1, 1, 3.0, 0.0, "dit")) == "load: done in 3.0 s (dit)"
    assert line(Event("load", 3, 7, 0.03, 0.04, "dit")) == "load: part 3/7 (dit)", "too quick for a pace"
    assert [line(Event("start", done, 1, 3.5)) for done in (0, 1)] == ["starting", "started in 3.5 s"]
    assert line(Event("decode", 17, 124, 3.4, None, "frames")) == "decode: frame 17/124, 0.2 s each"
    assert [line(Event("decode", 0, total, 0.0)) for total in (124, 1)] == ["decode, 124 frames", "decode, sound alone"]


def test_lines_are_few_and_end_with_the_last_unit():
    stream = io.StringIO()
    with Lines(stream) as watch:
        for call in range(50):
            watch(Event("denoise", call, 49, call * 0.5, None))
    said = stream.getvalue().splitlines()
    assert said[0] == "denoise, 49 calls"
    assert said[-1] == "denoise: 49 calls in 24.5 s"
    assert len(said) == 1 + 4 + 1  # start; 5, 10, 15, 20 s; the end


def test_nested_stages_are_announced_once():
    stream = io.StringIO()
    watch = Lines(stream)
    for stage, seconds in (("decode", 0.0), ("mux", 0.0), ("decode", 0.1), ("mux", 0.1), ("decode", 6.0)):
        watch(Event(stage, int(seconds * 10), 100, seconds))
    assert [text.split(",")[0].split(":")[0] for text in stream.getvalue().splitlines()] == ["decode", "decode"]


def test_a_stage_of_few_units_has_a_line_for_each_and_one_begun_again_is_told_again():
    stream = io.StringIO()
    watch = Lines(stream)
    for done, note in ((0, ""), (0, "text_encoder"), (1, "text_encoder"), (1, "video_encoder"), (2, "video_encoder")):
        watch(Event("load", done, 2, done + 0.5, None, note))
    watch(Event("load", 0, 1, 0.0))
    watch(Event("load", 1, 1, 9.0, 0.0, "dit"))
    assert stream.getvalue().splitlines() == [
        "load: part 1/2, 1.5 s each (text_encoder)",
        "load: 2 parts in 2.5 s (video_encoder)",
        "load: done in 9.0 s (dit)",
    ]


def test_what_took_no_time_and_what_only_begins_has_no_line():
    stream = io.StringIO()
    watch = Lines(stream)
    for event in (Event("read", 0, 1, 0.0), Event("read", 1, 1, 0.01), Event("load", 0, 7, 0.0, None, "")):
        watch(event)
    for part in range(1, 8):
        watch(Event("load", part, 7, part * 0.01, None, "dit"))
    assert stream.getvalue() == ""


def test_a_place_in_the_queue_is_told_when_it_changes():
    stream = io.StringIO()
    watch = Lines(stream)
    for ahead in (2, 2, 2, 1):
        watch(Event("queue", 0, 0, 0.0, None, f"{ahead} ahead"))
    assert stream.getvalue().splitlines() == ["queue (2 ahead)", "queue (1 ahead)"]


def test_a_long_unit_is_not_silent():
    """Never ten seconds without a line: after `SILENCE` one says what is being worked at, again and again."""
    assert SILENCE < 10
    stream, before = io.StringIO(), threading.active_count()
    with Lines(stream, silence=0.05) as watch:
        time.sleep(0.12)
        assert stream.getvalue() == "", "nothing has been said to be worked at"
        watch(Event("denoise", 12, 49, 3.0, 9.0))
        time.sleep(0.3)
    said = stream.getvalue().splitlines()
    assert threading.active_count() == before
    assert said[0] == "denoise: call 12/49, 0.25 s each, 9.0 s left"
    assert len(said) >= 3 and all(text.startswith("denoise: still at call 13/49, 0.") for text in said[1:])


def test_what_is_said_of_a_long_unit():
    assert still(Event("load", 1, 4, 3.0, None, "dit:fl2va"), 12) == "load: still at part 2/4, 12.0 s (dit:fl2va)"
    assert still(Event("read", 0, 1, 0.0), 8) == "read: still at it, 8.0 s"
    assert still(Event("decode", 17, 124, 1.0, None, "frames"), 65) == "decode: still at frame 18/124, 1 min 05 s"
    assert still(Event("decode", 124, 124, 1.0, None, "frames"), 9) == "decode: done, still at what follows, 9.0 s"


def test_bars_show_every_stage_and_fill_up():
    stream = Terminal()
    with progress(False, stream) as watch:
        assert isinstance(watch, Bars)
        watch(Event("read", 0, 1, 0.0))
        watch(Event("denoise", 0, 3, 0.0))
        for call in (1, 2, 3):
            watch(Event("denoise", call, 3, call * 1.0, 3.0 - call, "note"))
        watch(Event("decode", 0, 17, 0.0))
    assert [(task.description, task.completed, task.total) for task in watch.bars.tasks] == [
        ("read", 1, 1),
        ("denoise", 3, 3),
        ("decode", 17, 17),
    ]
    assert "denoise" in stream.getvalue()


def test_a_broken_run_leaves_its_bar_where_it_stopped():
    stream = Terminal()
    with pytest.raises(ValueError), progress(False, stream) as watch:
        watch(Event("denoise", 1, 3, 1.0))
        raise ValueError
    assert isinstance(watch, Bars) and [task.completed for task in watch.bars.tasks] == [1]


def test_quiet_and_plain_streams():
    stream = io.StringIO()
    assert isinstance(progress(False, stream), Lines)
    with progress(True, stream) as watch:
        watch(Event("read", 0, 1, 0.0))
    assert isinstance(watch, Quiet) and stream.getvalue() == ""


def test_a_terminal_without_rich_gets_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("twinreel.progress.find_spec", lambda name: None)
    assert isinstance(progress(False, Terminal()), Lines)
