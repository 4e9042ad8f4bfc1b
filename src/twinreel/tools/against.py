"""`twinreel validate --against diffusers`: boundary by boundary against the public implementation, same machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from ..output.report import versions
from ..scratch import scratch
from ..watch import Watch, ignore
from .frozen import FROZEN, Named
from .setups import Setup, check_setups
from .trace import Trace, amount, compare_traces

# Values that are ours on both sides, so that their equality says nothing.
SHARED = ("patches of pictures shown to the conditioner (tests hold them to the public processors)",
          "ids and tags of prompts with vision blocks", "media as read and resized")  # fmt: skip


def against_diffusers(config: EngineConfig, requests: Sequence[Named], watch: Watch = ignore) -> dict[str, Any]:
    """Every request through both, recorded and compared; plain JSON values, made to be posted.

    The weights must be a diffusers root, because the public classes read no other; draws are the sequential ones.
    Raises ConfigError when it is not, or diffusers is absent.
    """
    from ..engine import Engine
    from ..pipeline import settle
    from .oracle import Oracle, check_diffusers

    version = check_diffusers()
    if max(config.gpus or 1, config.sp or 1, config.tp or 1) > 1:
        raise ConfigError("gpus: diffusers runs in one process, and is compared with one; leave out gpus, sp and tp")
    engine = Engine(replace(config, residency="stages"))  # both sides in turn on one device
    parts = engine.parts
    weights = parts.weights
    if weights.layout != "diffusers":
        raise ConfigError(f"{weights.path} has layout {weights.layout}; diffusers reads its own only")
    kept = check_setups([Setup(config)], requests)
    oracle = Oracle(weights.path, parts.choices, parts.spec)
    rows = []
    for named in kept:
        request = replace(named.request, noise="sequential", policy="every-step")
        with scratch("against") as folder:
            ours, theirs = Trace(folder / "ours"), Trace(folder / "theirs")
            media = engine.generate(request, watch, ours)
            ours.finish(media.report)
            oracle.run(settle(request, parts), theirs)
            theirs.finish({"engine": f"diffusers {version}"})
            result = compare_traces(theirs.folder, ours.folder)
        rows.append({"request": named.name, "plan": media.report["plan"], **_common(result)})
    return {
        "against": f"diffusers {version}",
        "frozen": FROZEN,
        "identical": all(row["identical"] for row in rows),
        "rows": rows,
        "left_out": [named.name for named in requests if named not in kept],
        "shared": list(SHARED),
        "engine": engine.describe(),
        "versions": versions(),
    }


def _common(result: dict[str, Any]) -> dict[str, Any]:
    """Without the tensors that only our trace has, such as row tags of the prompt."""
    tensors = [row for row in result["boundaries"] if row.get("why") != "only in b"]
    first = next((row for row in tensors if not row["equal"]), None)
    compared = list(dict.fromkeys(row["boundary"] for row in tensors))
    return {"identical": first is None, "first_difference": first, "compared": compared, "boundaries": tensors}


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"against {report['against']}"]
    for row in report["rows"]:
        first = row["first_difference"]
        if first is None:
            lines.append(f"  {row['request']}: equal bits at {', '.join(row['compared'])}")
            continue
        lines.append(f"  {row['request']}: first difference at {first['boundary']}, {first['tensor']}: {amount(first)}")
        for item in row["boundaries"]:
            if not item["equal"] and "why" not in item:
                lines.append(f"    {item['boundary']} {item['tensor']}: {amount(item)}")
    return "\n".join([*lines, "identical" if report["identical"] else "not identical"])
