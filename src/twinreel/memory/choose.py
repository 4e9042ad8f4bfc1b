"""Which residency a request gets: one rule for the engine and for `twinreel plan`, from sizes and free memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..config import MODES, ROW_UNIT
from ..errors import ConfigError
from ..machine import host_memory
from ..plan import Plan, make_plan
from ..precision import Fp8
from ..request import Request
from ..spec import AUDIO_CHANNELS, Partition, Spec
from .estimate import Setting, estimate

NEAR = 1.1  # of a prediction must be free: allocators leave gaps
GIB = 1 << 30
TEXT_ROWS = 300  # of a usual prompt
Rows = Mapping[str, int]  # packed rows of kind `text`, `video` and `audio`


@dataclass(frozen=True)
class Asked:
    """What the operator said, `auto` and None included; how many ranks there are; and what of `MODES` cannot be, why."""

    residency: str = "auto"
    adaln: str = "auto"
    row_chunk: int | None = None
    ranks: int = 1
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Free:
    """Bytes that the engine may use of a device (None: there is none, or it does not tell) and of the host."""

    device: int | None
    host: int | None


def free_memory(given: float | None, device: int | None) -> Free:
    """`given` GiB of the host, or what is free there; on a CPU (`device` None) only what was given bounds anything."""
    there = host_memory() if device is not None else None
    return Free(device, int(given * GIB) if given is not None else there.free if there else None)


@dataclass(frozen=True)
class Choice:
    """How the parts of one request are kept, what that needs at its fullest, and why."""

    residency: str
    adaln: str
    row_chunk: int
    why: Mapping[str, str]
    device_bytes: int = 0
    host_bytes: int = 0


def choose(asked: Asked, plan: Plan, rows: Rows, spec: Spec, setting: Setting, free: Free) -> Choice:
    """The first of `MODES` that fits with a tenth to spare, then the same in chunks of rows, then what needs least.

    `setting` says how parts run; its residency, `adaln` and `row_chunk` are not looked at. On a CPU nothing is gained
    by dropping weights, so `auto` keeps them. Raises ConfigError for a named residency that cannot be.
    """
    if asked.residency in asked.refused:
        raise ConfigError(f"residency: {asked.residency} {asked.refused[asked.residency]}")
    total = sum(rows.values())
    found = list[tuple[Setting, int, int]]()
    for tried in _candidates(asked, total, setting):
        stages = estimate(plan, rows, spec, tried, _kept(plan, spec, tried.residency))
        host = max(stage["host"] for stage in stages.values())
        device = max(stage.get("device", 0) for stage in stages.values())
        found.append((tried, device, host))
        if _fits(device, free.device) and _fits(host, free.host):
            break
    else:
        found.append(min(found, key=lambda item: (not _fits(item[2], free.host), item[1])))
    chosen, device, host = found[-1]
    mode = MODES[chosen.residency]
    if asked.residency != "auto" and mode.streamed and not mode.mapped and not _fits(host, free.host):
        assert free.host is not None
        raise ConfigError(
            f"residency: {chosen.residency} needs {host / GIB:.2f} GiB of host memory, {free.host / GIB:.2f} GiB may be "
            "used; use mapped or auto, or give more with host_memory"
        )
    return Choice(
        chosen.residency, chosen.adaln, chosen.row_chunk, _reasons(asked, chosen, (device, host), free), device, host
    )


def refusals(fp8: Fp8 | None, spec: Spec, ranks: int) -> dict[str, str]:
    """The residencies that cannot be here, each with its reason."""
    found = {}
    for name, mode in MODES.items():
        if ranks > 1 and mode.streamed:
            found[name] = f"is for one GPU, and these are {ranks}; use all or stages"
        elif fp8 and fp8.steps and mode.streams("dit"):
            found[name] = "runs one DiT layer by layer, and fp8 with steps takes two in turn; leave steps out"
        elif fp8 and not spec.dit.fp8_blocks and mode.mapped:
            found[name] = "would quantize these weights anew in every call; run twinreel quantize first, or use layers"
    return found


def usual(spec: Spec) -> tuple[Plan, Rows]:
    """The request by which an engine is described before it has seen one: text to video, all defaults."""
    partition = Partition(spec.partitions[0].name, ("t2va",))
    plan = make_plan(Request("a"), replace(spec, partitions=(partition,)))
    frame = (plan.height // spec.multiple) * (plan.width // spec.multiple)
    return plan, {"text": TEXT_ROWS, "audio": AUDIO_CHANNELS * plan.audio_latents, "video": plan.latents * frame}


def _candidates(asked: Asked, total: int, setting: Setting) -> Iterator[Setting]:
    """What may be chosen, the quickest first."""
    cuda = setting.device == "cuda"
    names = [name for name in MODES if name not in asked.refused] if cuda else ["all"]
    ways = []
    for name in names if asked.residency == "auto" else [asked.residency]:
        # the projections pay only where everything stays loaded anyway
        adalns = ("live", "precompute") if name == "all" and cuda else ("precompute",) if cuda else ("live",)
        for adaln in adalns if asked.adaln == "auto" else (asked.adaln,):
            ways.append(replace(setting, residency=name, adaln=adaln, row_chunk=asked.row_chunk or 0))
    yield from ways
    if asked.row_chunk is None and cuda and asked.ranks == 1:
        for chunk in _chunks(total):
            # where others need chunks, these two are quicker
            yield from (replace(way, row_chunk=chunk) for way in ways[-2:])


def _chunks(total: int) -> Iterator[int]:
    """Chunks of whole units, from two a request down to one unit."""
    parts, last = 2, 0
    while last != ROW_UNIT and total > ROW_UNIT:
        chunk = -(-total // parts // ROW_UNIT) * ROW_UNIT
        if chunk != last:
            yield chunk
        parts, last = parts + 1, chunk


def partitions_kept(residency: str, partition: str, spec: Spec) -> list[str]:
    """The partitions whose DiT may stay beside that of a request for `partition`."""
    return [each.name for each in spec.partitions] if residency == "all" else [partition]


def _kept(plan: Plan, spec: Spec, residency: str) -> list[str]:
    """The parts that are on the device all the time once every kind of request has come."""
    names = ["text_encoder", "video_encoder", "audio_encoder", "video_decoder", "audio_decoder"]
    for partition in partitions_kept(residency, plan.partition, spec):
        names += [f"dit:{partition}", f"modulation:{partition}"]
    return [name for name in names if MODES[residency].keeps(name)]


def _fits(need: int, free: int | None) -> bool:
    return free is None or need * NEAR <= free


def _reasons(asked: Asked, chosen: Setting, need: tuple[int, int], free: Free) -> dict[str, str]:
    if chosen.device == "cpu":
        told = "auto on cpu"
    else:
        told = "auto: " + ", ".join(
            f"{name} {amount / GIB:.1f} GiB needed, "
            + ("not told what is free" if there is None else f"{there / GIB:.1f} GiB free")
            for name, amount, there in zip(("device", "host"), need, (free.device, free.host), strict=True)
        )
        if not (_fits(need[0], free.device) and _fits(need[1], free.host)):
            told += "; nothing fits with a tenth to spare, this comes nearest"
    named = "asked for"
    return {
        "residency": told if asked.residency == "auto" else named,
        "adaln": named if asked.adaln != "auto" else f"auto: {chosen.residency} residency on {chosen.device}",
        "row_chunk": named if asked.row_chunk is not None else told if chosen.row_chunk else "auto: all rows",
    }
