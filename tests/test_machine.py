"""What the drivers say of the cards, by drivers that are made up: in CUDA's order, and unknown where they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from twinreel import machine
from twinreel.machine import Card, Memory, cuda_memory, host_memory

GIB = 1 << 30
CARDS = {b"0000:41:00.0": (80 * GIB, 70 * GIB), b"0000:01:00.0": (24 * GIB, 3 * GIB)}  # total and free, in CUDA's order
NOT_SUPPORTED, NO_PERMISSION = 3, 4


class Cuda:
    """`libcuda`: two cards, and no context on any."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(CARDS)
        return 0

    def cuDeviceGetName(self, name: Any, size: int, number: int) -> int:
        name.value = b"card %d" % number
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, number: int) -> int:
        total._obj.value = list(CARDS.values())[number][0]
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, size: int, number: int) -> int:
        bus.value = list(CARDS)[number]
        return 0


class Nvml:
    """`libnvidia-ml`, which counts in another order and fails with `codes` by function."""

    def __init__(self, codes: dict[str, int]) -> None:
        self._codes = codes

    def nvmlInit_v2(self) -> int:
        return self._codes.get("init", 0)

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, device: Any) -> int:
        device._obj.value = 1 + sorted(CARDS).index(bus.value)
        return self._codes.get("handle", 0)

    def nvmlDeviceGetMemoryInfo(self, device: Any, facts: Any) -> int:
        code = self._codes.get("memory", 0)
        if code == 0:
            facts._obj[:2] = CARDS[sorted(CARDS)[device.value - 1]]
        return max(0, code)


class Whole(Nvml):
    """Tells of a part of a card what the whole of it has."""

    def nvmlDeviceGetMemoryInfo(self, device: Any, facts: Any) -> int:
        facts._obj[:2] = (180 * GIB, 170 * GIB)
        return 0


def drivers(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    libraries = {"libcuda.so.1": Cuda(), "libnvidia-ml.so.1": nvml}

    def library(name: str) -> object:
        if libraries[name] is None:
            raise OSError(name)
        return libraries[name]

    monkeypatch.setattr(machine.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(machine.ctypes, "CDLL", library)


def test_cards_come_in_the_order_of_cuda_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers(monkeypatch, Nvml({}))
    assert list(cuda_memory()) == [
        Card(80 * GIB, 70 * GIB, name="card 0"),
        Card(24 * GIB, 3 * GIB, name="card 1"),
    ]


@pytest.mark.parametrize(
    "nvml",
    [
        None, Nvml({"init": NO_PERMISSION}), Nvml({"handle": NO_PERMISSION}), Nvml({"memory": NOT_SUPPORTED}),
        Nvml({"memory": -1}),  # no error, and zeros
        Whole({}),
    ],
    ids=["absent", "refused", "no handle", "not supported", "zero", "a part"],
)  # fmt: skip
def test_what_the_driver_does_not_say_is_not_taken_for_nothing(
    nvml: Nvml | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers(monkeypatch, nvml)
    wanted = [(total, total, False, f"card {number}") for number, (total, _) in enumerate(CARDS.values())]
    assert [(card.total, card.free, card.told, card.name) for card in cuda_memory()] == wanted


def test_a_torch_for_cpus_has_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers(monkeypatch, Nvml({}))
    monkeypatch.setattr(machine.metadata, "version", lambda name: "2.13.0+cpu")
    assert not cuda_memory()


def test_a_host_that_tells_only_all_of_its_memory_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    there = host_memory()
    assert there is not None and there.told
    monkeypatch.setattr(machine.Path, "read_text", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    silent = host_memory()
    assert silent is not None and silent == Memory(silent.total, silent.total, told=False)
