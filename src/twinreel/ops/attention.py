"""Dense attention: one signature, several implementations, chosen once by name.

Signature: `(q, k, v, used) -> [S, H, d]`; q, k, v are [S, H, d] of one dtype and may be strided views (a qkv
buffer keeps the three interleaved per head). Rows `[0, used)` attend to each other without a mask, non-causally,
scaled by 1/sqrt(d); rows from `used` on are padding, are seen by nobody and come back as zeros (SPEC 2.5, 2.7).

Legend: S rows, H heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

AttentionFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def sdpa(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """PyTorch's scaled_dot_product_attention, whichever kernel it has for the device: the definition of this op."""
    rows = q_SHd.shape[0]
    # The batch dim of one matters: without it CPU falls back to the unblocked product, which rounds otherwise.
    # Padding queries are cut off too: CPU rounds a short last block of queries (643 rows in fp32) unlike a full one.
    q, k, v = (x[:used].transpose(0, 1).unsqueeze(0) for x in (q_SHd, k_SHd, v_SHd))
    out_SHd = F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
    return out_SHd if used == rows else F.pad(out_SHd, (0, 0, 0, 0, 0, rows - used))


# Name -> device types that can run it and the function, in the order in which `auto` prefers them.
IMPLEMENTATIONS: dict[str, tuple[frozenset[str], AttentionFn]] = {
    "sdpa": (frozenset({"cpu", "cuda"}), sdpa),
}


def choose(name: str = "auto", device: str = "cpu") -> AttentionFn:
    """The dense attention called `name`; `auto` takes the first one for a device type.

    ValueError: an unknown name, or one that the device type cannot run; the message lists what it can.
    """
    able = [known for known, (devices, _) in IMPLEMENTATIONS.items() if device in devices]
    if name == "auto" and able:
        return IMPLEMENTATIONS[able[0]][1]
    if name not in able:
        raise ValueError(f"attention {name!r} is not available on {device!r}; known there: auto, {', '.join(able)}")
    return IMPLEMENTATIONS[name][1]
