"""The mesh: which ranks form which axis. Rank = sp rank * tp + tp rank, so that tp neighbours are neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from twinreel.parallel import Axis, Meter, Parallel
from twinreel.parallel.team import Team


@dataclass(frozen=True)
class Mesh:
    """How many ranks each axis has. `text` divides sp * tp; the conditioner is replicated over the rest. `stored`: one,
    or all ranks, over which its weights are spread instead."""

    sp: int = 1
    tp: int = 1
    text: int = 1
    stored: int = 1

    def __post_init__(self) -> None:
        if min(self.sp, self.tp, self.text) < 1 or self.size % self.text:
            raise ValueError(f"a mesh needs positive sizes, and text to divide sp * tp; got {self}")
        if self.stored not in (1, self.size) or min(self.stored, self.text) > 1:
            raise ValueError(f"the conditioner is split, or stored over all ranks, or neither; got {self}")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.sp * self.tp

    def members(self, name: str) -> Iterator[list[int]]:
        """The groups of ranks along an axis, each in the axis' order."""
        if name == "sp":
            yield from (list(range(first, self.size, self.tp)) for first in range(self.tp))
        else:
            width = {"tp": self.tp, "text": self.text, "stored": self.stored, "every": self.size}[name]
            yield from (list(range(first, first + width)) for first in range(0, self.size, width))


class Unlike(ValueError):
    """Ranks have chosen different meshes, each for itself."""


def join_mesh(mesh: Mesh, rank: int, *, backend: str, patience: float) -> Parallel:
    """This rank's axes; every rank of torch.distributed's default group calls it. Raises Unlike.

    `backend`: of what the model exchanges (`nccl`, `gloo`); the default group, of CPU tensors, is the control axis. A
    collective of the model that takes more than `patience` seconds is an error.
    """
    import torch.distributed as dist

    meter = Meter()
    control = Axis("control", mesh.size, rank) if mesh.size > 1 else Axis("control")
    split = f"over {mesh.stored} ranks" if mesh.stored > 1 else f"in {mesh.text}"
    if differing := Team(control).differing(f"sp {mesh.sp} x tp {mesh.tp}, conditioner {split}"):
        raise Unlike(differing)

    def axis(name: str) -> Axis:
        mine = Axis(name)
        for members in mesh.members(name):
            if len(members) > 1:  # every rank takes part in making every group
                group: Any = dist.new_group(members, timeout=timedelta(seconds=patience), backend=backend)
                if rank in members:
                    patient = control if len(members) == mesh.size else None
                    mine = Axis(name, len(members), members.index(rank), group, meter, patient)
        return mine

    axes = {name: axis(name) for name in ("sp", "tp", "text", "stored", "every")}
    return replace(
        Parallel(axes["sp"], axes["tp"], text=axes["text"], every=axes["every"]),
        stored=axes["stored"],
        control=control,
    )
