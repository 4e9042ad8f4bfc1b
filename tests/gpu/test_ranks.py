"""The relayout over real devices: NCCL and the compiled kernels, by the contract that the CPU's ranks keep.

`pytest tests/gpu/test_ranks.py` skips where there are fewer than two GPUs. `python tests/gpu/test_ranks.py 4` is strict:
it fails unless so many devices, NCCL and the compiled kernels ran. Both print what ran.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks import Place, Pool
from relayout_cases import check_contract
from twinreel.parallel.mesh import Mesh, join_mesh
from twinreel.parallel.ulysses import PLAIN, Relayout, Ulysses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def contract(place: Place) -> dict[str, str]:
    """Both relayouts in both dtypes on one rank; what ran."""
    import torch.distributed as dist

    from twinreel.ops import relayout
    from twinreel.ops.rounding import INTERPRETED

    device = f"cuda:{place.rank}"
    torch.cuda.set_device(device)
    sp = join_mesh(Mesh(sp=place.world), place.rank, Ulysses, backend="nccl", patience=60).sp
    for dtype in (torch.float32, torch.bfloat16):
        check_contract(sp, PLAIN, "reference", device, dtype)
        check_contract(sp, Relayout("packed", relayout.pack, relayout.merge), "triton", device, dtype)
    return {
        "device": f"{device} {torch.cuda.get_device_name(device)}",
        "backend": dist.get_backend(sp.group),
        "kernels": "interpreted" if INTERPRETED.value else "compiled",
    }


def run(world: int) -> None:
    """The contract over `world` devices, strictly."""
    assert torch.cuda.device_count() >= world, f"{world} devices are needed, {torch.cuda.device_count()} are here"
    pool = Pool(world, Path(tempfile.mkdtemp()))
    try:
        facts = pool.run(contract)
    finally:
        pool.close()
    for fact in facts:
        print(f"relayout contract, CUDA mode: {fact}")
        assert (fact["backend"], fact["kernels"]) == ("nccl", "compiled"), fact
    assert len({fact["device"] for fact in facts}) == world


def test_the_contract_of_a_relayout() -> None:
    run(4 if torch.cuda.device_count() >= 4 else 2)


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
