"""Progress of a run on stderr: a bar by rich on a terminal, plain lines otherwise. Stdout belongs to results."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO

from .watch import Event

LINE_EVERY = 5.0  # seconds between plain lines of one stage
UNITS = {"denoise": "call", "decode": "frame"}


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
    unit = UNITS.get(event.stage, "part")
    plural = unit if event.total == 1 else f"{unit}s"
    note = f" ({event.note})" if event.note and event.note != plural else ""
    if event.done == 0:
        return f"{event.stage}, {event.total} {plural}{note}" if event.stage in UNITS else f"{event.stage}{note}"
    if event.done == event.total:
        return f"{event.stage}: {event.total} {plural} in {spoken(event.seconds)}{note}"
    left = "" if event.eta is None else f", {spoken(event.eta)} left"
    return f"{event.stage}: {unit} {event.done}/{event.total}, {event.seconds / event.done:.3g} s each{left}{note}"


class Lines:
    """Plain progress: a line when a stage is first heard of, at its last unit, and every `LINE_EVERY` seconds between.

    Stages may nest and take turns; each is spoken of on its own clock (`Event.seconds`).
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.spoke: dict[str, float] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Print `event` if it is time to."""
        last = self.spoke.get(event.stage)
        finished = 0 < event.total == event.done
        if last is None or finished or event.done and event.seconds - last >= LINE_EVERY:
            self.spoke[event.stage] = event.seconds
            print(line(event), file=self.stream, flush=True)


class Bars:
    """The same on a terminal: one bar a stage with its units, time and ETA."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        told = TextColumn("{task.fields[told]}")
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), told)
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
        left = f"{spoken(event.eta)} left" if event.eta else spoken(event.seconds)
        told = f"{left} {event.note}".rstrip()
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
    return Bars(stream) if stream.isatty() else Lines(stream)
