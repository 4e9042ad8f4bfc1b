"""AdaLN tables made beforehand, so that its 13 billion parameters need not stay in memory (SPEC 2.3).

A request's timesteps are known before its first step. `PrecomputedModulation` runs the projections of `LiveModulation`
over them, one projection in memory at a time, and keeps what came out: bit-equal, because each step's distinct
timesteps go through as the same batch as live.

Legend: M distinct timesteps of a step, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinreel.models.modulation import (
    BRANCH_VECTORS,
    MODALITIES,
    StepModulation,
    StepRows,
    TimeEmbedder,
    embed_timesteps,
)
from twinreel.parallel import Parallel
from twinreel.parallel.team import Team
from twinreel.spec import DiTSpec

if TYPE_CHECKING:
    from twinreel.watch import Stages

# Both are bounds beside those of `make_room`; what comes out of host memory is made again when asked for.
ON_DEVICE = 2  # schedules whose tables may be on the device, the current one included
ON_HOST = 6  # older ones in host memory

EMBEDDER, BLOCKS, FINAL = "time_embedder.", "blocks.", "final_layer."
# A prefix of parameter names -> those parameters of `LiveModulation`, whole, one after the other, on the device: the
# time embedder's in fp32, the projections' in the dtype of the blocks.
Source = Callable[[str], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class StepTables:
    """One step's tables in block dtype: `blocks` [layers, M, 3*6*D] and `final` [M, 2D]."""

    blocks: Tensor
    final: Tensor

    def to(self, device: torch.device | str) -> StepTables:
        """Both on `device`."""
        return StepTables(self.blocks.to(device), self.final.to(device))


Schedule = Mapping[bytes, StepTables]


def step_key(timesteps_M: Tensor) -> bytes:
    """The exact bits of a step's distinct timesteps."""
    assert timesteps_M.dtype == torch.float32
    return timesteps_M.cpu().numpy().tobytes()


