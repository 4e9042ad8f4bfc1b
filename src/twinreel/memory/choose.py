"""Which residency a request gets: one rule for the engine and for `twinreel plan`, from sizes and free memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from ..config import MODES, ROW_UNIT
from ..errors import ConfigError
from ..machine import host_memory
from ..plan import Plan, make_plan
from ..precision import Fp8
from ..request import Request
from ..spec import AUDIO_CHANNELS, Partition, Spec
from .estimate import Setting, estimate, stage_parts, table_weights

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
    """Bytes that the engine may use of a device (None: there is none, or it does not tell) and of the host; `given`:
    those of the host were named, so no request may need more."""

    device: int | None
    host: int | None
    given: bool = False


def free_memory(given: float | None, device: int | None) -> Free:
    """`given` GiB of the host, or what is free there; on a CPU (`device` None) only what was given bounds anything."""
    if given is not None:
        return Free(device, int(given * GIB), given=True)
    there = host_memory() if device is not None else None
    return Free(device, there.free if there else None)


@dataclass(frozen=True)
class Choice:
    """How the parts of one request are kept and why; what that needs at its fullest, and of the host while a part is in
    use; what of the device and of the host is left for AdaLN tables of earlier requests, and the bytes of its own, which
    are among what it needs."""

    residency: str
    adaln: str
    row_chunk: int
    device_bytes: int
    host_bytes: int
    host_with: Mapping[str, int]
    why: Mapping[str, str] = field(default_factory=dict)
    spare: tuple[float, float] = inf, inf
    tables: int = 0


def choose(asked: Asked, plan: Plan, rows: Rows, spec: Spec, setting: Setting, free: Free) -> Choice:
    """The first of `MODES` that fits with a tenth to spare, then the same in chunks of rows, then what needs least.

    `setting` says how parts run; its residency, `adaln` and `row_chunk` are not looked at. On a CPU nothing is gained
    by dropping weights, so `auto` keeps them unless memory was given. Raises ConfigError for a named residency that
    cannot be; `admit` is for one that needs too much.
    """
    check_residency(asked.residency, asked.refused)
    total = sum(rows.values())
    found = list[Choice]()
    for tried in _candidates(asked, total, setting, setting.device == "cuda" or free.host is not None):
        stages = estimate(plan, rows, spec, tried, _kept(plan, spec, tried.residency))
        host = {part: stages[stage]["host"] for stage, parts in stage_parts(plan).items() for part in parts}
        device = max(stage.get("device", 0) for stage in stages.values())
        found.append(Choice(tried.residency, tried.adaln, tried.row_chunk, device, max(host.values()), host))
        if _fits(device, free.device) and _fits(found[-1].host_bytes, free.host):
            break
    else:
        found.append(min(found, key=lambda it: (not _fits(it.host_bytes, free.host), it.device_bytes or it.host_bytes)))
    best = found[-1]
    spare = _left(best.device_bytes, free.device), _left(best.host_bytes, free.host)
    tables = table_weights(plan, spec, setting).kept if best.adaln == "precompute" else 0
    return replace(best, why=_reasons(asked, best, setting.device, free, total), spare=spare, tables=tables)


def admit(choice: Choice, asked: Asked, free: Free) -> Choice:
    """`choice`, unless it needs more of the host than was given, or as layers by name more than is free there, which
    would have to be locked. Raises ConfigError."""
    mode, named = MODES[choice.residency], asked.residency != "auto"
    layers = mode.streamed and not mode.mapped
    if free.host is None or _fits(choice.host_bytes, free.host) or not (free.given or named and layers):
        return choice
    least = ceil(choice.host_bytes * NEAR / GIB * 100) / 100
    need = f"needs {choice.host_bytes / GIB:.2f} GiB of host memory and a tenth to spare"
    if named:
        others = "" if mode.mapped else ", or try mapped or auto"
        raise ConfigError(
            f"residency: {choice.residency} {need}, {free.host / GIB:.2f} GiB may be used; give {least} with "
            f"host_memory{others}"
        )
    raise ConfigError(
        f"host_memory: got {free.host / GIB:.4g}, and this request {need} even with residency {choice.residency}; give "
        f"{least}, or ask for less at a time"
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


def check_residency(residency: str, refused: Mapping[str, str]) -> None:
    """Raise ConfigError for one of the `refusals`."""
    if residency in refused:
        raise ConfigError(f"residency: {residency} {refused[residency]}")


def usual(spec: Spec) -> tuple[Plan, Rows]:
    """The request by which an engine is described before it has seen one: text to video, all defaults."""
    partition = Partition(spec.partitions[0].name, ("t2va",))
    plan = make_plan(Request("a"), replace(spec, partitions=(partition,)))
    frame = (plan.height // spec.multiple) * (plan.width // spec.multiple)
    return plan, {"text": TEXT_ROWS, "audio": AUDIO_CHANNELS * plan.audio_latents, "video": plan.latents * frame}


def _candidates(asked: Asked, total: int, setting: Setting, bounded: bool) -> Iterator[Setting]:
    """What may be chosen, the quickest first; where memory is not `bounded`, nothing that saves it."""
    # a CPU gains nothing by layers in host memory, which is its own
    gains = [name for name, mode in MODES.items() if setting.device == "cuda" or mode.mapped or not mode.streamed]
    names = [name for name in gains if name not in asked.refused] if bounded else ["all"]
    chunk = asked.row_chunk if asked.row_chunk is not None and asked.row_chunk < total else 0
    ways = []
    for name in names if asked.residency == "auto" else [asked.residency]:
        # the projections pay only where everything stays loaded anyway
        adalns = ("live", "precompute") if name == "all" and bounded else ("precompute",) if bounded else ("live",)
        for adaln in adalns if asked.adaln == "auto" else (asked.adaln,):
            ways.append(replace(setting, residency=name, adaln=adaln, row_chunk=chunk))
    yield from ways
    if asked.row_chunk is None and bounded and asked.ranks == 1:
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


def _left(need: int, free: int | None) -> float:
    return inf if free is None else free / NEAR - need


def _reasons(asked: Asked, chosen: Choice, device: str, free: Free, total: int) -> dict[str, str]:
    needs = [("device", chosen.device_bytes, free.device, "free")] if device == "cuda" else []
    needs.append(("host", chosen.host_bytes, free.host, "given" if free.given else "free"))
    told = "auto: " + ", ".join(
        f"{name} {need / GIB:.1f} GiB needed, "
        + ("not told what is free" if there is None else f"{there / GIB:.1f} GiB {how}")
        for name, need, there, how in needs
    )
    if device == "cpu" and free.host is None:
        told = "auto on cpu"
    elif not all(_fits(need, there) for _, need, there, _ in needs):
        refused = free.given and not _fits(chosen.host_bytes, free.host)
        told += "; nothing fits with a tenth to spare, " + ("so it is refused" if refused else "this comes nearest")
    named = "asked for"
    chunk = named if asked.row_chunk is not None else told if chosen.row_chunk else "auto: all rows"
    if asked.row_chunk and not chosen.row_chunk:
        chunk = f"asked for {asked.row_chunk:,} at a time, and all {total:,} rows are no more than that"
    return {
        "residency": told if asked.residency == "auto" else named,
        "adaln": named if asked.adaln != "auto" else f"auto: {chosen.residency} residency on {device}",
        "row_chunk": chunk,
    }
