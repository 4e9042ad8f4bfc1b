"""How many ranks, on which axes, and why: settled before a process is started or a GPU touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import Choices, EngineConfig, check_config, check_one_device, cuda_number, resolve
from .errors import ConfigError
from .launch import PATIENCE, Seat, seat
from .machine import Card, cuda_memory
from .memory.choose import check_residency, refusals
from .precision import check_weights, parse_precision, running
from .spec import DiTSpec, Spec

if TYPE_CHECKING:
    import torch

    from .parallel import Parallel, Strategy
    from .parallel.board import Board
    from .parallel.mesh import Mesh
    from .parallel.ulysses import Relayout

OVERLAPPED_CHUNKS = 2
WEIGHTS_SHARE = 0.75  # of a device's memory may be weights of the DiT; rows, tables and kernels' buffers need the rest


@dataclass(frozen=True)
class Sizes:
    """What a choice depends on: heads and feed-forward width of the DiT, key and value heads of the conditioner, bytes of
    the DiT's weights and of the smallest memory of the devices that are used (None on the CPU or where it is not known)."""

    heads: int
    ffn: int
    kv_heads: int
    weights: int
    memory: int | None = None


def sizes_of(spec: Spec, config: EngineConfig) -> Sizes:
    """The sizes of a checkpoint and of this machine's cards that an engine of `config`, which is checked, uses."""
    from .weights import stored_bytes  # with torch

    memory = min((card.total for card in _cards(config)), default=0) or None
    dit = f"dit:{spec.partitions[0].name}"
    _, fp8 = parse_precision(config.precision)
    weights = stored_bytes(replace(spec, dit=running(spec.dit, fp8)), dit)
    weights += stored_bytes(spec, dit) if fp8 is not None and fp8.steps else 0
    return Sizes(spec.dit.heads, spec.dit.ffn, spec.text.kv_heads, weights, memory)


def _cards(config: EngineConfig) -> Sequence[Card]:
    """Those of this host's ranks; none for the CPU."""
    if config.device == "cpu":
        return ()
    place, first = seat(), int(config.device.partition(":")[2] or 0)
    return cuda_memory()[first : first + (place.local_world if place else config.gpus or 1)]


# What `check_config` and `cuda_number` settle by themselves; everything else is asked of torch and its kernels.
SETTLED = (
    "model", "components", "device", "residency", "host_memory", "row_chunk", "adaln", "threads", "allow_remote",
)  # fmt: skip


def check_choices(config: EngineConfig, spec: Spec) -> tuple[int | None, dict[str, Any] | None]:
    """Refuse what every engine of `config` would refuse on this machine: the one check of `plan` and `serve`, which build
    none. Starts no process and reads no weight; loads torch only for choices that need it.

    Returns the CUDA device of the first rank, None for the CPU, and of several ranks the topology to come. Raises
    ConfigError.
    """
    check_config(config)
    check_weights(config.precision, spec.dit)
    number, place, topology = cuda_number(config.device, len(cuda_memory())), seat(), None
    if place or any(getattr(config, item.name) != item.default for item in fields(config) if item.name not in SETTLED):
        count = num_ranks(config, place)
        mesh, why = choose_mesh(config, count, sizes_of(spec, config))
        last = Seat(count - 1, count, count - 1, count) if count > 1 else None
        choices = resolve(config, spec.dit.head_dim, place or last)
        variant = choose_variant(config, mesh, choices, spec.dit)
        check_residency(config.residency, refusals(choices.fp8, spec, count))
        topology = foresee(mesh, variant, why) if count > 1 else None
    return number, topology


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

    check_one_device(config, count)
    if sizes.heads % count:
        fits = [n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0]
        raise ConfigError(f"gpus: got {count}; it must divide the {sizes.heads} heads: {', '.join(map(str, fits))}")
    tp, why = _choose_tp(config, count, sizes)
    sp = config.sp or count // tp
    if sp * tp != count:
        raise ConfigError(f"sp, tp: {sp} times {tp} is not the number of ranks, {count}; leave one of them out")
    if sizes.ffn % tp:
        fits, width = _shares(count, sizes), f"a feed-forward width of {sizes.ffn}"
        raise ConfigError(f"tp: {tp} ranks cannot share {width}; use {', '.join(map(str, fits))}, or change gpus")
    text = 1 if config.conditioner in ("whole", "fsdp") else math.gcd(sizes.kv_heads, count)
    reason = "asked for"
    if config.conditioner == "auto":
        whole = "one rank" if count == 1 else f"{count} ranks share no head of it"
        reason = "auto: less memory, loaded sooner" if text > 1 else f"auto: {whole}"
    if config.conditioner == "fsdp" and count == 1:
        raise ConfigError("conditioner: fsdp is for several ranks, this run has one; use whole or auto")
    if config.conditioner == "split" and text == 1:
        heads = f"{sizes.kv_heads} key and value heads"
        why = f"cannot deal {heads} to {count} ranks" if count > 1 else "is for several ranks, this run has one"
        raise ConfigError(f"conditioner: split {why}; use whole or auto")
    return Mesh(sp, tp, text, count if config.conditioner == "fsdp" else 1), {"sp, tp": why, "conditioner": reason}


