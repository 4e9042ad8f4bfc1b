# mypy: allow-untyped-defs
"""3x3x3 convolutions of the video encoder in fp32 by Winograd's F(2x2x2, 3x3x3): 64 products make the 8 outputs of two
frames of 2x2 pixels that 216 make otherwise. What goes into a product and what comes out are sums and differences.

The first frame has only zeros before it: it is the second half of a pair whose first half is not there, and of such a
pair's products only the last 16 are more than zeros. Channels are innermost.

Legend: B clips, F frames, H, W pixels, C channels in, O out; P pairs of frames after the first one; a tile is 2x2 pixels.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, library, nn

from twinreel.ops.frames import PAST
from twinreel.ops.rounding import EXACT

BUDGET = 1 << 30  # bytes of what goes into the products of one strip of tiles and what comes out
VALUES = 256  # of one of the 64 transformed values, in flight
FIRST = 48  # products of whole pairs alone; the other 16 are the first frame's too
WHOLE = 64
# Rows: what a product takes of four inputs; of three weights; what an output takes of four products.
WEIGHTS = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))


@triton.jit
def _line(x, C: tl.constexpr, there, right):
    """Four pixels of a line -> its four transformed values."""
    a, b = tl.load(x, mask=there, other=0.0), tl.load(x + C, mask=there, other=0.0)
    c, d = tl.load(x + 2 * C, mask=there, other=0.0), tl.load(x + 3 * C, mask=there & right, other=0.0)
    return a - c, b + c, c - b, b - d


@triton.jit
def _plane(x, line, C: tl.constexpr, there, below, right):
    """4x4 pixels of a frame -> their sixteen transformed values."""
    a0, a1, a2, a3 = _line(x, C, there, right)
    b0, b1, b2, b3 = _line(x + line, C, there, right)
    c0, c1, c2, c3 = _line(x + 2 * line, C, there, right)
    d0, d1, d2, d3 = _line(x + 3 * line, C, there & below, right)
    return (
        a0 - c0, a1 - c1, a2 - c2, a3 - c3, b0 + c0, b1 + c1, b2 + c2, b3 + c3,
        c0 - b0, c1 - b1, c2 - b2, c3 - b3, b0 - d0, b1 - d1, b2 - d2, b3 - d3,
    )  # fmt: skip


@triton.jit
def _input_kernel(
    x_FHWC, v, frames, height, width, first, tiles, across,
    C: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    pair, pairs = tl.program_id(1), tl.num_programs(1) - 1
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    y, x = 2 * (first + tile // across), 2 * (tile % across)
    there, below, right = (tile < tiles)[:, None], (y + 3 < height)[:, None], (x + 3 < width)[:, None]
    plane = height.to(tl.int64) * width * C
    source = x_FHWC + (2 * pair - 1) * plane + (y * width + x)[:, None] * C + channels
    inside = tile[:, None] * C + channels
    line = width * C
    second = _plane(source + plane, line, C, there, below, right)
    third = _plane(source + 2 * plane, line, C, there, below, right)
    each = pairs.to(tl.int64) * tiles * C
    if pair > 0:
        at = v + (pair - 1).to(tl.int64) * tiles * C + inside
        zeroth = _plane(source, line, C, there, below, right)
        for k in tl.static_range(16):
            tl.store(at + k * each, zeroth[k] - third[k], mask=there)
            tl.store(at + (16 + k) * each, second[k] + third[k], mask=there)
            tl.store(at + (32 + k) * each, third[k] - second[k], mask=there)
    fourth = _plane(source + 3 * plane, line, C, there & (2 * pair + 2 < frames), below, right)
    at = v + FIRST * each + pair.to(tl.int64) * tiles * C + inside
    each += tiles * C
    for k in tl.static_range(16):
        tl.store(at + k * each, second[k] - fourth[k], mask=there)


@triton.jit
def _pair(m, last, each, there, earlier):
    """Four products, one after the other in time -> the values of two frames."""
    a, b = tl.load(m, mask=earlier, other=0.0), tl.load(m + 16 * each, mask=earlier, other=0.0)
    c, d = tl.load(m + 32 * each, mask=earlier, other=0.0), tl.load(last, mask=there, other=0.0)
    return a + b + c, b - c - d


@triton.jit
def _column(m, last, each, longer, there, earlier):
    """Sixteen products, one above the other -> the values of two frames' two rows."""
    a0, a1 = _pair(m, last, each, there, earlier)
    b0, b1 = _pair(m + 4 * each, last + 4 * longer, each, there, earlier)
    c0, c1 = _pair(m + 8 * each, last + 8 * longer, each, there, earlier)
    d0, d1 = _pair(m + 12 * each, last + 12 * longer, each, there, earlier)
    return a0 + b0 + c0, b0 - c0 - d0, a1 + b1 + c1, b1 - c1 - d1


