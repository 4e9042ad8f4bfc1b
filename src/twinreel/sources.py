"""Decoded media as plain NumPy values: what a person may pass in memory, and what reading a file gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError


@dataclass(frozen=True, eq=False)
class Picture:
    """One RGB picture, upright.

    Args:
        pixels: uint8 `[H, W, 3]`.
        notes: what reading changed, in words for the report.
    """

    pixels: NDArray[np.uint8]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_notes(self.notes)


@dataclass(frozen=True, eq=False)
class Sound:
    """A waveform at its native rate.

    Args:
        samples: float32 `[c, n]`, c = 1 or 2, channel 0 left; full scale is 1, and what a lossy codec overshoots stays.
        rate: samples per second.
        cut: reading stopped at the limit while the source went on.
        notes: what reading changed, in words for the report.
    """

    samples: NDArray[np.float32]
    rate: int
    cut: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_notes(self.notes)

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.samples.shape[1] / self.rate


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames at a constant rate, with the soundtrack that starts with the first of them.

    Args:
        frames: uint8 `[n, H, W, 3]`, RGB, upright, square pixels.
        fps: frames per second, 0.01 to 1,000,000; 24.0 once read.
        sound: the soundtrack, or None.
        cut: reading stopped at the limit while the source went on.
        notes: what reading changed, in words for the report.
    """

    frames: NDArray[np.uint8]
    fps: float
    sound: Sound | None = None
    cut: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_notes(self.notes)

    @property
    def seconds(self) -> float:
        """Length of the picture in seconds."""
        return self.frames.shape[0] / self.fps


Source = Picture | Clip | Sound


def _check_notes(notes: object) -> None:
    if not isinstance(notes, tuple) or not all(isinstance(note, str) for note in notes):
        raise RequestError("notes", f"got {notes!r:.80}; a tuple of texts is needed, or leave it out")


def notes_of(source: Source) -> tuple[str, ...]:
    """Everything reading changed, the soundtrack's notes included."""
    if isinstance(source, Clip) and source.sound is not None:
        return source.notes + source.sound.notes
    return source.notes


@dataclass(frozen=True, eq=False)
class Prepared:
    """One condition at the size, length and rate the models take.

    Args:
        frames: uint8 `[f, H, W, 3]` (f = 1 for a picture), or None.
        waveform: float32 `[2, n]` at 32 kHz, or None.
    """

    frames: NDArray[np.uint8] | None
    waveform: NDArray[np.float32] | None
