"""One process a rank: where this process stands among them, and how they meet.

The only reader of the launcher's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and of what
else the environment decides.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .parallel import Parallel
    from .parallel.mesh import Mesh

PATIENCE = 20.0  # seconds a collective of the model may take before its ranks count as stuck
MEETING = 300.0  # seconds for all ranks to be there
UNHEARD = 5.0  # seconds of waiting for them before that is said
REMEDY = "a launcher such as torchrun sets it; unset WORLD_SIZE to run alone"
QUIET = {
    # NVLink multicast stays off: nothing here gains by it, and a process that dies with it can take the host's GPUs along
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    # a rank of a stuck collective would first write down its history, and then sleep four times as long, for a minute
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}  # fmt: skip


def wait_asleep() -> None:
    """Let this process's waiting OpenMP threads sleep instead of spin; only before torch is loaded.

    Beside other work, spinning threads slow each other down several times over. What the person set is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet() -> None:
    """No NVLink multicast, and no minute's wait where a collective is stuck, unless the person has set otherwise; only
    before the ranks meet."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Seat:
    """This process among the ranks. `listening`: rank 0's open socket of the meeting place; None where the launcher
    keeps one."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    listening: int | None = None
    started_here: bool = False

    def join(self, mesh: Mesh, backend: str) -> Parallel:
        """Meet the other ranks and form the axes."""
        import datetime

        import torch
        import torch.distributed as dist

        from .parallel.mesh import Unlike, join_mesh

        quiet()
        if backend == "nccl":
            torch.cuda.set_device(self.local_rank)  # whose streams the collectives use

        if not dist.is_initialized():
            where: dict[str, Any] = {"backend": "gloo", "timeout": datetime.timedelta(seconds=MEETING)}
            if self.started_here:
                where |= {"store": self._store(), "rank": self.rank, "world_size": self.world}
            try:
                with self._waiting():
                    apart(partial(dist.init_process_group, **where))
            except dist.DistError as error:
                told = str(error).splitlines()[0][:200]
                taken = "EADDRINUSE" in told or "already in use" in told
                remedy = "name another MASTER_PORT" if taken else "start all of them"
                raise ConfigError(f"the {self.world} ranks did not meet ({told}); {remedy}") from error
            if not self.started_here:  # it ends as Python does, by when the groups' threads must be gone
                atexit.register(leave)
        try:
            return join_mesh(mesh, self.rank, backend=backend, patience=PATIENCE)
        except Unlike as error:
            raise ConfigError(f"sp, tp: each rank chose for itself, not alike: {error}; name sp and tp") from None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say on stderr, in a launcher's first process, that it waits when it does."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        others = f"the other {self.world - 1} of {self.world} ranks"
        told = f"twinreel: rank 0 waits at {place} for {others}, at most {MEETING:.0f} s"
        timer = threading.Timer(UNHEARD, print, (told,), {"file": sys.stderr})
        timer.daemon = True
        if self.rank == 0 and not self.started_here:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _store(self) -> Any:
        import datetime

        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        more: dict[str, Any] = {"master_listen_fd": self.listening} if self.rank == 0 else {}
        return TCPStore(address, port, self.world, self.rank == 0, timeout=datetime.timedelta(seconds=MEETING), **more)


def apart(work: Callable[[], object]) -> None:
    """Do `work` in a thread of its own: this one hears signals meanwhile, however long C code waits there."""
    from .parallel.team import attempt

    done = queue.SimpleQueue[BaseException | None]()
    threading.Thread(target=lambda: done.put(attempt(work)[1]), daemon=True).start()
    if (error := done.get()) is not None:
        raise error


def leave() -> None:
    """Leave the process groups, if there are any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def seat(listening: int | None = None, started_here: bool = False) -> Seat | None:
    """What the launcher's variables say, or None in a process that stands alone. Raises ConfigError where they make no
    sense."""
    world = _number("WORLD_SIZE", 1, 1)
    if world == 1:
        return None
    rank = _number("RANK", None, 0, world - 1)
    local_world = _number("LOCAL_WORLD_SIZE", world, 1, world)
    local_rank = _number("LOCAL_RANK", rank if local_world == world else None, 0, local_world - 1)
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR: is not set, and WORLD_SIZE is {world}; {REMEDY}")
    _number("MASTER_PORT", None, 1, 65_535)
    return Seat(rank, world, local_rank, local_world, listening, started_here)


def stand_alone(what: str) -> None:
    """Refuse to do `what` in each of a launcher's processes. Raises ConfigError."""
    if (place := seat()) is not None:
        raise ConfigError(f"{what}: is for one process, and WORLD_SIZE says {place.world}; start it without a launcher")


def _number(name: str, default: int | None, low: int, high: int | None = None) -> int:
    """A launcher's variable. Raises ConfigError."""
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name}: is not set, and WORLD_SIZE is {os.environ['WORLD_SIZE']}; {REMEDY}")
        return default
    if not re.fullmatch(r"-?\d{1,9}", text) or int(text) < low or (high is not None and int(text) > high):
        bound = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ConfigError(f"{name}: got {text!r:.60}, {bound} is possible; {REMEDY}")
    return int(text)


def module(name: str, *words: str) -> list[str]:
    """The command of a process of ours that runs the module `name`; `environment` says where it is found."""
    return [sys.executable, "-P", "-m", name, *words]  # -P: not a file of that name in the working folder


def environment(more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """This process's variables with `more`, for one that it starts: that finds the modules that this one finds."""
    found = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path if isinstance(path, str))}
    return {**os.environ, **found, **{name: str(value) for name, value in (more or {}).items()}}
