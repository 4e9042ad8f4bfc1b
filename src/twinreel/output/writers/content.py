"""What goes into a file, and what is known of it once it has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from .. import OutputOptions
from ..report import FrameHasher, hash_waveform


class Content:
    """Clips on their way into a file, counted and hashed, and the sound that goes with them.

    Args:
        clips: uint8 `[f, H, W, 3]` in order, any f.
        waveform: float32 `[2, n]` at 32 kHz, channel 0 left, or None.
        output: the options of the writer.
        expected: number of frames, for formats that say it first; None when nobody knows.
        most: frames after which clips are cut off, and no more are taken.
    """

    def __init__(
        self,
        clips: Iterable[NDArray[np.uint8]],
        waveform: NDArray[np.float32] | None,
        output: OutputOptions,
        *,
        expected: int | None = None,
        most: int | None = None,
    ) -> None:
        self.waveform, self.output, self.expected = waveform, output, expected
        self.size: tuple[int, int] | None = None  # (width, height), from the first clip
        self._clips, self._most, self._hasher = clips, most, FrameHasher()

    @property
    def frames(self) -> int:
        """Frames that have passed."""
        return self._hasher.frames

    @property
    def hash(self) -> str:
        """SHA-256 of the frames that have passed."""
        return self._hasher.hexdigest()

    def samples(self) -> NDArray[np.float32]:
        """The sound, of a content that has one."""
        assert self.waveform is not None
        return self.waveform

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        """Every frame, uint8 `[H, W, 3]`, in order. Raises ValueError for a change of size or when there is none."""
        for clip in self._hasher.through(self._cut()):
            yield from clip
        if not self.frames:
            raise ValueError("no frames to write")

    def hashes(self) -> dict[str, str]:
        """SHA-256 of raw frames and waveform, of those that were written."""
        found = {"frames": self.hash} if self.frames else {}
        return found if self.waveform is None else found | {"waveform": hash_waveform(self.waveform)}

    def _cut(self) -> Iterator[NDArray[np.uint8]]:
        for clip in self._clips:
            if clip.ndim != 4 or clip.shape[3] != 3 or clip.dtype != np.uint8:
                raise ValueError(f"clip {clip.dtype} {list(clip.shape)}; uint8 [f, H, W, 3] is needed")
            width, height = self.size = self.size or (clip.shape[2], clip.shape[1])
            if clip.shape[1:3] != (height, width):
                raise ValueError(f"clip {list(clip.shape)}; [f, {height}, {width}, 3] is needed")
            left = len(clip) if self._most is None else self._most - self.frames
            yield clip[:left]
            if left <= len(clip) and self._most is not None:
                return


def hash_pictures(pictures: Iterable[NDArray[np.uint8]]) -> tuple[int, str]:
    """Count and SHA-256 of frames as read back."""
    sha, count = hashlib.sha256(), 0
    for picture in pictures:
        sha.update(np.ascontiguousarray(picture).data)
        count += 1
    return count, sha.hexdigest()
