# mypy: allow-untyped-defs
"""What every kernel shares: rounding to bf16, and SiLU. All arithmetic between loads and stores is fp32."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Triton's interpreter runs the kernels on CPU tensors; it was chosen before this import, by TRITON_INTERPRET=1.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# No joining of a product and a sum into one rounding: the reference rounds both. Passed to every launch.
EXACT = {"enable_fp_fusion": False}


@triton.jit
def round_bits(x):
    """fp32 -> the nearest bf16, ties to even, as fp32: by integer operations, the same everywhere. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    # The addition would carry a NaN's mantissa into its sign and turn it into a zero.
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@triton.jit
def round_bf16(x):
    """`round_bits`, by the hardware's conversion where there is one; the interpreter's would truncate."""
    if INTERPRETED:
        rounded = round_bits(x)
    else:
        rounded = x.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def round_like(x, pointer):
    """fp32 -> the nearest value of the dtype that `pointer` points to (bf16 or fp32), as fp32."""
    if pointer.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x)
    return x


@triton.jit
def silu(x):
    """`x / (1 + exp(-x))` in fp32 with the exponential and the division that PyTorch's CUDA kernel uses."""
    if INTERPRETED:
        power = tl.exp(-x)
    else:
        # tl.exp and `/` are the approximate instructions; a last fp32 bit may flip the bf16 one.
        power = libdevice.exp(-x)
    return tl.div_rn(x, 1.0 + power)