@triton.jit
def _output_kernel(
    m, bias_O, y_FHWO, frames, height, width, first, tiles, across,
    OUT: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    pair, pairs = tl.program_id(1), tl.num_programs(1) - 1
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    there = (tile < tiles)[:, None] & (channels < OUT)
    earlier = there & (pair > 0)
    inside = tile[:, None] * OUT + channels
    each = pairs.to(tl.int64) * tiles * OUT
    longer = each + tiles * OUT
    whole = m + (pair - 1).to(tl.int64) * tiles * OUT + inside
    last = m + FIRST * each + pair.to(tl.int64) * tiles * OUT + inside
    a = _column(whole, last, each, longer, there, earlier)
    b = _column(whole + each, last + longer, each, longer, there, earlier)
    c = _column(whole + 2 * each, last + 2 * longer, each, longer, there, earlier)
    d = _column(whole + 3 * each, last + 3 * longer, each, longer, there, earlier)
    bias = tl.load(bias_O + channels, mask=channels < OUT, other=0.0)
    for k in tl.static_range(4):
        frame, y, x = 2 * pair - 1 + k // 2, 2 * (first + tile // across) + k % 2, 2 * (tile % across)
        fits = there & ((frame >= 0) & (frame < frames)) & (y < height)[:, None]
        at = y_FHWO + ((frame.to(tl.int64) * height + y) * width + x)[:, None] * OUT + channels
        tl.store(at, a[k] + b[k] + c[k] + bias, mask=fits)
        tl.store(at + OUT, b[k] - c[k] - d[k] + bias, mask=fits & (x + 1 < width)[:, None])


def prepare(conv: nn.Conv3d) -> None:
    """Turn the weight of a 3x3x3 convolution of stride 1 into what the products take, `taps` fp32 [64, C, O], made in
    fp64. The stored weight goes: nothing reads it any more. Other convolutions, and channels that are no power of two,
    stay as they are."""
    if conv.kernel_size != (3, 3, 3) or conv.stride != (1, 1, 1) or conv.in_channels & (conv.in_channels - 1):
        return
    if conv.weight is None:
        return
    matrix = conv.weight.new_tensor(WEIGHTS, dtype=torch.float64)
    taps = conv.weight.new_empty(WHOLE, conv.in_channels, conv.out_channels)
    for part, row in zip(taps.split(16), matrix, strict=True):  # a quarter at a time: fp64 takes room
        plane = torch.einsum("t,octyx->ocyx", row, conv.weight.detach().double())
        part.copy_(torch.einsum("iy,jx,ocyx->ijco", matrix, matrix, plane).flatten(0, 1))
    conv.register_parameter("weight", None)
    conv.register_buffer("taps", taps, persistent=False)


def convolve(x_BCFHW: Tensor, conv: nn.Conv3d) -> Tensor:
    """See `frames.FrameOps`; channels innermost come out. Strided convolutions are cuDNN's, which has fast ones in fp32
    only where pixels are innermost."""
    if isinstance(taps := getattr(conv, "taps", None), Tensor):
        return winograd(x_BCFHW.permute(0, 2, 3, 4, 1), taps, conv.bias).permute(0, 4, 1, 2, 3)
    if conv.kernel_size == (1, 1, 1):
        return F.linear(x_BCFHW.permute(0, 2, 3, 4, 1), conv.weight.flatten(1), conv.bias).permute(0, 4, 1, 2, 3)
    y_BOFHW = F.conv3d(x_BCFHW.contiguous(), conv.weight, conv.bias, conv.stride)
    return y_BOFHW.contiguous(memory_format=torch.channels_last_3d)


@library.custom_op("twinreel::winograd", mutates_args=())
def winograd(x_BFHWC: Tensor, taps_64CO: Tensor, bias_O: Tensor) -> Tensor:
    """The convolution of padded frames [B, F + 2, H + 2, W + 2, C], the first two of a clip zeros: fp32 [B, F, H, W, O].

    Strips of tiles follow from the sizes alone, so free memory changes no bit."""
    assert x_BFHWC.is_contiguous() and x_BFHWC.dtype == taps_64CO.dtype == torch.float32, (x_BFHWC.shape, x_BFHWC.dtype)
    y_BFHWO = _like(x_BFHWC, taps_64CO)
    frames, height, width = y_BFHWO.shape[1:4]
    rows, across = triton.cdiv(height, 2), triton.cdiv(width, 2)
    strip = strip_rows(frames, rows, across, *taps_64CO.shape[1:])
    with torch.cuda.device_of(x_BFHWC):
        for x_FHWC, y_FHWO in zip(x_BFHWC, y_BFHWO, strict=True):
            for first in range(0, rows, strip):
                _strip(x_FHWC, taps_64CO, bias_O, y_FHWO, first, min(strip, rows - first))
    return y_BFHWO


@winograd.register_fake
def _like(x_BFHWC, taps_64CO, bias_O=None):
    batch, frames, height, width, _ = x_BFHWC.shape
    return x_BFHWC.new_empty(batch, frames - PAST, height - 2, width - 2, taps_64CO.shape[2])


def strip_rows(frames: int, rows: int, across: int, inputs: int, outputs: int) -> int:
    """Rows of tiles at a time: as many as `BUDGET` allows, in strips of about equal height."""
    return triton.cdiv(rows, triton.cdiv(rows, max(1, BUDGET // (products(frames) * across * (inputs + outputs) * 4))))


def products(frames: int) -> int:
    """Products for each tile of a clip: 64 a pair, 16 for the first frame."""
    return WHOLE * (frames // 2) + WHOLE - FIRST


def _strip(x_FHWC: Tensor, taps_64CO: Tensor, bias_O: Tensor, y_FHWO: Tensor, first: int, rows: int) -> None:
    """Rows `first` to `first + rows` of tiles, for all frames of a clip."""
    frames, across = y_FHWO.shape[0], triton.cdiv(y_FHWO.shape[2], 2)
    pairs, tiles = frames // 2, rows * across
    inputs, outputs = taps_64CO.shape[1:]
    v, m = (x_FHWC.new_empty(products(frames) * tiles * channels) for channels in (inputs, outputs))
    where = first, tiles, across
    wide = min(128, inputs)
    _input_kernel[(triton.cdiv(tiles, VALUES // wide), pairs + 1, inputs // wide)](
        x_FHWC, v, *x_FHWC.shape[:3], *where, C=inputs, BLOCK=VALUES // wide, CHANNELS=wide, FIRST=FIRST,
        num_warps=4, **EXACT,
    )  # fmt: skip
    multiply(v, taps_64CO, m, pairs * tiles, tiles)
    wide = min(128, triton.next_power_of_2(outputs))
    _output_kernel[(triton.cdiv(tiles, VALUES // wide), pairs + 1, triton.cdiv(outputs, wide))](
        m, bias_O, y_FHWO, *y_FHWO.shape[:3], *where, OUT=outputs, BLOCK=VALUES // wide, CHANNELS=wide, FIRST=FIRST,
        num_warps=4, **EXACT,
    )  # fmt: skip


def multiply(v: Tensor, taps_64CO: Tensor, m: Tensor, whole: int, more: int) -> None:
    """`m = v @ taps`, each of the first 48 matrices over `whole` rows, each of the last 16 over `more` rows more."""
    inputs, outputs = taps_64CO.shape[1:]
    for taps, rows, begin in ((taps_64CO[:FIRST], whole, 0), (taps_64CO[FIRST:], whole + more, FIRST * whole)):
        if rows:
            end = begin + len(taps) * rows
            into = m[begin * outputs : end * outputs].view(-1, rows, outputs)
            torch.bmm(v[begin * inputs : end * inputs].view(-1, rows, inputs), taps, out=into)
