"""Memory of this machine, asked of the system and the driver: no torch, so that planning stays quick."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")  # a container's own


@dataclass(frozen=True)
class Memory:
    """Bytes of one memory: all of it, and what is free now. Where nobody says what is free, `told` is False and all of it
    counts as free."""

    total: int
    free: int
    told: bool = True


@dataclass(frozen=True)
class Card(Memory):
    """The memory of a CUDA device, and the device's name."""

    name: str = ""


def host_memory() -> Memory | None:
    """The host's memory; None where the system does not tell. A container's limit counts where there is one."""
    try:
        facts = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free, told = int(facts["MemTotal"]) << 10, int(facts["MemAvailable"]) << 10, True
    except (OSError, KeyError):
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        if not all(name in getattr(os, "sysconf_names", {}) for name in names):
            return None
        total = free = os.sysconf(names[0]) * os.sysconf(names[1])
        told = False
    try:
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        kinds = dict(re.findall(r"^(\w+) (\d+)$", (GROUP / "memory.stat").read_text(), re.MULTILINE))
        used -= int(kinds["active_file"]) + int(kinds["inactive_file"])  # cached files, which make room
    except (OSError, ValueError, KeyError):  # no group, or "max": no limit
        return Memory(total, free, told)
    return Memory(min(total, limit), min(free, max(0, limit - used)), told)


def cuda_memory() -> Sequence[Card]:
    """The memory of every NVIDIA device that CUDA shows this process, in CUDA's order; none without a driver or with a
    torch built for CPUs. Opens no context."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return ()
        cuda = ctypes.CDLL("libcuda.so.1")
    except (OSError, metadata.PackageNotFoundError):
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    # Which devices there are is CUDA's to say (CUDA_VISIBLE_DEVICES), what is free without a context NVML's.
    nvml = _nvml()
    found = [_card(cuda, nvml, number) for number in range(count.value)]
    if nvml is not None:
        nvml.nvmlShutdown()
    return found


def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


def _card(cuda: ctypes.CDLL, nvml: ctypes.CDLL | None, number: int) -> Card:
    """Device `number`, which is also what the driver's interface takes for a device."""
    name, bus, total = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 256, number)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), number)
    named, device, facts = name.value.decode(errors="replace"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    refused = (
        nvml is None
        or cuda.cuDeviceGetPCIBusId(bus, 32, number)
        or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
        or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(facts))  # not on every kind of device, nor to everybody
    )
    # of a part of a card (MIG) NVML may tell the whole
    if refused or not facts[0] or facts[0] > 1.25 * total.value > 0:
        return Card(total.value, total.value, told=False, name=named)
    return Card(facts[0], facts[1], name=named)
