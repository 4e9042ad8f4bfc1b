"""Dense attention: one signature, several implementations, chosen once by name.

Signature: `(q, k, v, used) -> [S, H, d]`; q, k, v are [S, H, d] of one dtype and may be strided views (a qkv
buffer keeps the three interleaved per head). Rows `[0, used)` attend to each other without a mask, non-causally,
scaled by 1/sqrt(d); rows from `used` on are padding, are seen by nobody and come back as zeros (SPEC 2.5, 2.7).

Legend: S rows, H heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _padded(out_SHd: Tensor, rows: int) -> Tensor:
    used = out_SHd.shape[0]
    return out_SHd if used == rows else F.pad(out_SHd, (0, 0, 0, 0, 0, rows - used))


def sdpa(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """PyTorch's scaled_dot_product_attention, whichever kernel it has for the device: the definition of this op."""
    # The batch dim of one matters: without it CPU falls back to the unblocked product, which rounds otherwise.
    # Padding queries are cut off too: CPU rounds a short last block of queries (643 rows in fp32) unlike a full one.
    q, k, v = (x[:used].transpose(0, 1).unsqueeze(0) for x in (q_SHd, k_SHd, v_SHd))
    out_SHd = F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
    return _padded(out_SHd, q_SHd.shape[0])


def cudnn(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """cuDNN's kernel through PyTorch; RuntimeError where it cannot run."""
    if used == 1:  # refused by cuDNN; a softmax over one row is 1
        return _padded(v_SHd[:1].clone(memory_format=torch.contiguous_format), q_SHd.shape[0])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q_SHd, k_SHd, v_SHd, used)


def flash(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """PyTorch's own FlashAttention 2; RuntimeError where it cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q_SHd, k_SHd, v_SHd, used)


def math(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """The plain products with a whole [H, S, S] matrix between them: for small S, and to compare with."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q_SHd, k_SHd, v_SHd, used)


def _all_queries(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, used: int
) -> Tensor:
    """For kernels whose rows do not hang on how many queries there are: padding attends too and is cleared where it lies,
    which saves writing all rows once more behind it."""
    out_SHd = kernel(q, k[:used], v[:used])
    out_SHd[used:].zero_()
    return out_SHd


@library.custom_op("twinreel::fa3", mutates_args=())
def _fa3(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor) -> Tensor:
    # Its own fake imports a module that the wheel lacks; ours stands in front of it.
    from fa3_fwd_interface import flash_attn_func

    # One split: the number that its heuristic picks changes the order of the sums.
    out = flash_attn_func(q_SHd.unsqueeze(0), k_SHd.unsqueeze(0), v_SHd.unsqueeze(0), num_splits=1)
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@_fa3.register_fake
def _(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor) -> Tensor:
    return q_SHd.new_empty(q_SHd.shape)


def fa3(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """FlashAttention 3 from the wheel `fa3_fwd` (the extra `hopper`)."""
    return _all_queries(_fa3, q_SHd, k_SHd, v_SHd, used)


@library.custom_op("twinreel::fa4", mutates_args=())
def _fa4(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q_SHd.unsqueeze(0), k_SHd.unsqueeze(0), v_SHd.unsqueeze(0))
    return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@_fa4.register_fake
def _(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor) -> Tensor:
    return q_SHd.new_empty(q_SHd.shape)


def fa4(q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, used: int) -> Tensor:
    """FlashAttention 4 from the package `flash-attn-4`, for Blackwell. Nobody of this project has run it."""
    return _all_queries(_fa4, q_SHd, k_SHd, v_SHd, used)


@dataclass(frozen=True)
class Kind:
    """One implementation: its function and what it needs. `capability` None runs on the CPU too; `dims` None is any."""

    function: AttentionFn
    capability: tuple[int, int] | None = None
    only: bool = False  # that capability and no other
    halves: bool = False  # 16-bit inputs only
    dims: tuple[int, ...] | None = None
    note: str = ""


KINDS: dict[str, Kind] = {
    "fa3": Kind(fa3, (9, 0), only=True, halves=True, dims=(64, 128), note="the wheel fa3_fwd, extra `hopper`"),
    "fa4": Kind(fa4, (10, 0), halves=True, dims=(64, 128), note="the package flash-attn-4; untested by this project"),
    "cudnn": Kind(cudnn, (8, 0), halves=True),
    "flash": Kind(flash, (8, 0), halves=True),
    "sdpa": Kind(sdpa, note="whichever kernel PyTorch picks"),
    "math": Kind(math, note="memory grows with the square of the rows"),
}


def preference(device: torch.device) -> tuple[str, ...]:
    """The order in which `auto` tries: fastest first, as measured on an H200, elsewhere as published."""
    if device.type == "cpu":
        return ("sdpa",)
    major = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 0
    if major == 9:
        return ("fa3", "cudnn", "flash", "sdpa", "math")
    return ("cudnn", "flash", "sdpa", "math") if major >= 10 else ("flash", "cudnn", "sdpa", "math")


def refusal(kind: Kind, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `kind` cannot run there by what it says of itself, or None."""
    if kind.capability is None:
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    capability, needs = torch.cuda.get_device_capability(device), ".".join(map(str, kind.capability))
    if capability < kind.capability or (kind.only and capability != kind.capability):
        return f"needs compute capability {needs}{'' if kind.only else ' or newer'}, this is {capability}"
    if kind.halves and dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16, not {dtype}"
    if kind.dims and head_dim not in kind.dims:
        return f"takes heads of {' or '.join(map(str, kind.dims))} dims, not {head_dim}"
    return None


def probe(kind: Kind, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run `kind` once over a few rows, strided and padded as in a block; why it failed, or None."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(160, 2, 3, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.double().unbind(2)
    wanted = sdpa(q, k, v, 150)
    q, k, v = qkv.to(device).unbind(2)
    try:
        out = kind.function(q, k, v, 150).cpu().double()
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if out[150:].any():
        return "rows of padding are not zero"
    distance = ((out - wanted).norm() / wanted.norm()).item()
    if not distance < 2e-2:  # bf16 gives 3e-3 to 5e-3
        return f"relative error {distance:.1e} on a probe"
    return None


def choose(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, head_dim: int = 128
) -> tuple[AttentionFn, str]:
    """The dense attention called `name` and why it is the one; `auto` takes the first of `preference` that works.

    Each candidate on a CUDA device is run once here, and never tried again later. ValueError: an unknown name, or one
    that cannot run there.
    """
    device = torch.device(device)
    if name != "auto" and name not in KINDS:
        raise ValueError(f"attention: got {name!r:.80}; use auto, {', '.join(KINDS)}")
    problems: list[str] = []
    for candidate in preference(device) if name == "auto" else (name,):
        kind = KINDS[candidate]
        problem = refusal(kind, device, dtype, head_dim)
        # Without a device there is nothing to probe: the table is then only described, or runs on the CPU.
        if problem is None and (kind.capability is not None or torch.cuda.is_available()) and device.type == "cuda":
            problem = probe(kind, device, dtype, head_dim)
        if problem is None:
            note = f" ({kind.note})" if kind.note else ""
            passed = f"; passed over: {'; '.join(problems)}" if problems else ""
            return kind.function, ("asked for" if name != "auto" else f"auto on {device}") + note + passed
        problems.append(f"{candidate} {problem}")
    raise ValueError(f"attention: {name} is not available on {device}: {', '.join(problems)}; use auto")