def _shares(count: int, sizes: Sizes) -> list[int]:
    """Over how many of `count` ranks the DiT's heads and feed-forward width can be dealt out."""
    return [n for n in range(1, count + 1) if count % n == 0 == sizes.ffn % n]


def _choose_tp(config: EngineConfig, count: int, sizes: Sizes) -> tuple[int, str]:
    for name in ("sp", "tp"):
        value = getattr(config, name)
        if value is not None and count % value:
            ranks = f"{count} ranks" if count > 1 else "one rank"
            raise ConfigError(f"{name}: got {value}, which does not divide {ranks}; change it, or gpus")
    if config.tp is not None:
        return config.tp, "asked for"
    if config.sp is not None:
        return count // config.sp, "sp was asked for"
    if sizes.memory is None:
        return 1, "auto: rows over all ranks"
    room = sizes.memory * WEIGHTS_SHARE
    shares = _shares(count, sizes)
    tp = next((n for n in shares if sizes.weights / n <= room), shares[-1])
    part, whole = sizes.weights / tp / 2**30, sizes.memory / 2**30
    return tp, f"auto: {part:.0f} GiB of DiT weights a rank, {whole:.0f} GiB of memory"


@dataclass(frozen=True)
class Variant:
    """How rows and heads change places, and why. `pushed`: over a board instead of the axis' all-to-all. `named`: asked
    for, so it runs or is refused."""

    name: str
    why: str
    named: bool = False
    relayout: Relayout | None = None
    chunks: int = 1
    pushed: bool = False

    def strategy(self, board: Board | None = None) -> Strategy:
        """What makes the object that blocks call."""
        from .parallel import Local

        if self.relayout is None:
            return Local
        from .parallel.ulysses import Ulysses

        return partial(Ulysses, relayout=self.relayout, chunks=self.chunks, board=board)


AUTO_CPU = "auto: the others are faster on CUDA alone"


