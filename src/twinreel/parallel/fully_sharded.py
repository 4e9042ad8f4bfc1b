"""A module whose stored weights are spread over ranks and gathered layer by layer when they are used (FSDP2): every rank
computes everything, with the bits of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from twinreel.parallel.axis import Axis


class Gathered:
    """`module`, called as it was before; each of `parts`, and then the rest, lies spread over `axis`.

    All ranks call it together. Weights must be there, the same on each rank; afterwards a rank keeps its part of them.
    """

    def __init__(self, module: nn.Module, parts: Sequence[nn.Module], axis: Axis, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        self._module = module
        # FSDP writes into buffers of its own, which inference mode would forbid the next time
        with torch.inference_mode(False), torch.no_grad():
            mesh = DeviceMesh.from_group(axis.group, device.type)
            for part in (*parts, module):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)

    def __call__(self, *arguments: Any) -> Any:
        """What the module makes of them, on every rank."""
        with torch.inference_mode(False), torch.no_grad():
            return self._module(*arguments)
