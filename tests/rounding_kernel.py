"""A kernel that rounds fp32 to bf16 both ways: by integers, and as the kernels do it."""

import triton
import triton.language as tl

from twinreel.ops.rounding import round_bf16, round_bits


@triton.jit
def both_ways(x, bits, used, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places)
    tl.store(bits + places, round_bits(value))
    tl.store(used + places, round_bf16(value))
