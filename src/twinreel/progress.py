"""Progress of a run on stderr: bars by rich on a terminal, plain lines otherwise. Stdout belongs to results."""

from __future__ import annotations

import sys
import threading
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TextIO

from .watch import Event

LINE_EVERY = 5.0  # seconds between plain lines of one stage
SILENCE = 8.0  # seconds after which a line says that the last unit is still being worked at
FEW = 20  # a stage of at most so many units has a line for each
BRISK = 0.05  # seconds a unit: below, pace and time left say nothing
SOON = 0.5  # seconds: what takes less has no line of its own
UNITS = {"denoise": "call", "decode": "frame"}
SPOKEN = {"start": ("starting", "started in")}  # what a stage is called that is no stage of a request


def spoken(seconds: float) -> str:
    """`12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def line(event: Event) -> str:
    """One event as a line, such as `denoise: call 12/49, 1.2 s each, 44.4 s left` or `load: 2 parts in 3.0 s`."""
    unit, plural = _units(event)
    note = f" ({event.note})" if event.note and event.note != plural else ""
    begun, ended = SPOKEN.get(event.stage, (event.stage, f"{event.stage}: done in"))
    if event.done == 0:
        alone = (event.stage, event.total) == ("decode", 1)  # a picture has more frames
        counted = "sound alone" if alone else f"{event.total} {plural}"
        return f"{event.stage}, {counted}{note}" if event.stage in UNITS else f"{begun}{note}"
    if event.done == event.total:
        counted = ended if event.total == 1 else f"{event.stage}: {event.total} {plural} in"
        return f"{counted} {spoken(event.seconds)}{note}"
    pace = event.seconds / event.done
    each = f", {pace:.3g} s each" if pace >= BRISK else ""
    left = f", {spoken(event.eta)} left" if event.eta is not None and event.eta >= BRISK else ""
    return f"{event.stage}: {unit} {event.done}/{event.total}{each}{left}{note}"


def still(event: Event, waited: float) -> str:
    """What to say when nothing was heard for `waited` seconds after `event`: `denoise: still at call 13/49, 12.0 s`."""
    unit, plural = _units(event)
    note = f" ({event.note})" if event.note and event.note != plural else ""
    if 0 < event.total == event.done:
        return f"{event.stage}: done, still at what follows, {spoken(waited)}"
    place = f"still at {unit} {event.done + 1}/{event.total}" if event.total > 1 else "still at it"
    return f"{event.stage}: {place}, {spoken(waited)}{note}"


def _units(event: Event) -> tuple[str, str]:
    unit = UNITS.get(event.stage, "part")
    return unit, unit if event.total == 1 else f"{unit}s"


def worth_a_line(event: Event) -> bool:
    """Not the bare beginning of a stage (its end says more, and a pulse speaks if it is long), nor what took no time."""
    if event.done == 0:
        return bool(event.note) or event.stage in UNITS or event.stage in SPOKEN
    return event.stage in UNITS or event.seconds >= SOON


class Lines:
    """Plain progress: a line when a counted stage begins, at its last unit, and every `LINE_EVERY` seconds between, at
    every unit where they are few; and after `silence` seconds without any, one that says what is still worked at.

    Stages may nest and take turns; each is spoken of on its own clock (`Event.seconds`).
    """

    def __init__(self, stream: TextIO, silence: float = SILENCE) -> None:
        self.stream, self.silence = stream, silence
        self._heard: dict[str, Event] = {}  # the last event of each stage
        self._told: dict[str, Event] = {}  # and the last one that had a line
        self._last: Event | None = None
        self._heard_at = self._spoke_at = time.monotonic()
        self._turn, self._ended = threading.Lock(), threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> Lines:
        self._pulse.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._pulse.join()

    def __call__(self, event: Event) -> None:
        """Print `event` if it is time to."""
        with self._turn:
            self._last, self._heard_at = event, time.monotonic()
            if self._is_news(event):
                self._told[event.stage] = event
                if worth_a_line(event):
                    self._say(line(event))
            self._heard[event.stage] = event

    def _is_news(self, event: Event) -> bool:
        heard, told = self._heard.get(event.stage), self._told.get(event.stage)
        if heard is None or told is None or event.seconds < heard.seconds:  # its clock went back: begun once more
            return True
        if event.total == 0:
            return event.note != told.note
        if event.done == told.done:
            return False
        if event.done == event.total or event.total <= FEW:
            return True
        return event.seconds - told.seconds >= LINE_EVERY

    def _beat(self) -> None:
        while not self._ended.wait(max(0.01, self._spoke_at + self.silence - time.monotonic())):
            with self._turn:
                now = time.monotonic()
                if self._last is not None and now - self._spoke_at >= self.silence:
                    self._say(still(self._last, now - self._heard_at))
                elif self._last is None:
                    self._spoke_at = now

    def _say(self, text: str) -> None:
        self._spoke_at = time.monotonic()
        print(text, file=self.stream, flush=True)


class Bars:
    """The same on a terminal: one bar a stage with its units, the time it has taken, and what is left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        told = TextColumn("{task.fields[told]}")
        columns = (
            TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), told
        )  # fmt: skip
        self.bars = Progress(*columns, console=Console(file=stream))
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            for task in self.bars.tasks:
                self._fill(task)
        self.bars.stop()

    def __call__(self, event: Event) -> None:
        """Move the bar of the event's stage; a stage of a single unit is over when another one speaks."""
        for task in self.bars.tasks:
            if task.description != event.stage and task.total in (None, 1):
                self._fill(task)
        if event.stage not in self.tasks:
            self.tasks[event.stage] = self.bars.add_task(event.stage, total=event.total or None, told="")
        left = f"{spoken(event.eta)} left" if event.eta else ""
        told = f"{left} {event.note}".strip()
        self.bars.update(self.tasks[event.stage], completed=event.done, total=event.total or None, told=told)

    def _fill(self, task: Any) -> None:
        self.bars.update(task.id, completed=task.total or 1, total=task.total or 1)


class Quiet:
    """No progress."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Say nothing."""


def progress(quiet: bool, stream: TextIO | None = None) -> Lines | Bars | Quiet:
    """The way to show progress on `stream` (stderr): nothing, bars on a terminal, or plain lines."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    return Bars(stream) if stream.isatty() and find_spec("rich") else Lines(stream)
