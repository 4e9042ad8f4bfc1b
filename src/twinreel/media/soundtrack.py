"""Decoded sound on its way to a `Sound`: placed by presentation time, at most stereo, no more than is asked for."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..sources import Sound
from .slots import Window

SLACK = Fraction(1, 200)  # seconds that a frame of sound may lie off its neighbour: timestamps of some files are coarse
PREROLL = Fraction(1, 2)  # seconds decoded before `start`: blocks overlap and lossy decoders look back
MARGIN = Fraction(1, 10)  # seconds read past the end: they decide whether anything was cut
EARLY_SOUND = Fraction(1, 20)  # seconds of sound before the first picture from which on their loss is told
MOST_BEFORE_PICTURE = 120  # seconds of sound kept while no picture has come
RATES = (8_000, 192_000)
MIDWAY = "changes its sample rate or channels midway; convert it to one format"
LOUDEST = 4.0  # a float sample beyond this is of another scale and not merely loud


class Soundtrack:
    """Pieces with their times, kept until their zero is known: their own start, or the picture's unless `alone`."""

    def __init__(self, stream: Any, field: str, window: Window, alone: bool) -> None:
        self.stream, self.field, self.window, self.alone = stream, field, window, alone
        self.zero: Fraction | None = None
        self.first: Fraction | None = None
        self.landed: Fraction | None = None
        self.end = Fraction(0)
        self.done = False
        self._rate = 0
        self._mixer: Any = None
        self._mixed = ""
        self._pieces: list[tuple[Fraction, NDArray[np.float32]]] = []

    def restart(self) -> None:
        """Forget what was taken, and keep the zero: the file is read on from another place."""
        self._pieces, self.landed, self.done, self._mixer = [], None, False, None

    def wants(self, packet: Any) -> bool:
        """Whether `packet` need be decoded."""
        if self.done:
            return False
        if self.zero is None or packet.pts is None or not packet.duration:
            return True
        ends = Fraction((packet.pts + packet.duration) * packet.time_base)
        if ends < self.zero + self.window.first - PREROLL:
            self.first = Fraction(packet.pts * packet.time_base) if self.first is None else self.first
            self.end = max(self.end, ends)
            return False
        return True

    def take(self, frame: Any) -> None:
        """The next decoded frame. Raises RequestError for sound of another form midway."""
        time = self.end if frame.pts is None else frame.pts * frame.time_base
        samples = self._without_padding(time, self._at_most_stereo(frame), frame.sample_rate)
        if not self._rate:
            self._rate = check_rate(frame.sample_rate, self.field)
        if frame.sample_rate != self._rate or (self._pieces and samples.shape[0] != self._pieces[0][1].shape[0]):
            raise RequestError(self.field, MIDWAY)
        self.first = time if self.first is None else self.first
        self.landed = time if self.landed is None else self.landed
        if self.alone:
            self.zero = self.first
        self.end = time + Fraction(samples.shape[1], self._rate)
        begin = None if self.zero is None else self.zero + self.window.first
        if begin is None or self.end > begin:
            self._pieces.append((time, samples))
        if begin is not None:
            most = Fraction(self.window.most_samples(self._rate), self._rate)
            self.done = self.end > begin + most + MARGIN
        elif self.end - self.first > MOST_BEFORE_PICTURE:
            raise RequestError(
                self.field, f"shows no picture in the first {MOST_BEFORE_PICTURE} s of its sound; give it as kind audio"
            )

    def _at_most_stereo(self, frame: Any) -> NDArray[np.float32]:
        import av

        channels = frame.layout.nb_channels
        if channels <= 2:
            return samples_of(frame)
        # FFmpeg gives channels without named places those that are usual for their number
        places = "without named places" if frame.layout.name == f"{channels} channels" else frame.layout.name
        found = f"its {channels} channels of sound ({places})"
        if self._mixer is None:
            from av.audio.resampler import AudioResampler

            # FFmpeg's downmix, scaled so that full scale on every channel stays full scale
            self._mixer = AudioResampler(format="fltp", layout="stereo", options={"rematrix_maxval": "1.0"})
            self._mixed = f"{self.field}: {found} are mixed to stereo"
        try:
            return np.concatenate([samples_of(part) for part in self._mixer.resample(frame)], axis=1)
        except av.FFmpegError:
            raise RequestError(self.field, f"{found} have no known mix to stereo; mix them, and give that") from None
        except ValueError:
            raise RequestError(self.field, MIDWAY) from None

    def _without_padding(self, time: Fraction, samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        """Drop what an encoder added to fill its last block, as an MP4's declared length tells."""
        if self.stream.duration is None or "mp4" not in self.stream.container.format.name:
            return samples
        end = ((self.stream.start_time or 0) + self.stream.duration) * self.stream.time_base
        left = round((end - time) * rate)
        return samples[:, :left] if 0 < left < samples.shape[1] else samples

    def sound(self, zero: Fraction) -> Sound | None:
        """The asked part, its sample 0 at `zero` plus the window's start; gaps are silence. None without samples."""
        rate, most = self._rate, self.window.most_samples(self._rate) if self._rate else 0
        parts, filled, reached = self._in_order(zero, most)
        whole = np.concatenate(parts, axis=1)[:, :most] if parts else np.zeros((1, 0), np.float32)
        if whole.shape[1] == 0 or filled >= whole.shape[1]:
            return None
        check_level(whole, self.field)
        over = reached > most and self.window.bounded_by_limit(rate)
        notes: tuple[str, ...] = (self._mixed,) if self._mixed else ()
        if filled:
            notes += (f"{self.field}: {filled / rate:.3f} s of silence filled in its sound",)
        early = Fraction(0) if self.first is None else zero - self.first
        if early > EARLY_SOUND and not self.window.first:
            notes += (f"{self.field}: {float(early):.2f} s of sound before its first picture are left out",)
        notes += self.window.sound_notes(self.field, whole.shape[1], rate, over)
        return Sound(np.ascontiguousarray(whole), rate, over, notes)

    def _in_order(self, zero: Fraction, most: int) -> tuple[list[NDArray[np.float32]], int, int]:
        """(pieces end to end from the window's start, samples of silence among them, where the last one ends)."""
        rate, slack = self._rate, int(SLACK * self._rate)
        first = self.window.first_sample(rate) if rate else 0
        parts: list[NDArray[np.float32]] = []
        filled, cursor, expected = 0, 0, None
        for time, samples in self._pieces:
            at = round((time - zero) * rate) - first
            if expected is not None and abs(at - expected) <= slack:
                at = expected
            expected = at + samples.shape[1]
            if expected <= cursor:
                continue
            if at > cursor:
                parts.append(np.zeros((samples.shape[0], min(at, most) - min(cursor, most)), np.float32))
                filled += parts[-1].shape[1]
            parts.append(samples[:, max(0, cursor - at) :])
            cursor = expected
        return parts, filled, cursor


def check_rate(rate: int, field: str) -> int:
    """`rate`, or RequestError when it is none that sound is read at."""
    low, high = RATES
    if not low <= rate <= high:
        nearest = min(max(rate, low), high)
        raise RequestError(
            field, f"has {rate:,} samples per second; from {low:,} to {high:,}, so convert it to {nearest:,}"
        )
    return rate


def check_level(samples: NDArray[np.floating[Any]], field: str) -> None:
    """Refuse samples that are no waveform of full scale 1: NaN, infinities, or another scale."""
    if samples.size and not np.abs(samples).max() <= LOUDEST:
        raise RequestError(
            field,
            f"holds samples that are not finite or far beyond 1; finite floats of full scale 1, none beyond {LOUDEST:g}, "
            "are needed",
        )


def samples_of(frame: Any) -> NDArray[np.float32]:
    """float32 `[c, n]` in [-1, 1] of a decoded frame of any sample format; integers are divided by their full scale."""
    data = frame.to_ndarray()
    if frame.format.is_packed:
        data = data.reshape(-1, frame.layout.nb_channels).T
    if data.dtype == np.uint8:
        return (data.astype(np.float32) - 128.0) / 128.0
    if np.issubdtype(data.dtype, np.integer):
        return (data / -float(np.iinfo(data.dtype).min)).astype(np.float32)
    return data.astype(np.float32)
