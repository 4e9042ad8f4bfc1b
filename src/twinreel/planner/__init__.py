"""`twinreel plan`: every size of a request and what it will need, before a weight is read and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..calibration import identity, profile_of, read_profile
from ..config import EngineConfig, check_config
from ..demo import model_folder
from ..errors import CheckpointError
from ..limits import counted
from ..machine import Memory, cuda_memory, host_memory
from ..media.read import read_sources
from ..media.remote import fetched
from ..memory.choose import GIB, NEAR, Asked, Choice, admit, choose, free_memory, refusals
from ..memory.estimate import Setting, estimate
from ..plan import Plan, describe_plan, make_plan, warn_of_fp8
from ..policy_options import format_policy, parse_policy
from ..policy_windows import computed_calls, meaningless
from ..precision import parse_precision
from ..presentation import count_tokens
from ..request import Request, check_request
from ..sources import Source
from ..spec import AUDIO_CHANNELS, Spec
from ..topology import check_choices, choose_mesh, sizes_of
from ..weights import locate, read_spec
from ..weights.fingerprint import fingerprint
from ..weights.locate import Checkpoint
from ..weights.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Door:
    """What requests are checked against before a weight is read; `device` is the number of a CUDA device, `topology` that
    of several ranks."""

    config: EngineConfig
    checkpoint: Checkpoint
    spec: Spec
    device: int | None
    tokenizer: Tokenizer
    topology: Mapping[str, Any] | None = None

    def check(
        self, request: Request, sources: Sequence[Source] | None = None
    ) -> tuple[Plan, int, tuple[Setting, Choice]]:
        """The request's plan, how many tokens its prompt has, and how it would run; `sources` is what `look` has seen, if
        it has.

        Raises what `Engine.generate` raises before it loads weights.
        """
        check_request(request, self.spec, allow_remote=self.config.allow_remote)
        plan = make_plan(request, self.spec, look(request, self.spec) if sources is None else sources)
        plan = warn_of_fp8(plan, parse_precision(self.config.precision)[1])
        tokens = count_tokens(plan, self.tokenizer, self.spec)
        chosen = self.choose(plan, tokens)
        profile = profile_of(parse_policy(request.policy))
        if profile is not None:
            read_profile(profile, identity(plan, self._version(plan.partition)))
        return plan, tokens, chosen

    def choose(self, plan: Plan, tokens: int) -> tuple[Setting, Choice]:
        """How an engine of this configuration would run `plan`. Raises ConfigError where it would refuse."""
        config, spec = self.config, self.spec
        setting = _setting(config, spec, self.device)
        ranks = config.gpus or 1
        asked = Asked(config.residency, config.adaln, config.row_chunk, ranks, refusals(setting.fp8, spec, ranks))
        cards = [] if self.device is None else cuda_memory()[self.device : self.device + ranks]
        free = free_memory(config.host_memory, min((card.free for card in cards if card.total), default=None))
        rows = count_rows(segment_rows(plan, tokens, spec))
        choice = admit(choose(asked, plan, rows, spec, setting, free), asked, free)
        made = replace(setting, residency=choice.residency, adaln=choice.adaln, row_chunk=choice.row_chunk)
        return made, choice

    def _version(self, partition: str) -> str | None:
        try:
            return fingerprint(self.checkpoint.component("dit", partition))
        except CheckpointError:  # plans are made before the download, too
            return None


def open_door(config: EngineConfig, weights: bool = True) -> Door:
    """Check `config` as `Engine` does; `weights` False asks for no files of weights. ConfigError, CheckpointError."""
    check_config(config)
    checkpoint = locate(model_folder(config), config.components, weights=weights)
    spec = read_spec(checkpoint)
    number, topology = check_choices(config, spec)
    if topology is not None:
        config = replace(config, gpus=topology["ranks"])  # a launcher's processes are as many
    tokenizer = load_tokenizer(checkpoint.folders["tokenizer"], spec.text)
    return Door(config, checkpoint, spec, number, tokenizer, topology)


def plan_request(request: Request, config: EngineConfig) -> dict[str, Any]:
    """All that `twinreel plan` prints, as plain values. Raises what `Engine` and its `generate` raise at the door."""
    policy = parse_policy(request.policy)  # before the configuration, as `generate` does
    door = open_door(config, weights=False)  # before the download, too
    checkpoint, spec, number = door.checkpoint, door.spec, door.device
    plan, tokens, (setting, choice) = door.check(request)
    rows = segment_rows(plan, tokens, spec)
    facts = describe_plan(plan)
    for name in ("conditions", "notes", "warnings"):
        del facts[name]
    facts |= {"policy": format_policy(policy), "computed_calls": computed_calls(plan.calls, policy)}
    idle = meaningless(plan.calls, policy)
    ranks, memory = door.config.gpus or 1, {"host": host_memory()}
    if number is not None:
        cards = cuda_memory()[number : number + ranks]
        memory["device"] = min((card for card in cards if card.total), key=lambda card: card.free, default=None)
    stages = estimate(plan, count_rows(rows), spec, setting)
    judged = verdict(stages, memory, ranks)
    if config.host_memory is not None:
        need = _size(choice.host_bytes)
        judged["why"].append(f"host_memory: {need} needed at most, {_size(config.host_memory * GIB)} given")
    return {
        "model": str(checkpoint.path),
        "topology": door.topology,
        "plan": facts,
        "prompt": {"characters": len(plan.prompt), "tokens": tokens},
        "references": [_condition(condition, plan) for condition in plan.conditions],
        "rows": {"total": sum(row["rows"] for row in rows), "segments": rows},
        "memory": {
            "estimate": "predicted peak bytes of each stage; real ones differ",
            "setting": vars(setting),
            "chosen": choice.why,
            "stages": stages,
            **judged,
        },
        "notes": [*checkpoint.notes, *plan.notes],
        "warnings": [*plan.warnings, *([f"policy: {idle}"] if idle else [])],
    }


def in_words(facts: Mapping[str, Any]) -> dict[str, Any]:
    """`plan_request`'s values for people, in the order one asks; its notes are lines of their own."""
    plan, rows, memory = facts["plan"], facts["rows"], facts["memory"]
    told: dict[str, Any] = {
        "task": f"{plan['task']} ({plan['partition']} weights of {facts['model']})",
        "canvas": "x".join(map(str, plan["canvas"])),
        "length": f"{plan['frames']} frames = {plan['seconds']:.4f} s",
        "steps": _steps(plan),
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
    if facts["topology"] is not None:
        told["ranks"] = _ranks(facts["topology"])
    setting = memory["setting"]
    kept = f"{setting['residency']} ({memory['chosen']['residency']}); AdaLN {setting['adaln']}"
    rows_at_once = f"{setting['row_chunk']:,} at a time" if setting["row_chunk"] else "all at once"
    rows_at_once += f" ({memory['chosen']['row_chunk']})"
    told["memory"] = {"": memory["estimate"], "residency": kept, "rows": rows_at_once} | {
        stage: ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
        for stage, parts in memory["stages"].items()
    }
    verdict = {True: "yes", False: "no", None: "unknown"}[memory["fits"]]
    told["fits"] = f"{verdict}; {'; '.join(memory['why'])}"
    return told


def _steps(plan: Mapping[str, Any]) -> str:
    computed, calls, policy = plan["computed_calls"], counted(plan["calls"], "call"), plan["policy"]
    most = " at most" if computed is None else ""
    less = f", of which it computes {computed}" if computed not in (None, plan["calls"]) else ""
    return f"{plan['steps']} steps = {calls}{most}, policy {policy}{less}"


def _ranks(topology: Mapping[str, Any]) -> str:
    """What `describe()` has as `topology`, on a line."""
    text, why = topology["conditioner"], topology["why"]
    kept = {1: "whole on each", "fsdp": "fsdp"}.get(text, f"split over {text}")
    rows, attend = f"sp {topology['sp']}, tp {topology['tp']}", f"attend {topology['attend']}"
    told = {"sp, tp": rows, "conditioner": f"conditioner {kept}", "attend": attend}
    return f"{topology['ranks']}: " + "; ".join(f"{words} ({why[name]})" for name, words in told.items())


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


def count_rows(segments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many packed rows of each kind `segment_rows` tells of."""
    return {kind: sum(row["rows"] for row in segments if row["kind"] == kind) for kind in ("text", "video", "audio")}


def verdict(
    stages: Mapping[str, Mapping[str, int]], memory: Mapping[str, Memory | None], ranks: int = 1
) -> dict[str, Any]:
    """Peaks over all stages of each of `ranks` ranks against what is free: `fits` is None where the machine does not
    tell, unless all there is would be too little. A rank has a device of its own, `memory` that of the fullest;
    the host's is for all of them."""
    peaks = {name: max(stage[name] for stage in stages.values()) for name in memory}
    facts: dict[str, Any] = {"peak": peaks, "fits": True, "why": []}
    for name, peak in peaks.items():
        there = memory[name]
        if there is None:
            facts["fits"] = facts["fits"] and None
            why = f"{name}: this machine does not tell its memory"
        else:
            enough = peak * (ranks if name == "host" else 1) * NEAR <= there.free
            facts["fits"] = False if not enough else facts["fits"] and (there.told or None)
            free, total = there.free / 2**30, there.total / 2**30
            by = f" by each of {ranks} ranks" if ranks > 1 else ""
            room = f"{free:.1f} of {total:.1f} GiB free" if there.told else f"{total:.1f} GiB in all, free is not told"
            why = f"{name}: {_size(peak)} needed{by}, {room}"
        facts["why"].append(why)
    return facts


def look(request: Request, spec: Spec) -> list[Source]:
    """The media of a request that `check_request` takes, read to their ends without their pixels. Raises RequestError."""
    with fetched(request) as local:
        return read_sources(local, spec, look=True)


def _condition(condition: Any, plan: Plan) -> dict[str, Any]:
    facts = {name: value for name, value in vars(condition).items() if value not in (None, 0, False, "")}
    field = "keyframes" if condition.role == "keyframe" else "references"
    facts.pop("source", None)
    cuts = [note for note in plan.notes if note.startswith(f"{field}[{condition.source}]")]
    return {"field": f"{field}[{condition.source}]", **facts, "cuts": cuts}


def _setting(config: EngineConfig, spec: Spec, number: int | None) -> Setting:
    """How `config.resolve` lets parts run on CUDA device `number` (None: the CPU), as far as memory goes."""
    name, fp8 = parse_precision(config.precision)
    alike: dict[str, Any] = {"fp8": fp8, "encode": config.vae_encode}
    if config.gpus is not None and config.gpus > 1:
        mesh, _ = choose_mesh(config, config.gpus, sizes_of(spec, config))
        alike |= {"sp": mesh.sp, "tp": mesh.tp, "text": mesh.text, "stored": mesh.stored}
    if number is None:
        return Setting("cpu", 2 if name in ("bf16", "fp8") else 4, 4, 1, "all", **alike)
    element, table = 4 if name == "fp32" else 2, "reference" if config.ops == "reference" else "triton"
    return Setting("cuda", element, 2, 4, "all", ops=table, **alike)