class PrecomputedModulation:
    """A `Modulation` whose projections are read when a schedule is first met. dtype: of the blocks.

    Tables are kept by the bits of the schedule's timesteps and by `version` of the weights: at most `ON_DEVICE`
    schedules on the device, at most `ON_HOST` older ones in host memory. Several ranks read and make the tables of every
    so-manieth layer each, whole projections, so that the bits are those of one rank, and gather them once.
    """

    def __init__(
        self, spec: DiTSpec, dtype: torch.dtype, device: torch.device | str, source: Source, version: Callable[[], str],
        *, parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self._source, self._version = source, version
        self._ranks = (parallel or Parallel.single()).every
        self._team = Team((parallel or Parallel.single()).control)
        self._schedules: dict[tuple[str, frozenset[bytes]], Schedule] = {}  # the most recently used last
        self._on_device: set[tuple[str, frozenset[bytes]]] = set()
        self._current: Schedule = {}
        self._spare = inf, inf

    def prepare(self, timesteps: Sequence[Tensor], stages: Stages | None = None) -> dict[str, Any]:
        """Find the schedule's tables or make them, which is a stage `load`. Whatever is raised meanwhile, none is lost.

        Raises CheckpointError when the weights cannot be read, and what a listener of `stages` raises.
        """
        start = time.monotonic()
        steps = {step_key(step): step for step in timesteps}
        key = self._version(), frozenset(steps)
        found = "device" if key in self._on_device else "host" if key in self._schedules else None
        if found != "device":
            self._vacate(ON_DEVICE - 1)
        if found is None:
            self._trim(*self._spare)
            with stages.stage("load", self.spec.layers + 1) if stages else nullcontext():
                schedule: Schedule = self._gathered(self._team.together(lambda: self._build(steps, stages)))
        else:
            schedule = self._schedules[key]
        if found == "host":
            schedule = {step: tables.to(self.device) for step, tables in schedule.items()}
        self._schedules.pop(key, None)
        self._schedules[key] = self._current = schedule
        self._on_device.add(key)
        self._forget()
        seconds = round(time.monotonic() - start, 3)
        return {"adaln": "precompute", "tables": found or "made", "seconds": seconds, "bytes": self._size([key])}

    def step(self, timesteps_M: Tensor, rows: StepRows) -> StepModulation:
        """See `Modulation.step`; only for timesteps that were prepared."""
        tables = self._current.get(step_key(timesteps_M))
        assert tables is not None, f"no tables for the timesteps {timesteps_M.tolist()}: prepare the schedule first"
        return StepModulation(
            block_table=lambda index: tables.blocks[index],
            final_table=tables.final,
            rows=rows.table,
            timestep_rows=rows.timestep,
        )

    def release(self) -> None:
        """Leave the device: every table moves to host memory."""
        self._current = {}
        self._vacate(0)
        self._forget()

    def make_room(self, device: float, host: float, own: int = 0) -> tuple[int, int]:
        """Let the oldest go until tables take no more than `host` bytes, which all of them may come to need, and on the
        device no more than `device`, besides the `own` bytes of the schedule that is to be prepared next: those may be
        among them. Returns what is then taken of each."""
        self._current, self._spare = {}, (device, host)
        self._trim(device + own, host + own)
        return max(0, self._size(self._on_device) - own), max(0, self.nbytes - own)

    def _trim(self, device: float, host: float) -> None:
        while self._schedules and self.nbytes > host:
            oldest = next(iter(self._schedules))
            del self._schedules[oldest]
            self._on_device.discard(oldest)
        while self._on_device and self._size(self._on_device) > device:
            self._vacate(len(self._on_device) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, wherever they are."""
        return self._size(self._schedules)

    def _size(self, keys: Iterable[tuple[str, frozenset[bytes]]]) -> int:
        return sum(t.blocks.nbytes + t.final.nbytes for key in keys for t in self._schedules[key].values())

    @property
    def held(self) -> dict[str, int]:
        """How many schedules are on the device and in host memory."""
        return {"device": len(self._on_device), "host": len(self._schedules) - len(self._on_device)}

    def _vacate(self, keep: int) -> None:
        """Move all but the `keep` most recently used schedules off the device."""
        there = [key for key in self._schedules if key in self._on_device]
        for key in there[: max(0, len(there) - keep)]:
            self._schedules[key] = {step: tables.to("cpu") for step, tables in self._schedules[key].items()}
            self._on_device.discard(key)

    def _forget(self) -> None:
        hosted = [key for key in self._schedules if key not in self._on_device]
        for key in hosted[: max(0, len(hosted) - ON_HOST)]:
            del self._schedules[key]

    @torch.no_grad()
    def _build(self, steps: Mapping[bytes, Tensor], stages: Stages | None) -> Schedule:
        embedder = self._embedder()
        embeddings = {key: embed_timesteps(embedder, step.to(self.device), self.dtype) for key, step in steps.items()}
        layers, hidden = self.spec.layers, self.spec.hidden
        width = MODALITIES * BRANCH_VECTORS * hidden
        schedule = {
            key: StepTables(
                torch.empty(layers, len(g_MC), width, dtype=self.dtype, device=self.device),
                torch.empty(len(g_MC), 2 * hidden, dtype=self.dtype, device=self.device),
            )
            for key, g_MC in embeddings.items()
        }
        done = 0
        for layer, weight, bias in self._projections():
            for key, g_MC in embeddings.items():
                # one product a step: a product over another number of rows may round otherwise
                table = F.linear(g_MC, weight, bias)
                (schedule[key].final if layer is None else schedule[key].blocks[layer]).copy_(table)
            done += 1
            if stages:
                stages.tell(min(layers + 1, done * self._ranks.size), layers + 1, "AdaLN tables")
        expected = len(range(layers)[self._ranks.rank :: self._ranks.size]) + 1
        assert done == expected, f"{done} of {expected} projections came"
        return schedule

    def _gathered(self, schedule: Schedule) -> Schedule:
        """The layers of all ranks."""
        ranks = self._ranks
        if ranks.size == 1:
            return schedule
        for tables in schedule.values():
            blocks = tables.blocks
            own = blocks[ranks.rank :: ranks.size]
            padded = blocks.new_zeros(-(-len(blocks) // ranks.size), *blocks.shape[1:])
            padded[: len(own)] = own
            # [part, rank] back to layers: layer = part * ranks + rank
            dealt = ranks.all_gather(padded.unsqueeze(1), dim=1).flatten(0, 1)
            blocks.copy_(dealt[: len(blocks)])
        return schedule

    def _embedder(self) -> TimeEmbedder:
        with torch.device("meta"):
            embedder = TimeEmbedder(self.spec)
        embedder.load_state_dict({name.removeprefix(EMBEDDER): x for name, x in self._source(EMBEDDER)}, assign=True)
        return embedder

    def _projections(self) -> Iterator[tuple[int | None, Tensor, Tensor]]:
        """(layer, weight, bias) of every projection that is this rank's to run; None is the output norm's."""
        ranks, every = self._ranks, range(self.spec.layers)
        own = [BLOCKS] if ranks.size == 1 else [f"{BLOCKS}{layer}." for layer in every[ranks.rank :: ranks.size]]
        for prefix in (*own, FINAL):
            waiting: dict[str, dict[str, Tensor]] = {}
            for name, tensor in self._source(prefix):
                stem, _, leaf = name.rpartition(".")
                pair = waiting.setdefault(stem, {})
                pair[leaf] = tensor
                del tensor
                if len(pair) == 2:
                    yield None if prefix == FINAL else int(stem.split(".")[1]), pair["weight"], pair["bias"]
                    del waiting[stem], pair
            assert not waiting, f"half of a projection came: {sorted(waiting)[:10]}"
