"""Time as the references see it: the part of a source that is asked for, and frames on 24 fps slots (SPEC 4.5)."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import RequestError
from ..limits import check_ratio, in_frames, typed
from ..plan import canvas
from ..sources import Sound
from ..spec import FPS, Spec

FRAMES_AT_ONCE, PIXELS_AT_ONCE = 4, 2**26  # brought to the canvas side by side: each by itself, so bits do not change


@dataclass(frozen=True)
class Window:
    """The part of a source to read: `start` to `end` in seconds, at most `max_frames` at 24 fps. `where` names it.

    `look`: only sizes, times and notes are wanted, so no frame is converted.
    """

    start: float | None
    end: float | None
    max_frames: int
    where: str
    look: bool = False

    @property
    def first(self) -> Fraction:
        """Start in seconds."""
        return typed(self.start or 0)

    @property
    def end_slot(self) -> int | None:
        """The slot after the last one asked for, or None when the source's own end decides."""
        if self.end is None:
            return None
        return in_frames(typed(self.end) - self.first)

    @property
    def asked_frames(self) -> int:
        """Most frames to read."""
        return self.max_frames if self.end_slot is None else min(self.max_frames, self.end_slot)

    def first_sample(self, rate: int) -> int:
        """The first sample asked for, counted from the source's zero."""
        return round(self.first * rate)

    def most_samples(self, rate: int) -> int:
        """Most samples per channel to read."""
        most = int(self.max_frames / FPS * rate)
        if self.end is None:
            return most
        return min(most, round(typed(self.end) * rate) - self.first_sample(rate))

    def bounded_by_limit(self, rate: int) -> bool:
        """Whether the limit, and not the person's `end`, stops the reading of a sound."""
        return self.most_samples(rate) == int(self.max_frames / FPS * rate)

    def cut_sound(self, sound: Sound, field: str) -> Sound:
        """The asked part of a whole sound; may hold 0 samples."""
        first, most = self.first_sample(sound.rate), self.most_samples(sound.rate)
        over = sound.samples.shape[1] - first > most and self.bounded_by_limit(sound.rate)
        samples = sound.samples[:, first : first + most]
        notes = sound.notes + self.sound_notes(field, samples.shape[1], sound.rate, over)
        return dataclasses.replace(sound, samples=samples, cut=sound.cut or over, notes=notes)

    def sound_notes(self, field: str, samples: int, rate: int, over: bool) -> tuple[str, ...]:
        """What of a sound was not as asked, in words."""
        if over:
            return (f"{field}: sound longer than the limit, its first {samples / rate:.2f} s were read",)
        if self.end is not None and samples < self.most_samples(rate):
            return (f"{field}: its sound ends before end={self.end:g} s, {samples / rate:.2f} s were read",)
        return ()

    def refuse_late_start(self, field: str, seconds: float) -> RequestError:
        """The error of a source in which nothing is left after `start`."""
        if self.start:
            field, found = f"{self.where}.start", f"{self.start:g} s, but it ends at {seconds:.2f} s"
            return RequestError(field, f"{found}; start earlier")
        return RequestError(field, "holds nothing to read; give a source that lasts at least one frame")


class FrameSlots:
    """Collects frames by their time of display; each is resized to the source's own canvas only if it is shown.

    `width`, `height` are the upright source's pixels, `pixel_aspect` the width of one of them over its height.
    """

    def __init__(
        self, width: int, height: int, field: str, spec: Spec, window: Window, *, pixel_aspect: Fraction = Fraction(1)
    ) -> None:
        wide, high = width * pixel_aspect.numerator, height * pixel_aspect.denominator
        ratio = f"{pixel_aspect.numerator}:{pixel_aspect.denominator}"
        words = f"{width}x{height} with sample aspect ratio {ratio}" if pixel_aspect != 1 else ""
        check_ratio(field, wide, high, words)
        self.height, self.width = canvas(wide, high, spec)
        self.field, self.window = field, window
        self.cut = False
        self._frames: NDArray[np.uint8] | None = None
        self._written = 0
        self._waiting: tuple[int, Callable[[], NDArray[np.uint8]]] | None = None
        self._end = 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[None]] = deque()
        self._most_running = max(1, min(FRAMES_AT_ONCE, PIXELS_AT_ONCE // (width * height)))

    @property
    def full(self) -> bool:
        """Whether nothing more will be taken."""
        return self._written >= self.window.asked_frames

    def put(self, position: float | Fraction, pixels: Callable[[], NDArray[np.uint8]]) -> None:
        """A frame shown from `position`, in 24ths of a second after the source's zero; `pixels` gives `[H, W, 3]`."""
        slot = self._slot(position)
        self._show_until(slot)
        self._waiting = (slot, pixels)

    def restart(self) -> None:
        """Forget the frame that waits for its successor: the next one comes from another place."""
        self._waiting = None

    def close(self, position: float | Fraction) -> None:
        """The source's end, in 24ths of a second."""
        self._end = float(position) / FPS
        self._show_until(self._slot(position))
        self._waiting = None
        while self._running:
            self._running.popleft().result()
        if self._pool is not None:
            self._pool.shutdown()

    def frames(self) -> NDArray[np.uint8]:
        """uint8 `[n, H, W, 3]` on the canvas. Raises RequestError when nothing lies after `start`."""
        if self._frames is None or not self._written:
            raise self.window.refuse_late_start(self.field, self._end)
        return self._frames[: self._written]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not as asked, in words."""
        notes = []
        if self.cut:
            notes.append(f"{self.field}: longer than the limit, {self._written} frames at {FPS} fps were read")
        if not self.full and self.window.end_slot is not None and self._written < self.window.end_slot:
            notes.append(f"{self.field}: ends before end={self.window.end:g} s, {self._written} frames were read")
        return tuple(notes)

    def _slot(self, position: float | Fraction) -> int:
        since = position - self.window.first * FPS
        return math.floor(since + (0.5 if isinstance(since, float) else Fraction(1, 2)))

    def _show_until(self, slot: int) -> None:
        if self._waiting is None:
            return
        most = self.window.asked_frames
        shown, pixels = self._waiting
        last = min(slot, most)
        # frames before `start` have slots below zero; only the one on display at `start` reaches past it
        if last > max(shown, self._written):
            self._fill(self._written, last, pixels)
            self._written = last
        if slot > most and most == self.window.max_frames:
            self.cut = True

    def _fill(self, first: int, last: int, pixels: Callable[[], NDArray[np.uint8]]) -> None:
        """Begin to put a frame on its slots; `close` waits for the end."""
        shape = self.window.asked_frames, self.height, self.width, 3
        if self.window.look:
            self._frames = np.broadcast_to(np.uint8(0), shape)
            return
        if self._frames is None:
            # pages of the part that stays empty are never touched
            self._frames = np.empty(shape, np.uint8)
            self._pool = ThreadPoolExecutor(self._most_running)
        frames, pool = self._frames, self._pool
        assert pool is not None

        def show() -> None:
            frames[first:last] = resized(pixels(), self.width, self.height)

        if len(self._running) == self._most_running:
            self._running.popleft().result()
        self._running.append(pool.submit(show))


def resized(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """PIL LANCZOS of uint8 `[h, w, 3]` to `[height, width, 3]`; the array itself when the size is already right."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), Image.Resampling.LANCZOS))
