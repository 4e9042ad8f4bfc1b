"""What this machine is and what an engine would choose on it. No weight is loaded."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from .config import EngineConfig


def examine(config: EngineConfig) -> dict[str, Any]:
    """Machine, library versions, and `Engine.describe()` for `config`. Raises ConfigError or CheckpointError."""
    from .engine import Engine
    from .report import versions

    return {"machine": machine(), "versions": versions(), "choices": Engine(config).describe()}


def machine() -> dict[str, Any]:
    """Processor, memory and CUDA devices with their free memory."""
    import torch

    facts: dict[str, Any] = {"platform": platform.platform(), "cpus": os.cpu_count()}
    if sys.platform == "linux":
        facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    facts["cuda"] = torch.version.cuda or "this build of torch is for CPUs"
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        facts[f"cuda:{number}"] = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return facts
