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
    """Bytes of one memory: all of it, and what is free now."""

    total: int
    free: int


def host_memory() -> Memory | None:
    """The host's memory; None where the system does not tell. A container's limit counts where there is one."""
    try:
        facts = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = int(facts["MemTotal"]) << 10, int(facts["MemAvailable"]) << 10
    except (OSError, KeyError):
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        if not all(name in getattr(os, "sysconf_names", {}) for name in names):
            return None
        total = free = os.sysconf(names[0]) * os.sysconf(names[1])
    try:
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        kinds = dict(re.findall(r"^(\w+) (\d+)$", (GROUP / "memory.stat").read_text(), re.MULTILINE))
        used -= int(kinds["active_file"]) + int(kinds["inactive_file"])  # cached files, which make room
    except (OSError, ValueError, KeyError):  # no group, or "max": no limit
        return Memory(total, free)
    return Memory(min(total, limit), min(free, max(0, limit - used)))


def cuda_memory() -> Sequence[Memory]:
    """The memory of every NVIDIA device that CUDA shows this process, in CUDA's order; none without a driver or with a
    torch built for CPUs."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return ()
        # Which devices there are is CUDA's to say (CUDA_VISIBLE_DEVICES), what is free without a context NVML's.
        cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except (OSError, metadata.PackageNotFoundError):
        return ()
    count, found = ctypes.c_int(), []
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or nvml.nvmlInit_v2():
        return ()
    for number in range(count.value):
        device, facts, bus = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)(), ctypes.create_string_buffer(32)
        cuda.cuDeviceGetPCIBusId(bus, 32, number)  # a device of the driver's interface is its number
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device)):
            nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
        if device.value is not None:
            nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(facts))
        found.append(Memory(total=facts[0], free=facts[1]))
    nvml.nvmlShutdown()
    return found
