"""How many ranks, on which axes, and why: settled before a process is started or a GPU touched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import Choices, EngineConfig
from .errors import ConfigError
from .launch import Seat
from .spec import DiTSpec

if TYPE_CHECKING:
    from .parallel import Strategy
    from .parallel.mesh import Mesh

OVERLAPPED_CHUNKS = 2
WEIGHTS_SHARE = 0.75  # of a device's memory may be weights of the DiT; rows, tables and kernels' buffers need the rest


@dataclass(frozen=True)
class Sizes:
    """What a choice depends on: heads of the DiT, key and value heads of the conditioner, bytes of the DiT's weights, and
    bytes of the smallest device's memory (None where the ranks run on the CPU or it is not known)."""

    heads: int
    kv_heads: int
    weights: int
    memory: int | None = None


def num_ranks(config: EngineConfig, place: Seat | None) -> int:
    """How many ranks the engine has. Raises ConfigError where the launcher started another number."""
    if place is None:
        return config.gpus or 1
    if config.gpus not in (None, place.world):
        raise ConfigError(f"gpus: got {config.gpus}, but the launcher started {place.world} processes; leave it out")
    return place.world


def choose_mesh(config: EngineConfig, count: int, sizes: Sizes) -> tuple[Mesh, dict[str, str]]:
    """The mesh of `count` ranks and why. Raises ConfigError for what cannot be dealt out.

    Rows over all ranks where the weights fit into one device, because that moves least; heads and feed-forward width
    over the fewest ranks that make them fit, because that saves memory.
    """
    from .parallel.mesh import Mesh

    if sizes.heads % count:
        fits = [n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0]
        raise ConfigError(f"gpus: got {count}; it must divide the {sizes.heads} heads: {', '.join(map(str, fits))}")
    tp, why = _choose_tp(config, count, sizes)
    sp = config.sp or count // tp
    if sp * tp != count:
        raise ConfigError(f"sp, tp: {sp} times {tp} is not the number of ranks, {count}")
    text = 1 if config.conditioner == "whole" else math.gcd(sizes.kv_heads, count)
    reason = {"whole": "asked for", "split": "asked for"}.get(config.conditioner, "auto: less memory, loaded sooner")
    if config.conditioner == "split" and count > 1 and text == 1:
        raise ConfigError(f"conditioner: split cannot deal {sizes.kv_heads} key and value heads to {count} ranks")
    return Mesh(sp, tp, text), {"sp, tp": why, "conditioner": reason}


def _choose_tp(config: EngineConfig, count: int, sizes: Sizes) -> tuple[int, str]:
    if config.tp is not None:
        return config.tp, "asked for"
    if config.sp is not None:
        if count % config.sp:
            raise ConfigError(f"sp: got {config.sp}; it must divide the number of ranks, {count}")
        return count // config.sp, "sp was asked for"
    if sizes.memory is None:
        return 1, "auto: rows over all ranks"
    room = sizes.memory * WEIGHTS_SHARE
    for tp in (n for n in range(1, count + 1) if count % n == 0):
        if sizes.weights / tp <= room or tp == count:
            part, whole = sizes.weights / tp / 2**30, sizes.memory / 2**30
            return tp, f"auto: {part:.0f} GiB of DiT weights a rank, {whole:.0f} GiB of memory"
    raise AssertionError("count divides itself")


def choose_strategy(config: EngineConfig, mesh: Mesh, choices: Choices, dit: DiTSpec) -> tuple[Strategy, str, str]:
    """What blocks call to attend, its name and why. Raises ConfigError for a variant that cannot run here."""
    from .parallel import Local
    from .parallel.ulysses import Relayout, Ulysses
    from .parallel.ulysses import refusal as chunks_refusal

    if mesh.sp == 1:
        if config.attend != "auto":
            raise ConfigError(f"attend: {config.attend} is for rows over several ranks; this mesh has sp 1")
        return Local, "local", "rows are on one rank"
    if config.attend in ("packed", "overlapped"):
        heads, chunks = dit.heads // mesh.tp, OVERLAPPED_CHUNKS if config.attend == "overlapped" else 1
        problem = chunks_refusal(heads, mesh.sp, chunks)
        if problem is None and choices.ops.name != "triton":
            problem = f"needs the triton table of ops, this run has {choices.ops.name}"
        if problem is None:
            from .ops import relayout

            problem = relayout.refusal(choices.device, choices.dtype, dit.head_dim, heads // mesh.sp)
        if problem:
            raise ConfigError(f"attend: {config.attend}: {problem}; use plain")
        packed = Relayout("packed", relayout.pack, relayout.merge)
        return partial(Ulysses, relayout=packed, chunks=chunks), config.attend, "asked for"
    why = "asked for" if config.attend == "plain" else "auto: no other variant has been measured to be faster"
    return Ulysses, "plain", why


def at_seat(config: EngineConfig, place: Seat | None) -> EngineConfig:
    """The configuration of one rank: its own device, its share of the threads."""
    if place is None:
        return config
    import torch

    own: dict[str, Any] = {}
    if config.device != "cpu" and torch.cuda.is_available():
        own["device"] = f"cuda:{place.local_rank}"
    own["threads"] = config.threads or max(1, torch.get_num_threads() // place.local_world)
    return replace(config, **own)


def describe_mesh(mesh: Mesh, attend: str) -> dict[str, Any]:
    """For reports and `doctor`."""
    return {"ranks": mesh.size, "sp": mesh.sp, "tp": mesh.tp, "conditioner": mesh.text, "attend": attend}
