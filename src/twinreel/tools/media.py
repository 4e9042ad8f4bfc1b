"""Finished files as they come out of a player: frames one by one, sound, start times, the report beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..media.addresses import MEDIA, open_address
from ..media.containers import open_container
from ..media.soundtrack import samples_of
from ..media.whole import check_size
from ..output.report import hash_file, sidecar_path
from ..small_files import read_small_json
from ..spec import FPS


@dataclass(frozen=True)
class MediaFile:
    """A video file: start times in seconds (None where a stream is absent), sound and its rate, frames a second (0 where
    there is no such stream), and the hashes its report states."""

    path: Path
    field: str
    video_start: float | None
    audio_start: float | None
    waveform: NDArray[np.float32]
    rate: int
    fps: float
    sha256: dict[str, str]

    def frames(self) -> Iterator[NDArray[np.uint8]]:
        """Decoded frames, uint8 RGB `[H, W, 3]`, in order of presentation; nothing where there is no picture.

        Raises RequestError (`field`) for a file that does not decode to its end.
        """
        if self.video_start is None:
            return
        from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

        convert, spaces = VideoReformatter().reformat, {int(space): space for space in Colorspace}
        exact = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
        with _opened(self.path, self.field) as container:
            for frame in container.decode(video=0):
                image = convert(
                    frame, format="rgb24", dst_color_range=ColorRange.JPEG,
                    src_colorspace=spaces.get(int(frame.colorspace), Colorspace.ITU709),
                    interpolation=exact, threads=1,
                )  # fmt: skip
                yield np.asarray(image.to_ndarray(), np.uint8)


def read_media_file(path: Path, field: str) -> MediaFile:
    """Open `path`, decode its sound, and look at the report beside it. Raises RequestError."""
    with _opened(path, field) as container:
        video = container.streams.video[0] if container.streams.video else None
        audio = container.streams.audio[0] if container.streams.audio else None
        if any(stream is not None and stream.codec_context is None for stream in (video, audio)):
            raise RequestError(field, f"{path} is of a codec that is not known; convert it to H.264 and AAC")
        parts = [samples_of(frame) for frame in container.decode(audio)] if audio is not None else []
        starts = [_start(stream) for stream in (video, audio)]
        rate = audio.rate if audio is not None else 0
        fps = float(video.average_rate or video.guessed_rate or FPS) if video is not None else 0.0
    if len({len(part) for part in parts}) > 1:
        raise RequestError(field, f"{path} changes its channels midway; convert its sound to one format")
    waveform = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), np.float32)
    if len(waveform) == 1:
        waveform = np.repeat(waveform, 2, axis=0)
    return MediaFile(path, field, starts[0], starts[1], waveform, rate, fps, _hashes(path))


@contextmanager
def _opened(path: Path, field: str) -> Iterator[Any]:
    """PyAV's container of a file that is all there, by the demuxer that its first bytes name: no script opens others."""
    opened = open_address(path.absolute(), field)
    with opened.stream:
        if opened.family != MEDIA:
            raise RequestError(
                field, f"{path} is {opened.what}; compare reads videos and sounds, as generate writes them"
            )
        check_size(opened, field)
        with open_container(opened, field) as container:
            yield container


def _start(stream: Any) -> float | None:
    """Seconds at which a stream begins."""
    return None if stream is None else float((stream.start_time or 0) * stream.time_base)


def _hashes(path: Path) -> dict[str, str]:
    """The file's own hash, and frames' and waveform's from the report beside it when that is this file's report."""
    own = hash_file(path)
    report = read_report(sidecar_path(path))
    stated = report.get("sha256", {}) if report else {}
    return {**stated, "file": own} if stated.get("file") == own else {"file": own}


def read_report(path: Path) -> dict[str, Any] | None:
    """A run's report, or None when `path` is none."""
    try:
        data = read_small_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("sha256"), dict) else None
