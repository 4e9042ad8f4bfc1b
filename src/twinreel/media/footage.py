"""Decoded video frames on their way to the 24 fps slots: when they show, which way up, deinterlaced, in RGB."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..spec import FPS, Spec
from .slots import FrameSlots, Window

MOST_PIXELS = 2**26  # of one video frame: 8192 x 8192
# Untagged video is BT.709 from these sizes on and BT.601 below, as players take it.
HD_WIDTH, HD_HEIGHT = 1280, 577
STILL = 0.5  # seconds between frames from which on a gap is told: a file may have lost what was there
HDR = {16: "PQ", 18: "HLG"}  # transfer curves, by their ITU-T H.273 number
# motion-adaptive; a frame for a frame, only of those marked as interlaced
DEINTERLACER = ("bwdif", "mode=send_frame:parity=auto:deint=interlaced")


class Footage:
    """Takes decoded frames in display order and puts them on `FrameSlots`.

    `by_packets` is for a container without presentation times (AVI): the frame shown n-th has the n-th packet's place.
    """

    def __init__(self, stream: Any, field: str, spec: Spec, window: Window, by_packets: bool = False) -> None:
        self.stream, self.field, self.spec, self.window = stream, field, spec, window
        self.slots: FrameSlots | None = None
        self.zero: Fraction | None = None
        self.landed: Fraction | None = None
        self.end = Fraction(0)
        self._last = Fraction(0)
        self._filled = False  # whether `end` is the end of a frame taken since the last restart
        self._found: dict[str, None] = {}
        self._places: deque[int] | None = deque() if by_packets else None
        self._size = (0, 0)
        self._matrix = (1, 0, 0, 1)
        self._filter: Any = None
        self._filter_form: tuple[int, int, str] | None = None
        self._times: deque[Fraction] = deque()

    @property
    def done(self) -> bool:
        """Whether nothing more will be taken."""
        return self.slots is not None and self.slots.full

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found in the frames that changes how they look, in words."""
        return tuple(f"{self.field}: {words}" for words in self._found)

    def restart(self) -> None:
        """Forget what was taken, and keep the zero and the shape: the file is read on from another place."""
        if self.slots is not None:
            self.slots.restart()
        self.landed, self._filter, self._filled = None, None, False
        self._times.clear()
        if self._places is not None:
            self._places.clear()

    def wants(self, packet: Any) -> bool:
        """Whether `packet` need be decoded. In decode order, every one up to the last shown."""
        if self.done:
            return False
        if self._places is not None and packet.dts is not None:
            self._places.append(packet.dts)
        return True

    def take(self, frame: Any) -> None:
        """The next decoded frame. Raises RequestError for one that is too large or of a shape that is not allowed."""
        check_frame_size(frame.width, frame.height, self.field)
        time = self._time(frame)
        if self.slots is None:
            self.zero, self.slots = time, self._open_slots(frame)
            self._size = (frame.width, frame.height)
        self.landed = time if self.landed is None else self.landed
        self._last = time
        if (frame.width, frame.height) != self._size:
            self._found["changes its size midway, and is brought to the first frame's shape"] = None
        if self._filled and time - self.end > STILL:
            at, gap = float(self.end - (self.zero or 0)), float(time - self.end)
            self._found[f"holds no frame for {gap:.2f} s after {at:.2f} s, the one before is shown"] = None
        self._filled = True
        rate = self.stream.average_rate or self.stream.guessed_rate or FPS
        known = frame.duration and self._places is None
        self.end = time + (frame.duration * frame.time_base if known else 1 / Fraction(rate))
        if frame.interlaced_frame or self._filter is not None:
            self._found["interlaced, and deinterlaced"] = None
            self._times.append(time)
            for whole in self._deinterlaced(frame):
                self._put(whole, self._times.popleft())
        else:
            self._put(frame, time)

    def close(self) -> None:
        """No frame follows."""
        assert self.slots is not None and self.zero is not None
        for whole in self._flushed():
            self._put(whole, self._times.popleft())
        self.slots.close((self.end - self.zero) * FPS)

    def _time(self, frame: Any) -> Fraction:
        if self._places:
            return Fraction(self._places.popleft() * self.stream.time_base)
        if frame.pts is None:
            return self.end
        time = Fraction(frame.pts * frame.time_base)
        if self.landed is None or time > self._last:
            return time
        # an MPEG program stream gives its last two frames one time; a joined stream begins again from zero
        if time < self._last:
            self._found["holds frames whose times run backwards, and are counted on from the frame before"] = None
        return self.end

    def _put(self, frame: Any, time: Fraction) -> None:
        assert self.slots is not None
        self.slots.put((time - (self.zero or 0)) * FPS, lambda: upright(self._rgb(frame), self._matrix))

    def _open_slots(self, frame: Any) -> FrameSlots:
        side_data = frame.side_data.get("DISPLAYMATRIX")
        if side_data is not None:
            m = np.frombuffer(side_data, "<i4")
            self._matrix = (int(m[0]), int(m[1]), int(m[3]), int(m[4]))
        if self._matrix[0] and self._matrix[1]:
            self._found["turned by an angle that is no quarter of a circle, and brought to the nearest"] = None
        aspect = Fraction(self.stream.sample_aspect_ratio or 1)
        width, height = frame.width, frame.height
        if _swaps_axes(self._matrix):
            width, height, aspect = height, width, 1 / aspect
        if frame.color_trc in HDR:
            self._found[f"HDR ({HDR[frame.color_trc]}), read without tone mapping: its colours may look flat"] = None
        if any(component.is_alpha for component in frame.format.components):
            self._found["has transparency, which is left out"] = None
        return FrameSlots(width, height, self.field, self.spec, self.window, pixel_aspect=aspect)

    # --- interlaced ---------------------------------------------------------------------------------------------------

    def _deinterlaced(self, frame: Any) -> Iterator[Any]:
        form = (frame.width, frame.height, frame.format.name)
        if self._filter is None or form != self._filter_form:
            yield from self._flushed()
            self._filter, self._filter_form = _deinterlacer(frame), form
        self._filter.push(frame)
        yield from _pulled(self._filter)

    def _flushed(self) -> Iterator[Any]:
        if self._filter is not None:
            self._filter.push(None)
            yield from _pulled(self._filter)
            self._filter = None

    # --- colour -------------------------------------------------------------------------------------------------------

    def _rgb(self, frame: Any) -> NDArray[np.uint8]:
        from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

        # full chroma and accurate rounding: the short-cut kernels are off by up to two levels on flat colours
        quality = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
        full = frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj") or frame.format.is_rgb
        # one of its own for each frame: several are converted side by side
        image = VideoReformatter().reformat(
            frame,
            format="rgb24",
            src_colorspace=None if frame.format.is_rgb else _colorspace(frame),
            src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
            dst_color_range=ColorRange.JPEG,
            interpolation=quality,
            threads=1,
        )
        return np.asarray(image.to_ndarray(), np.uint8)


