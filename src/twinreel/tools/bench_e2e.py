"""`bench e2e`: whole T2VA requests through an engine on random weights, warm, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config import EngineConfig, resolve
from ..engine import Engine
from ..limits import counted
from ..output import OutputOptions
from ..request import Request, check_request
from ..scratch import scratch
from ..spec import Spec
from .bench_dit import Sizes, request_of
from .random_weights import RandomWeights
from .timing import card

# All steps of the schedule, whose tables a second request finds, and three calls of the model.
WARM = "reuse:start_ratio=0,end_ratio=1,refresh_interval=1000,max_consecutive_reuse=1000"
ENDS_IN = {True: "an MP4, read back", False: "frames and sound in host memory: PyAV is not installed"}


def writes() -> bool:
    """Whether a measured request can end in a file here."""
    return find_spec("av") is not None


def bench_e2e(spec: Spec, sizes: Sizes, config: EngineConfig, policies: Sequence[str], steps: int) -> dict[str, Any]:
    """Seconds of a request of `steps` steps from prompt to file and of each of its stages, without and with each of
    `policies`; a short one before them makes the engine warm. Where PyAV is not installed, `ends_in` says so, and frames
    and sound end in host memory. Plain values; raises RequestError and ConfigError."""
    spec = replace(spec, partitions=spec.partitions[:1])  # as one who only makes videos from text would load it
    requests = [request_of(sizes, steps=steps, policy=policy) for policy in dict.fromkeys(("every-step", *policies))]
    for request in requests:
        check_request(request, spec)
    device = resolve(config, spec.dit.head_dim).device
    result: dict[str, Any] = {"text": sizes.text, "steps": steps, "card_before": card(device)}
    result["ends_in"] = ENDS_IN[writes()]
    print(f"ends in {result['ends_in']}")
    rows: list[dict[str, Any]] = []
    with (
        scratch("bench") as folder,
        closing(Engine(config, weights=RandomWeights(spec, device))) as engine,
    ):
        target = folder / "a.mp4" if writes() else None
        begin = time.perf_counter()
        run(engine, request_of(sizes, steps=steps, policy=WARM), target)
        result["cold_seconds"] = time.perf_counter() - begin
        for request in requests:
            rows.append(run(engine, request, target))
            rows[-1]["times_exact"] = rows[-1]["seconds"] / rows[0]["seconds"]
            print(told(rows[-1]))
        result["engine"] = engine.describe()
    return result | {"requests": rows, "card_after": card(device)}


def run(engine: Engine, request: Request, target: Path | None) -> dict[str, Any]:
    """One request into the file `target`, or into host memory where that is None."""
    begin = time.perf_counter()
    if target is None:
        report = engine.generate(request).report
    else:
        report = engine.render(request, target, OutputOptions(overwrite=True))
    seconds, plan = time.perf_counter() - begin, report["plan"]
    row = {"policy": request.policy, "seconds": seconds, "canvas": plan["canvas"], "frames": plan["frames"]}
    row |= {name: report[name] for name in ("memory", "adaln", "sha256", "faults", "stages") if name in report}
    row["calls"] = report["policy"].get("calls", plan["calls"])
    return row


def told(row: dict[str, Any]) -> str:
    """A request in a line."""
    stages = ", ".join(f"{name} {record['seconds']:.2f}" for name, record in row["stages"].items())
    width, height = row["canvas"]
    size = f"{width}x{height}, {row['frames']} frames, {counted(row['calls'], 'call')}"
    faults = f"; at fault: {', '.join(row['faults'])}" if row.get("faults") else ""
    return f"{row['policy']:20} {row['seconds']:.2f} s ({size}: {stages}), {row['times_exact']:.3f} x exact{faults}"