def choose_variant(config: EngineConfig, mesh: Mesh, choices: Choices, dit: DiTSpec) -> Variant:
    """What to try on this machine, before ranks have met: what is named, else the fastest on CUDA and plain on a CPU.

    Raises ConfigError for a named variant that cannot run here.
    """
    named = config.attend != "auto"
    if mesh.sp == 1:
        if named:
            raise ConfigError(f"attend: {config.attend} is for rows over several ranks; this mesh has sp 1")
        return Variant("local", "rows are on one rank")
    from .parallel.ulysses import PLAIN
    from .parallel.ulysses import refusal as chunks_refusal

    kernels, packing = _kernels(choices, dit, mesh)
    chunking = chunks_refusal(dit.heads // mesh.tp, mesh.sp, OVERLAPPED_CHUNKS)
    problems = {"plain": None, "packed": packing, "overlapped": chunking}
    if named and (problem := problems[config.attend]):
        raise ConfigError(f"attend: {config.attend}: {problem}; use plain")
    if named:
        name, why = config.attend, "asked for"
    elif choices.device.type != "cuda":
        name, why = "plain", AUTO_CPU
    elif packing:
        name, why = "plain", f"auto; passed over: packed and overlapped: {packing}"
    else:
        name = "packed" if chunking else "overlapped"
        why = f"auto; passed over: overlapped: {chunking}" if chunking else "auto"
    relayout = PLAIN if name == "plain" or kernels is None else kernels
    chunks = OVERLAPPED_CHUNKS if name == "overlapped" else 1
    return Variant(name, why, named, relayout, chunks, chunks > 1)


def _kernels(choices: Choices, dit: DiTSpec, mesh: Mesh) -> tuple[Relayout | None, str | None]:
    """The kernels that pack and merge, or why they cannot run."""
    if choices.ops.name != "triton":
        return None, f"needs the triton table of ops, this run has {choices.ops.name}"
    from .ops import relayout
    from .parallel.ulysses import Relayout

    problem = relayout.refusal(choices.device, choices.dtype, dit.head_dim, dit.heads // mesh.tp // mesh.sp)
    return (None, problem) if problem else (Relayout("packed", relayout.pack, relayout.merge), None)


def check_alike(parallel: Parallel, choices: Choices, variant: Variant) -> None:
    """Refuse ranks that have chosen differently, each on its own card. Raises ConfigError on all of them."""
    from .ops import describe
    from .parallel.team import Team

    mine = f"ops {choices.ops.name}, attention {describe(choices.ops)['attention']}, attend {variant.name}"
    if differing := Team(parallel.control).differing(mine):
        raise ConfigError(f"device: the cards do not allow the same: {differing}; name ops, attention and attend")


def settle_variant(variant: Variant, parallel: Parallel, choices: Choices, place: Seat) -> tuple[Parallel, Variant]:
    """Try the pushing that `variant` asks for, now that the ranks have met; what was not named gives way to packed.

    Raises ConfigError where a named variant does not work.
    """
    if not variant.pushed:
        return replace(parallel, strategy=variant.strategy()), variant
    board, problem = open_board(parallel, choices.device, place.local_world)
    if board is None and variant.named:
        raise ConfigError(f"attend: {variant.name}: {problem}; use plain")
    if board is None:
        why = f"auto; passed over: {variant.name}: {problem}"
        variant = replace(variant, name="packed", why=why, chunks=1, pushed=False)
        return replace(parallel, strategy=variant.strategy()), variant
    how = "the ranks write into each other's memory, tried at start-up"
    variant = replace(variant, why=f"{variant.why}: {how}")
    return replace(parallel, strategy=variant.strategy(board), board=board, chunks=variant.chunks), variant


def open_board(parallel: Parallel, device: torch.device, local_ranks: int) -> tuple[Board | None, str | None]:
    """A board over `sp` on which an exchange has worked, or why there is none; the same on all ranks."""
    import torch

    from .parallel.board import Board, HostMemory, PeerMemory, peer_refusal

    sp, control = parallel.sp, parallel.control
    allocate = partial(PeerMemory, sp, device, PATIENCE) if device.type == "cuda" else partial(HostMemory, sp)
    problems = control.tell_all(peer_refusal(device, control.size, local_ranks))
    if problem := next((said for said in problems if said), None):
        return None, problem
    board = Board(sp, control, device, allocate)
    try:
        problem = board.probe()
    except RuntimeError as error:  # the driver's, when it will not share memory
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError:  # a write that never arrived has cost the device its context: nothing runs on it any more
            raise ConfigError(
                f"attend: overlapped: the try at start-up failed for good ({error}); use packed"
            ) from None
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    problems = control.tell_all(problem)
    problem = next((said for said in problems if said), None)
    return (None, problem) if problem else (board, None)


def foresee(mesh: Mesh, variant: Variant, why: Mapping[str, str]) -> dict[str, Any]:
    """What `describe()` will have as `topology`, as far as it is known before the ranks have met."""
    fallback = "" if variant.named else ", else packed"
    untried = f"; the ranks try it at start-up{fallback}" if variant.pushed else ""
    return describe_mesh(mesh, variant.name) | {"why": {**why, "attend": variant.why + untried}}


def describe_mesh(mesh: Mesh, attend: str) -> dict[str, Any]:
    """For reports and `doctor`."""
    conditioner = "fsdp" if mesh.stored > 1 else mesh.text
    return {"ranks": mesh.size, "sp": mesh.sp, "tp": mesh.tp, "conditioner": conditioner, "attend": attend}
