"""Two ranks of `overlapped` on one GPU, as threads: streams, slots and pieces, under pauses that let them drift apart."""

from __future__ import annotations

import pytest
import torch

from board_cases import check_threads
from twinreel.ops.attention import sdpa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_streams_wait_for_what_they_read(chunks: int) -> None:
    from twinreel.ops import relayout
    from twinreel.parallel.ulysses import Relayout

    kernels = Relayout("packed", relayout.pack, relayout.merge)
    for _ in range(3):
        check_threads("cuda:0", sdpa, kernels, chunks, "triton")
