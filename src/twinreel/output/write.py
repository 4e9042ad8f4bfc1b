"""Frames and sound into one file: streamed, the same bytes every run, read back before it gets its name (SPEC 10)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..limits import ENCODED_PIXELS, ENCODED_SIDES, SHORTEST_SOUND, check_number, counted, shown
from ..spec import FPS, SAMPLE_RATE
from . import CONTAINERS, FORMATS, OutputOptions, check_options, check_output
from .placing import place_output, unfinished
from .report import hash_file, without_private, write_report
from .writers import Content, read_back, write_content
from .writers.container import encoder_settings

FULL_SCALE = 0.999  # of a clamped sample
FULL_SHARE = 0.5  # of the samples: speech and music touch full scale, they do not stay there


@dataclass(frozen=True)
class Written:
    """A finished file: frames, samples per channel, SHA-256 of raw frames, waveform and file, faults of the sound."""

    path: Path
    frames: int
    samples: int
    sha256: dict[str, str]
    faults: tuple[str, ...] = ()

    def facts(self, output: OutputOptions) -> dict[str, Any]:
        """What the report says of the file."""
        suffix = self.path.suffix.lower()
        settings = encoder_settings(suffix, output) if suffix in CONTAINERS else {}
        seconds = {"picture": self.frames / FPS, "sound": self.samples / SAMPLE_RATE}
        return {
            "written": {"frames": self.frames, "samples": self.samples, "seconds": seconds},
            "encoder": {"format": FORMATS[suffix], **settings},
            "sha256": self.sha256,
            "faults": list(self.faults),
        }


@dataclass(frozen=True, eq=False)
class Media:
    """A finished generation.

    Args:
        video: uint8 `[F, H, W, 3]` at 24 fps.
        audio: float32 `[2, n]` at 32 kHz, channel 0 left.
        report: how it was made, as plain JSON values.
    """

    video: NDArray[np.uint8]
    audio: NDArray[np.float32]
    report: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str], output: OutputOptions | None = None, **changes: Any) -> Path:
        """Write the file and its JSON report beside it, the same bytes as the command line. Returns the file's path.

        `changes` are fields of `output`, such as `crf=30` or `overwrite=True`. Raises RequestError for a path that
        cannot be written as asked, and for values that are no frames, no sound or no JSON (`video`, `audio`, `report`).
        """
        output = OutputOptions() if output is None else output
        check_options(output)
        output = replace(output, **changes)
        target = check_output(path, output)
        _check_values(self, target, output)
        seconds = _asked_seconds(self.report) if output.exact_seconds else None
        clips = [self.video] if has_picture(target) else []
        written = write_media(target, clips, self.audio, output, frames=sum(map(len, clips)), seconds=seconds)
        target, replaces = written.path, output.overwrite and written.path == target
        report = {**self.report, **written.facts(output)}
        report = without_private(report, (str(target),)) if output.private else report
        write_report(target, report, overwrite=replaces)
        return target


def write_media(
    path: str | os.PathLike[str],
    clips: Iterable[NDArray[np.uint8]],
    waveform: NDArray[np.float32],
    output: OutputOptions | None = None,
    *,
    frames: int | None = None,
    seconds: float | None = None,
    ready: Callable[[], object] = lambda: None,
) -> Written:
    """Encode clips as they come, read the file back, and only then give it its name, which `Written.path` says.

    Args:
        path: the file; its ending is one of `output.FORMATS`, its folder must exist. What is there is replaced where
            `output.overwrite` says so; otherwise the file gets the next number that is free, such as `out-2.mp4`.
        clips: uint8 `[f, H, W, 3]` in order, any f; both sides even. Not taken for a file of sound alone.
        waveform: float32 `[2, n]` in [-1, 1] at 32 kHz, channel 0 left. Values that are not finite are written as
            silence and reported as a fault.
        frames: how many frames the clips hold; needed for `.npz`.
        seconds: cut picture and sound to this length.
        ready: called before the file gets its name; what it raises leaves none.

    Raises ValueError for clips or a waveform of another shape, OSError for a disk that refuses or a file that does
    not read back as written; whatever happens, no partial file stays at `path`.
    """
    path, output = Path(path).absolute(), output or OutputOptions()
    suffix = path.suffix.lower()
    sound, faults = _sound(waveform) if output.audio else (None, ())
    most = None if seconds is None else round(seconds * FPS)
    if seconds is not None and sound is not None:
        sound = sound[:, : round(seconds * SAMPLE_RATE)]
    expected = frames if frames is None or most is None else min(frames, most)
    content = Content(clips, sound, output, expected=expected, most=most)
    with unfinished(path) as temporary:
        write_content(temporary, suffix, content)
        read_back(temporary, suffix, content)
        hashes = content.hashes()
        if suffix:
            hashes["file"] = hash_file(temporary)
        ready()
        path = place_output(temporary, path, output.overwrite)
    return Written(path, content.frames, 0 if sound is None else sound.shape[1], hashes, faults)


def has_picture(target: Path) -> bool:
    """Whether a file of that name holds frames."""
    return target.suffix.lower() != ".wav"


def _check_values(media: Media, target: Path, output: OutputOptions) -> None:
    """Refuse what the format of `target` cannot take; only what goes into it is looked at."""
    suffix = target.suffix.lower()
    if has_picture(target):
        video = media.video
        if getattr(video, "dtype", None) != np.uint8 or video.ndim != 4 or video.shape[3] != 3 or 0 in video.shape:
            raise RequestError("video", f"got {_form(video)}; uint8 [F, H, W, 3] is needed")
        if suffix in CONTAINERS:
            _check_sides(video, suffix)
    audio = media.audio
    if output.audio and (getattr(audio, "dtype", None) != np.float32 or audio.ndim != 2 or audio.shape[0] != 2):
        raise RequestError("audio", f"got {_form(audio)}; float32 [2, n] is needed, or audio=False")
    if output.audio and not audio.shape[1]:
        raise RequestError("audio", "holds no samples; give some, or leave the sound out by audio=False")
    if output.audio and audio.shape[1] < (least := SHORTEST_SOUND.get(suffix, 1)):
        held = counted(audio.shape[1], "sample")
        raise RequestError("audio", f"holds {held}, {suffix} takes {least} and more; write .mkv, or use audio=False")
    try:
        plain = isinstance(json.loads(json.dumps(media.report, allow_nan=False)), dict)
    except (TypeError, ValueError, RecursionError):
        plain = False
    if not plain:
        raise RequestError("report", f"got {shown(media.report)}; a dict of plain JSON values is needed, or none")


def _check_sides(video: NDArray[np.uint8], suffix: str) -> None:
    """Refuse pictures that no encoder of `suffix` takes. Raises RequestError (`video`)."""
    height, width = video.shape[1:3]
    sides, otherwise = ENCODED_SIDES[suffix], "or write .npz or frames"
    if height % 2 or width % 2:
        raise RequestError(
            "video", f"got {_form(video)}; {suffix} takes even sides, so cut a row or column, {otherwise}"
        )
    if height not in sides or width not in sides:
        raise RequestError(
            "video", f"got {_form(video)}, {suffix} takes sides of {sides}; make it smaller, {otherwise}"
        )
    if (height + 128) * (width + 128) > ENCODED_PIXELS:
        most = f"about {ENCODED_PIXELS / 1e6:.0f} million pixels a picture"
        raise RequestError("video", f"got {_form(video)}, {suffix} takes {most}; make it smaller, {otherwise}")


def _asked_seconds(report: Mapping[str, Any]) -> float:
    """The duration that a report says was asked for. Raises RequestError (`exact_seconds`)."""
    plan = report.get("plan")
    seconds = plan.get("asked_seconds") if isinstance(plan, Mapping) else None
    try:
        check_number("exact_seconds", seconds)
    except RequestError:
        raise RequestError("exact_seconds", "needs a report that says how many seconds were asked for") from None
    if round(seconds * FPS) < 1:  # type: ignore[operator]
        raise RequestError("exact_seconds", f"the report asks for {seconds} s, which is no frame; leave it out")
    return float(seconds)  # type: ignore[arg-type]


def _form(values: Any) -> str:
    """`uint8 [1, 2]` of an array, otherwise the type's name."""
    return f"{values.dtype} {list(values.shape)}" if hasattr(values, "dtype") else type(values).__name__


def _sound(waveform: NDArray[np.float32]) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """The waveform as it can be written, and what is wrong with it."""
    waveform = np.asarray(waveform)
    if waveform.ndim != 2 or waveform.shape[0] != 2 or waveform.dtype != np.float32:
        raise ValueError(f"waveform {waveform.dtype} {list(waveform.shape)}; float32 [2, n] is needed")
    finite = np.isfinite(waveform)
    if not finite.all():
        text = f"sound: {np.count_nonzero(~finite)} of {waveform.size} values are not finite and are written as silence"
        return np.where(finite, waveform, np.float32(0)), (text,)
    full = np.mean(np.abs(waveform) >= FULL_SCALE) if waveform.size else 0.0
    return waveform, ((f"sound: {full:.0%} of it is at full scale",) if full > FULL_SHARE else ())