def _colorspace(frame: Any) -> Any:
    """The matrix that the frame names (ITU-T H.273 numbers), or the one its size suggests."""
    from av.video.reformatter import Colorspace as Space

    named = {1: Space.ITU709, 4: Space.FCC, 5: Space.ITU601, 6: Space.ITU601, 7: Space.SMPTE240M}
    named |= {9: Space.BT2020, 10: Space.BT2020}
    hd = frame.width >= HD_WIDTH or frame.height >= HD_HEIGHT
    return named.get(int(frame.colorspace), Space.ITU709 if hd else Space.ITU601)


def _deinterlacer(frame: Any) -> Any:
    from av.filter import Graph

    graph = Graph()
    graph.threads = 1
    source = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base)
    middle, sink = graph.add(*DEINTERLACER), graph.add("buffersink")
    source.link_to(middle)
    middle.link_to(sink)
    graph.configure()
    return graph


def _pulled(graph: Any) -> Iterator[Any]:
    while True:
        try:
            frame = graph.pull()
        except (BlockingIOError, EOFError):
            return
        yield frame


def check_frame_size(width: int, height: int, field: str) -> None:
    """Refuse a video whose frames are larger than is ever decoded."""
    if width * height > MOST_PIXELS:
        raise RequestError(field, f"has frames of {width}x{height}; at most {MOST_PIXELS:,} pixels, so scale it down")


def upright(pixels: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """`pixels` under the display matrix (a, b, c, d), which shows (x, y) at (ax + cy, bx + dy): turns and flips."""
    a, b, c, d = matrix
    if _swaps_axes(matrix):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _swaps_axes(matrix: tuple[int, int, int, int]) -> bool:
    return abs(matrix[1]) > abs(matrix[0])
