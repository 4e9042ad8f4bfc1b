"""`twinreel plan`: every size of a request and what it will need, before a weight is read and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import RESIDENT_SHARE, EngineConfig, check_config
from ..errors import ConfigError
from ..limits import clip_frames
from ..machine import Memory, cuda_memory, host_memory
from ..media.remote import fetched
from ..plan import Plan, describe_plan, make_plan
from ..policy_options import format_policy, parse_policy
from ..presentation import count_tokens, load_tokenizer
from ..request import Request, check_request
from ..spec import AUDIO_CHANNELS, Spec
from ..weights import locate, read_spec
from .estimate import Setting, estimate, part_weights
from .survey import survey

NEAR = 1.1  # of a prediction must be free: allocators leave gaps


def plan_request(request: Request, config: EngineConfig) -> dict[str, Any]:
    """All that `twinreel plan` prints, as plain values. Raises what `Engine` and its `generate` raise at the door."""
    check_config(config)
    if max(config.gpus or 1, config.sp or 1, config.tp or 1) > 1:
        raise ConfigError("gpus: the plan estimates one process; leave out gpus, sp and tp")
    checkpoint = locate(_folder(config), config.components, weights=False)  # before the download, too
    spec = read_spec(checkpoint)
    check_request(request, spec, allow_remote=config.allow_remote)
    plan = _plan(request, spec)
    tokens = count_tokens(plan, load_tokenizer(checkpoint.folders["tokenizer"], spec.text), spec)
    rows = segment_rows(plan, tokens, spec)
    facts = describe_plan(plan)
    for name in ("conditions", "notes", "warnings"):
        del facts[name]
    facts["policy"] = format_policy(parse_policy(request.policy))
    memory, setting = _memory(config, spec)
    totals = {kind: sum(row["rows"] for row in rows if row["kind"] == kind) for kind in ("text", "video", "audio")}
    stages = estimate(plan, totals, spec, setting)
    return {
        "model": str(checkpoint.path),
        "plan": facts,
        "prompt": {"characters": len(plan.prompt), "tokens": tokens},
        "references": [_condition(row, plan, i) for i, row in enumerate(plan.conditions)],
        "rows": {"total": sum(row["rows"] for row in rows), "segments": rows},
        "memory": {
            "estimate": "predicted peak bytes of each stage; real ones differ",
            "setting": vars(setting),
            "stages": stages,
            **verdict(stages, memory),
        },
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def in_words(facts: Mapping[str, Any]) -> dict[str, Any]:
    """`plan_request`'s values for people, in the order one asks; its notes are lines of their own."""
    plan, rows, memory = facts["plan"], facts["rows"], facts["memory"]
    told: dict[str, Any] = {
        "task": f"{plan['task']} ({plan['partition']} weights of {facts['model']})",
        "canvas": "x".join(map(str, plan["canvas"])),
        "length": f"{plan['frames']} frames = {plan['seconds']:.4f} s",
        "steps": f"{plan['steps']} steps = {plan['calls']} calls at most, policy {plan['policy']}",
        "prompt": f"{facts['prompt']['characters']} characters; {facts['prompt']['tokens']} tokens with the references",
        "rows": f"{rows['total']}: "
        + ", ".join(f"{row['rows']} {row['role']} {row['kind']}" for row in rows["segments"]).replace(
            "text text", "text"
        ),
    }
    for reference in facts["references"]:
        size = f" {reference['width']}x{reference['height']}" if "width" in reference else ""
        frames = f", {reference['frames']} frames" if reference.get("frames", 1) > 1 else ""
        sound = f", {reference['samples'] / reference['rate']:.2f} s of sound" if "samples" in reference else ""
        told[reference["field"]] = f"{reference['kind']}{size}{frames}{sound}"
    told["memory"] = {"": memory["estimate"]} | {
        stage: ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
        for stage, parts in memory["stages"].items()
    }
    verdict = {True: "yes", False: "no", None: "unknown"}[memory["fits"]]
    told["fits"] = f"{verdict}; {'; '.join(memory['why'])}"
    return told


