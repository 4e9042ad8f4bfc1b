"""Clips on their way to the host: order, bits, whose memory, and errors, with a copy that comes in late as on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from interrupted import T2VA
from twinreel import Engine
from twinreel.media import landing
from twinreel.media.landing import Arrays, Tensors, land

COUNT = 5


class Late:
    """A `Side` of a device that copies at the last moment, into the older of two runs of host memory."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[str] = []
        self._fails, self._runs, self._sent = fails, [dict[int, Tensor](), dict[int, Tensor]()], 0

    def tell(self, what: str, number: int) -> None:
        self.told.append(f"{what} {number}")
        if self.told[-1] == self._fails:
            raise MemoryError(self._fails)

    def make(self) -> Iterator[Tensors]:
        for number in range(COUNT):
            self.tell("make", number)
            yield torch.full((2, 3, 4, 3), number, dtype=torch.uint8), torch.tensor(number)

    def send(self, tensors: Tensors) -> Callable[[], Arrays]:
        number, self._sent = self._sent, self._sent + 1
        self.tell("send", number)

        def arrive() -> Arrays:
            self.tell("arrive", number)
            run = self._runs[number % 2]
            run.update({i: run.get(i, torch.empty_like(x)).resize_(x.shape).copy_(x) for i, x in enumerate(tensors)})
            return tuple(run[i].numpy().copy() for i in range(len(tensors)))

        return arrive


def numbers(items: list[Arrays]) -> list[int]:
    """What each item is, all of whose values say so."""
    for pixels, number in items:
        assert pixels.dtype == np.uint8 and (pixels == number).all()
    return [int(number) for _, number in items]


def test_on_a_cpu_nothing_is_copied_and_nothing_is_ahead() -> None:
    late, given = Late(), list[Tensor]()

    def make() -> Iterator[Tensors]:
        for tensors in late.make():
            given.append(tensors[0])
            yield tensors

    landed, taken = land(make()), list[Arrays]()
    for item in landed:
        taken.append(item)
        assert late.told == [f"make {number}" for number in range(len(taken))]
        assert item[0].ctypes.data == given[-1].data_ptr()
    assert numbers(taken) == list(range(COUNT))


def test_the_next_is_on_its_way_before_one_is_waited_for_and_none_is_overwritten() -> None:
    late = Late()
    taken = list(land(late.make(), late.send))
    assert numbers(taken) == list(range(COUNT))
    expected = ["make 0", "send 0"]
    for number in range(1, COUNT):
        expected += [f"make {number}", f"send {number}", f"arrive {number - 1}"]
    assert late.told == [*expected, f"arrive {COUNT - 1}"]


@pytest.mark.parametrize(
    ("fails", "come"),
    [("make 0", 0), ("make 1", 1), ("make 3", 3), ("send 0", 0), ("send 3", 3), ("arrive 0", 0), ("arrive 3", 3),
     (f"arrive {COUNT - 1}", COUNT - 1)],
)  # fmt: skip
def test_all_before_an_error_come_first(fails: str, come: int) -> None:
    late, taken = Late(fails), list[Arrays]()
    with pytest.raises(MemoryError, match=fails):
        for item in land(late.make(), late.send):
            taken.append(item)
    assert numbers(taken) == list(range(come))


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_ends_a_run_does_not_wait(error: type[BaseException]) -> None:
    late = Late()

    def make() -> Iterator[Tensors]:
        yield next(late.make())
        raise error

    with pytest.raises(error):
        next(land(make(), late.send))
    assert late.told == ["make 0", "send 0"]


def test_a_decode_is_the_same_with_a_clip_on_its_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames, their boundaries, and the clip that a retry begins with."""
    request = replace(T2VA, duration=2.0)
    calm = engine.generate(request)
    monkeypatch.setattr(landing, "Side", Late)
    parts: list[int] = []

    def boundary(name: str, values: object, part: int = 0, parts_of: int = 1) -> None:
        if name == "frames":
            parts.append(part)

    seen = engine.generate(request, boundary=boundary)
    assert seen.report["sha256"] == calm.report["sha256"] and parts == list(range(len(parts))) and len(parts) > 2
    runs: list[int] = []

    def hook(module: object, inputs: object) -> None:
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    handle = engine.parts["video_decoder"].decoder.register_forward_pre_hook(hook)
    again = engine.generate(request)
    handle.remove()
    assert again.report["decode"]["retries"][0]["at"] == "clip 1"
    assert again.report["sha256"] == calm.report["sha256"] and np.array_equal(again.video, calm.video)
