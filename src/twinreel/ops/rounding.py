# mypy: allow-untyped-defs
"""What every kernel shares: rounding to bf16 and to e4m3, and SiLU. Arithmetic between loads and stores is fp32."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Triton's interpreter runs the kernels on CPU tensors; it was chosen before this import, by TRITON_INTERPRET=1.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# The largest e4m3 value; and what stands for the largest of values that are all zero. `reference` has them too.
LARGEST, SMALLEST = tl.constexpr(448.0), tl.constexpr(2.0**-60)

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
    """The nearest value of the dtype that `pointer` points to (bf16, fp16 or fp32), as fp32."""
    if pointer.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x)
    elif pointer.dtype.element_ty == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def e4m3_bits(x):
    """fp32 of size at most 464 -> the byte of the nearest e4m3 value, ties to even, by arithmetic that is the same
    everywhere. NaN is 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # three bits of mantissa, exponent bias 7
    # below 2^-6 lie the multiples of 2^-9, which is the last place of 2^14: the addition rounds to it
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(tl.abs(x) < 0.015625, small, normal)
    return (tl.where(x == x, byte, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e4m3(x):
    """`e4m3_bits`, by the hardware's conversion (compute capability 8.9) where there is one."""
    if INTERPRETED:
        byte = e4m3_bits(x)
    else:
        byte = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return byte


@triton.jit
def scales_of(most):
    """The largest size of a group of values -> what they are multiplied by before rounding to e4m3, and after."""
    most = tl.maximum(most, SMALLEST)
    return tl.div_rn(LARGEST, most), most * (1.0 / LARGEST)


@triton.jit
def silu(x):
    """`x / (1 + exp(-x))` in fp32 with the exponential and the division that PyTorch's CUDA kernel uses."""
    if INTERPRETED:
        power = tl.exp(-x)
    else:
        # tl.exp and `/` are the approximate instructions; a last fp32 bit may flip the bf16 one.
        power = libdevice.exp(-x)
    return tl.div_rn(x, 1.0 + power)
