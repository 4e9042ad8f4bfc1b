"""Timing for benches: medians and spread, roofs of the same run, what the card was doing meanwhile."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.streamed import Streamed

MOST_RUNS, FEWEST_RUNS = 400, 3


def measure(
    function: Callable[[], object], device: torch.device, seconds: float, *, fewest: int = FEWEST_RUNS,
    warm_up: Callable[[], object] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Run `function` for about `seconds`, at most 400 times, after a warm-up: median, best and worst seconds of one run,
    and their number.

    A rate that holds for a second is the sustained one: cards lower their clocks at their power limit. With `fewest` 1
    a function that takes longer than `seconds` runs once, after `warm_up` in place of a run of its own.
    """
    (warm_up or function)()
    times = _runs(function, device, 1)
    count = max(fewest, min(MOST_RUNS, int(seconds / max(times[0], 1e-7))))
    if count > 1:
        times = sorted(_runs(function, device, count))
    return {"seconds": statistics.median(times), "best": times[0], "worst": times[-1], "runs": len(times)}


def _runs(function: Callable[[], object], device: torch.device, count: int) -> list[float]:
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            function()
            marks.append(time.perf_counter())
        return [after - before for before, after in zip(marks, marks[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    stream = torch.cuda.current_stream(device)  # `device` need not be the current one, whose stream is idle
    events[0].record(stream)
    for event in events[1:]:
        function()
        event.record(stream)
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


@contextmanager
def device_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """GiB that the allocator held when the block began and at most in it, there when it ends; 0 on a CPU."""
    found = {"resting_gib": 0.0, "peak_gib": 0.0}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["resting_gib"] = torch.cuda.memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30


def release(device: torch.device) -> None:
    """What nobody holds goes back to the card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def streamed_bytes(*modules: Any) -> int:
    """Bytes that one pass through all layers brings to the device."""
    layers = [child for module in modules if isinstance(module, nn.Module) for child in module.modules()]
    return sum(child.pass_bytes for child in layers if isinstance(child, Streamed))


def copy_roof(device: torch.device, seconds: float, size: int) -> float:
    """GB/s of a device copy of `size` bytes, read and written bytes both counted."""
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure(lambda: target.copy_(source), device, seconds)["seconds"] / 1e9


def host_roof(device: torch.device, seconds: float, size: int) -> dict[str, float]:
    """GB/s from host memory to the device, pinned and not; empty on a CPU."""
    if device.type != "cuda":
        return {}
    target = torch.empty(size, dtype=torch.int8, device=device)
    found = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        source = torch.zeros(size, dtype=torch.int8, pin_memory=pinned)
        found[name] = size / measure(partial(target.copy_, source), device, seconds)["seconds"] / 1e9
    return found


def product_roof(rows: int, inputs: int, outputs: int, like: Tensor, seconds: float) -> float:
    """TFLOP/s of [rows, inputs] x [inputs, outputs] in the dtype and on the device of `like`, on random data."""
    x, weight = (torch.randn(n, inputs, device=like.device, dtype=like.dtype) for n in (rows, outputs))
    spent = measure(lambda: torch.nn.functional.linear(x, weight), like.device, seconds)["seconds"]
    return 2 * rows * inputs * outputs / spent / 1e12


def digits(rate: float) -> str:
    """A rate for people: whole, below 100 with three digits that say something."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def card(device: torch.device) -> dict[str, str]:
    """Name, and on CUDA the clocks, power and temperature as nvidia-smi tells them now, where it knows the card."""
    if device.type != "cuda":
        return {"device": str(device)}
    facts = {"device": torch.cuda.get_device_name(device)}
    # nvidia-smi counts all cards of the machine in an order of its own
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None and shutil.which("nvidia-smi"):
        fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id=GPU-{uuid}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if not done.returncode:
            facts |= dict(zip(fields, (word.strip() for word in done.stdout.split(",")), strict=False))
    return facts


def kernels(function: Callable[[], object], device: torch.device, most: int = 16) -> list[dict[str, Any]]:
    """The kernels of one run by time on the device: name, calls, milliseconds, share of all; on a CPU, its operators."""
    from torch.profiler import ProfilerActivity, profile

    activity, spent_on = ProfilerActivity.CPU, "self_cpu_time_total"
    if device.type == "cuda":  # beside kernels stand launches and waits of the CPU, which spend no time there
        activity, spent_on = ProfilerActivity.CUDA, "self_device_time_total"
    with profile(activities=[activity]) as seen:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    rows = [(event.key, event.count, getattr(event, spent_on) / 1e3) for event in seen.key_averages()]
    rows = [row for row in rows if row[2] > 0]
    total = sum(spent for _, _, spent in rows) or 1.0
    rows.sort(key=lambda row: -row[2])
    return [
        {"kernel": name[:90], "calls": count, "ms": round(spent, 3), "share": round(spent / total, 4)}
        for name, count, spent in rows[:most]
    ]


@contextmanager
def capped(device: torch.device, gib: float | None) -> Iterator[None]:
    """At most `gib` GiB of a CUDA device for PyTorch's allocator; None, and any other device, as they are."""
    if gib is None or device.type != "cuda":
        yield
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / whole), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
