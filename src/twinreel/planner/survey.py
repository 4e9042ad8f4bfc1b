"""The size and length of media without decoding them: what `twinreel plan` looks at.

One frame is decoded for its shape, everything else is read off the packets' times; so a note about the content (colour,
gaps, damage) can be missing here and in the odd file a frame may be. `media.read.read_source` is what counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import RequestError
from ..limits import check_ratio
from ..media.addresses import MEDIA, Opened, open_address
from ..media.read import read_source
from ..media.slots import Window
from ..plan import canvas
from ..request import Keyframe, Reference
from ..sources import Clip, Sound, Source
from ..spec import FPS, Spec


def survey(item: Keyframe | Reference, spec: Spec, max_frames: int, where: str) -> Source:
    """What `read_source` gives for `item`, with pixels and samples that must not be looked at in clips and sounds."""
    timed = isinstance(item, Reference) and item.kind != "image" and isinstance(item.source, str | os.PathLike)
    if timed:
        assert isinstance(item, Reference)
        window = Window(item.start, item.end, max_frames, where)
        opened = open_address(item.source, f"{where}.source")
        with opened.stream:
            found = _measure(opened, item.kind, spec, window) if opened.family == MEDIA else None
        if found is not None:
            return found
    return read_source(item, spec, max_frames, where)  # in memory, a picture, or a file that only decoding explains


def _measure(opened: Opened, kind: str, spec: Spec, window: Window) -> Source | None:
    import av

    field = f"{window.where}.source"
    try:
        shape = None if kind == "audio" else _shape(opened, field)
        opened.stream.seek(0)
        with av.open(opened.stream, format=opened.demuxer, options={"protocol_whitelist": "none"}) as container:
            spans = _spans(container, shape is not None)
            rate = container.streams.audio[0].rate if container.streams.audio else 0
    except (av.FFmpegError, OSError, IndexError):
        return None
    sound, picture = spans.get("audio"), spans.get("video")
    zero = picture[0] if picture else sound[0] if sound else Fraction(0)
    track = _sound(sound, zero, rate, window) if sound and rate else None
    if shape is None:
        return track
    slots = math.floor((picture[1] - zero - window.first) * FPS + Fraction(1, 2)) if picture else 0
    if slots < 1 or (kind == "video_audio" and track is None):
        return None
    check_ratio(field, *shape)
    height, width = canvas(*shape, spec)
    frames = np.broadcast_to(np.uint8(0), (min(slots, window.asked_frames), height, width, 3))
    cut = slots > window.max_frames == window.asked_frames
    return Clip(frames, float(FPS), track, cut)


def _shape(opened: Opened, field: str) -> tuple[int, int]:
    """Width and height of the upright picture in square pixels, to scale."""
    import av

    opened.stream.seek(0)
    with av.open(opened.stream, "r", format=opened.demuxer, options={"protocol_whitelist": "none"}) as container:
        stream = _pictures(container)
        frame = next(container.decode(stream), None)
        if frame is None:
            raise RequestError(field, f"{opened.label} is {opened.what} without a frame that decodes; save it again")
        aspect = Fraction(stream.sample_aspect_ratio or 1)
        width, height = frame.width * aspect.numerator, frame.height * aspect.denominator
        turned = frame.side_data.get("DISPLAYMATRIX")
        if turned is not None:
            matrix = np.frombuffer(turned, "<i4")
            if abs(int(matrix[1])) > abs(int(matrix[0])):
                return height, width
        return width, height


def _pictures(container: Any) -> Any:
    from av.stream import Disposition

    return [s for s in container.streams.video if not s.disposition & Disposition.attached_pic][0]


def _spans(container: Any, pictures: bool) -> dict[str, tuple[Fraction, Fraction]]:
    """First and last moment of each stream in seconds, by its type."""
    streams = [_pictures(container)] if pictures else []
    streams += container.streams.audio[:1]
    spans: dict[str, tuple[Fraction, Fraction]] = {}
    for kind, begin, end in _times(container, streams):
        low, high = spans.get(kind, (begin, end))
        spans[kind] = min(low, begin), max(high, end)
    for stream in streams:
        declared = stream.duration
        if declared is not None and stream.type in spans and stream.start_time is not None:
            # an encoder fills its last block of sound; the declared length knows better
            stop = (stream.start_time + declared) * stream.time_base
            low, high = spans[stream.type]
            spans[stream.type] = low, min(high, stop) if stop > low else high
    return spans


def _times(container: Any, streams: list[Any]) -> Iterator[tuple[str, Fraction, Fraction]]:
    for packet in container.demux(streams):
        if packet.pts is None or packet.is_discard:
            continue
        begin = packet.pts * packet.time_base
        rate = packet.stream.average_rate if packet.stream.type == "video" else None
        length = packet.duration * packet.time_base if packet.duration else 1 / Fraction(rate or FPS)
        yield packet.stream.type, begin, begin + length


def _sound(span: tuple[Fraction, Fraction], zero: Fraction, rate: int, window: Window) -> Sound | None:
    count = round((span[1] - zero) * rate) - window.first_sample(rate)
    most = window.most_samples(rate)
    if count <= 0:
        return None
    samples = np.broadcast_to(np.float32(0), (2, min(count, most)))
    return Sound(samples, rate, count > most and window.bounded_by_limit(rate))