def _size(value: float) -> str:
    """Bytes as GiB, or as MiB where that would be 0.0 GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:.1f} MiB"


def segment_rows(plan: Plan, tokens: int, spec: Spec) -> list[dict[str, Any]]:
    """The runs of packed rows in their order, as `layout.build_layout` makes them: kind, role and count (SPEC 5.1)."""

    def frame(height: int, width: int) -> int:
        return (height // spec.multiple) * (width // spec.multiple)

    rows: list[tuple[str, str, int]] = [("text", "text", tokens)]
    for condition in plan.conditions:
        if condition.audio_latents:
            rows.append(("audio", "condition", AUDIO_CHANNELS * condition.audio_latents))
        if condition.latents:
            rows.append(("video", "condition", condition.latents * frame(condition.height, condition.width)))
    rows.append(("audio", "target", AUDIO_CHANNELS * plan.audio_latents))
    rows.append(("video", "target", plan.latents * frame(plan.height, plan.width)))
    return [{"kind": kind, "role": role, "rows": count} for kind, role, count in rows]


def verdict(stages: Mapping[str, Mapping[str, int]], memory: Mapping[str, Memory | None]) -> dict[str, Any]:
    """Peaks over all stages against what is free: `fits` is None where the machine does not tell."""
    peaks = {name: max(stage[name] for stage in stages.values()) for name in memory}
    facts: dict[str, Any] = {"peak": peaks, "fits": True, "why": []}
    for name, peak in peaks.items():
        there = memory[name]
        if there is None:
            facts["fits"] = facts["fits"] and None
            why = f"{name}: this machine does not tell its memory"
        else:
            enough = peak * NEAR <= there.free
            facts["fits"] = False if not enough else facts["fits"]
            free, total = there.free / 2**30, there.total / 2**30
            why = f"{name}: {_size(peak)} needed, {free:.1f} of {total:.1f} GiB free"
        facts["why"].append(why)
    return facts


def _plan(request: Request, spec: Spec) -> Plan:
    with fetched(request) as local:
        named: list[tuple[str, Any]] = [(f"keyframes[{i}]", item) for i, item in enumerate(local.keyframes)]
        named += [(f"references[{i}]", item) for i, item in enumerate(local.references)]
        most = int(clip_frames(spec).high)
        sources = [survey(item, spec, most, where) for where, item in named]
    return make_plan(request, spec, sources)


def _condition(condition: Any, plan: Plan, number: int) -> dict[str, Any]:
    facts = {name: value for name, value in vars(condition).items() if value not in (None, 0, False, "")}
    field = "keyframes" if condition.role == "keyframe" else "references"
    facts.pop("source", None)
    cuts = [note for note in plan.notes if note.startswith(f"{field}[{condition.source}]")]
    return {"field": f"{field}[{condition.source}]", **facts, "cuts": cuts}


def _memory(config: EngineConfig, spec: Spec) -> tuple[dict[str, Memory | None], Setting]:
    """What is free, and what `config.resolve` and `Parts` would choose on this machine."""
    host, devices = host_memory(), cuda_memory()
    number = _device(config.device, len(devices))
    adaln = "live" if config.adaln == "auto" else config.adaln
    if number is None:
        element = 2 if config.precision == "bf16" else 4
        residency = "all" if config.residency == "auto" else config.residency
        return {"host": host}, Setting("cpu", element, 4, 1, residency, adaln)
    setting = Setting("cuda", 4 if config.precision == "fp32" else 2, 2, 4, config.residency, adaln)
    if config.residency == "auto":
        names = ["text_encoder", "video_encoder", "audio_encoder", "video_decoder", "audio_decoder"]
        kinds = ("dit",) if adaln == "precompute" else ("dit", "modulation")
        names += [f"{kind}:{partition.name}" for partition in spec.partitions for kind in kinds]
        need = sum(part_weights(spec, name, setting).stored for name in names)
        fits = need <= devices[number].free * RESIDENT_SHARE
        setting = replace(setting, residency="all" if fits else "stages")
    if config.adaln == "auto" and setting.residency == "stages":
        setting = replace(setting, adaln="precompute")
    return {"device": devices[number], "host": host}, setting


def _device(name: str, count: int) -> int | None:
    """The CUDA device that `name` means here, or None for the CPU."""
    if name == "cpu" or (name == "auto" and not count):
        return None
    kind, _, number = name.partition(":")
    if name != "auto" and (kind != "cuda" or not (number or "0").isdecimal()):
        raise ConfigError(f"device: got {name!r}; use auto, cpu, cuda or cuda:N")
    index = int(number or 0) if name != "auto" else 0
    if index >= count:
        raise ConfigError(f"device: got {name!r}, and this machine shows {count} CUDA devices; use auto or cpu")
    return index


def _folder(config: EngineConfig) -> Path | None:
    if config.model is not None:
        return Path(config.model)
    if config.components:
        return None
    from ..demo import bundled_model

    return bundled_model()
