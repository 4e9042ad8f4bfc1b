"""Kernels that round fp32 to bf16 and to e4m3 both ways: by arithmetic, and as the kernels do it."""

import triton
import triton.language as tl

from twinreel.ops.rounding import e4m3_bits, round_bf16, round_bits, to_e4m3


@triton.jit
def both_ways(x, bits, used, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places)
    tl.store(bits + places, round_bits(value))
    tl.store(used + places, round_bf16(value))


@triton.jit
def narrow_both_ways(x, bits, used, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places)
    tl.store(bits + places, e4m3_bits(value))
    tl.store(used + places, to_e4m3(value))
