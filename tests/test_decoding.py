"""Sound in a thread and on a stream of its own, on a device that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Timer

import numpy as np
import pytest
import torch

from twinreel import decoding
from twinreel.decoding import Waveform
from twinreel.errors import Cancelled


def test_all_sounds_of_a_device_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator keeps what was freed for the stream on which it was used."""
    told: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = f"side of {device}"
            told.append(f"new {self.name}")

        def wait_stream(self, main: str) -> None:
            told.append(f"waits for {main}")

    @contextmanager
    def within(what: object) -> Iterator[None]:
        told.append(f"in {getattr(what, 'name', what)}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"main of {device}")
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "stream", within)
    decoding._side_stream.cache_clear()
    try:
        for number in (0, 1, 0, 1):
            made = Waveform(lambda: np.zeros((2, 0), np.float32), torch.device("cuda", number), apart=True)
            assert made.runs and made.get().shape == (2, 0)
    finally:
        decoding._side_stream.cache_clear()
    turns = [
        [f"in cuda:{n}", f"new side of cuda:{n}", f"waits for main of cuda:{n}", f"in side of cuda:{n}"] for n in (0, 1)
    ]
    again = [[word for word in turn if not word.startswith("new")] for turn in turns]
    assert told == sum(turns + again, [])


def test_a_sound_nobody_asks_for_ends_before_what_it_works_with_goes() -> None:
    told: list[str] = []
    begun, may_end = Event(), Event()

    def work() -> np.ndarray:
        begun.set()
        assert may_end.wait(60)
        told.append("the sound has ended")
        return np.zeros((2, 0), np.float32)

    with pytest.raises(Cancelled), closing(Waveform(work, torch.device("cpu"), apart=True)):
        assert begun.wait(60)
        Timer(0.1, may_end.set).start()
        raise Cancelled("in the first clip")
    assert told == ["the sound has ended"]
