"""What the Triton kernels are checked for, on whichever device: the interpreter's CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from twinreel.models.layers import RMSNorm
from twinreel.models.modulation import BlockModulation, Gated
from twinreel.ops import Ops, frames, select, vit
from twinreel.schedule import Grid, factors

DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = select("reference")
# rows, width: one row, few values; an odd width; the released width
SHAPES = ((1, 24), (13, 72), (12, 5376))
# heads, head dim, rotary angles: all dims turn; some do; the released sizes; more heads than one program takes
HEADS = ((3, 8, 4), (3, 40, 5), (2, 128, 48), (70, 16, 4))


@dataclass(frozen=True)
class Case:
    """Inputs of the row ops, with tables as `StepModulation` cuts them: columns of one wide table."""

    x: Tensor
    h: Tensor
    norm: RMSNorm
    mod: BlockModulation


def draw(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Normal values, drawn on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm(size: int, dtype: torch.dtype, seed: int, device: str) -> RMSNorm:
    """An RMS norm with a drawn weight."""
    module = RMSNorm(size, 1e-5, dtype).requires_grad_(False).to(device)
    module.weight.copy_(draw(size, seed=seed, dtype=dtype, device=device))
    return module


def make_case(rows: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """Inputs of one shape. The two branches read different rows of the tables."""
    table = draw(6, 6 * width, seed=seed + 3, dtype=dtype, device=device)
    parts = table.chunk(6, dim=-1)
    generator = torch.Generator().manual_seed(seed + 4)
    first, second = (torch.randint(0, 6, (rows,), generator=generator).to(device) for _ in range(2))
    mod = BlockModulation(
        msa=Gated(parts[0], parts[1], first, parts[2]), mlp=Gated(parts[3], parts[4], second, parts[5])
    )
    x, h = (draw(rows, width, seed=seed + i, dtype=dtype, device=device) for i in range(2))
    return Case(x, h, norm(width, dtype, seed + 2, device), mod)


def read_alike(mod: BlockModulation, rows: Tensor) -> BlockModulation:
    """The same tables, both branches read by `rows`."""
    return BlockModulation(msa=replace(mod.msa, rows=rows), mlp=replace(mod.mlp, rows=rows))


def order(x: Tensor) -> Tensor:
    """bf16 values as integers in which neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_close(out: Tensor, wanted: Tensor, product: Tensor | None = None) -> None:
    """The contract where a row sum is involved: at most one bf16 ulp on at most 1e-5 of the elements (one of few).

    After a modulation that ulp is one of the normalised value: where the scaled `product` and the shift nearly cancel,
    it is several of the result.
    """
    assert out.shape == wanted.shape and out.dtype == wanted.dtype
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)
        return
    apart = (order(out) - order(wanted)).abs()
    assert (apart > 0).sum() <= max(1, 1e-5 * out.numel()), (apart > 0).sum()
    if product is None:
        assert apart.max() <= 1, apart.max()
    else:
        # an ulp is at most 2^-7 of its value; scaling and the later roundings add less than another
        assert ((out - wanted).abs() <= 2**-6 * torch.maximum(product.abs(), wanted.abs())).all()


def check_rows(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Norm, modulation and gate: close to the definition, exact without a row sum, joined equal to apart."""
    case = make_case(rows, width, dtype, device)
    x, h, by, mod = case.x, case.h, case.norm, case.mod
    assert_close(ops.rms_norm(x, by), REFERENCE.rms_norm(x, by))
    product = REFERENCE.rms_norm(x, by) * (1 + mod.msa.scale[mod.msa.rows])
    assert_close(ops.norm_modulate(x, by, mod.msa), REFERENCE.norm_modulate(x, by, mod.msa), product)
    added = ops.gate_add(x, h, mod.msa)
    assert torch.equal(added, REFERENCE.gate_add(x, h, mod.msa))
    residual, ready = ops.gate_norm_modulate(x, h, by, mod)
    assert torch.equal(residual, added), "the residual has no row sum"
    assert torch.equal(ready, ops.norm_modulate(added, by, mod.mlp)), "one pass and two give equal bits"
    product = REFERENCE.rms_norm(added, by) * (1 + mod.mlp.scale[mod.mlp.rows])
    assert_close(ready, REFERENCE.gate_norm_modulate(x, h, by, mod)[1], product)
    assert ready.is_contiguous() and residual.is_contiguous()


def check_strides(ops: Ops, dtype: torch.dtype, device: str) -> None:
    """Rows of a wider buffer give what contiguous rows give."""
    case = make_case(9, 64, dtype, device)
    wide = [torch.full((9, 80), 7.0, dtype=dtype, device=device) for _ in range(2)]
    x, h = (buffer[:, 16:].copy_(rows) for buffer, rows in zip(wide, (case.x, case.h), strict=True))
    for mine, theirs in zip(
        ops.gate_norm_modulate(x, h, case.norm, case.mod),
        ops.gate_norm_modulate(case.x, case.h, case.norm, case.mod),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert torch.equal(ops.gate_add(x, h, case.mod.mlp), ops.gate_add(case.x, case.h, case.mod.mlp))
    assert torch.equal(ops.swiglu(x), ops.swiglu(case.x))


def check_heads(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """q, k norm and rotation, with and without positions, from a whole buffer and from a slice of its heads."""
    num, dim, angles = heads
    qkv = draw(7, num, 3, dim, seed=1, dtype=dtype, device=device)
    by = [norm(dim, dtype, seed, device) for seed in (2, 3)]
    turns = draw(7, angles, seed=4, dtype=torch.float32, device=device)
    for rope, cut in product(((turns.cos().to(dtype), turns.sin().to(dtype)), None), (slice(None), slice(1, 2))):
        part = qkv[:, cut]
        q, k, v = ops.qk_norm_rope(part, *by, rope)
        wanted = REFERENCE.qk_norm_rope(part, *by, rope)
        assert q.is_contiguous() and k.is_contiguous() and torch.equal(v, part[:, :, 2])
        for out, definition in ((q, wanted[0]), (k, wanted[1])):
            assert out.shape == definition.shape
            assert_turned(out, definition)


def assert_turned(out: Tensor, wanted: Tensor) -> None:
    """Close where a norm comes before the rotation: its one ulp may grow when two products nearly cancel."""
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, wanted, rtol=4e-6, atol=4e-6)
        return
    apart = out != wanted
    assert apart.sum() <= max(8, 2e-5 * out.numel())
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=2**-6)


def check_swiglu(ops: Ops, rows: int, width: int, dtype: torch.dtype, device: str, *, exact: bool) -> None:
    """SwiGLU: exact, or on the interpreter within the last bits of another exponential."""
    u = draw(rows, 2 * width, seed=5, dtype=dtype, device=device) * 4
    out, wanted = ops.swiglu(u), REFERENCE.swiglu(u)
    if exact:
        assert torch.equal(out, wanted)
    else:
        assert_close(out, wanted)


def check_vit(dtype: torch.dtype, device: str) -> None:
    """The video decoder's passes: equal bits, heads wider than what turns, a branch of less precision."""
    passes = vit.choose("triton", torch.device(device))
    assert passes.name == "triton"
    batch, tokens, heads, dim, rotated = 2, 5, 3, 64, 48
    qk = draw(batch, tokens, heads, 2, dim, seed=1, dtype=torch.float32, device=device)
    turns = draw(tokens, 1, rotated, seed=2, dtype=torch.float32, device=device)
    tables = (turns.cos().to(dtype), turns.sin().to(dtype))
    for out, wanted in zip(passes.rotate_heads(qk, tables), vit.PLAIN.rotate_heads(qk, tables), strict=True):
        assert out.dtype == dtype and torch.equal(out, wanted) and not torch.equal(out, qk[:, :, :, 0].to(dtype))
    x = draw(batch, tokens, 1100, seed=3, dtype=torch.float32, device=device)
    h, scale = draw(batch, tokens, 1100, seed=4, dtype=dtype, device=device), x[0, 0] * 2
    assert torch.equal(passes.scale_add(x, h, scale), vit.PLAIN.scale_add(x, h, scale))
    u = draw(batch, tokens, 176, seed=5, dtype=dtype, device=device) * 4
    found, wanted = passes.swiglu(u), vit.PLAIN.swiglu(u)
    if device == "cpu":  # the interpreter's exponential is another one
        torch.testing.assert_close(found, wanted, rtol=2**-10 if dtype == torch.float16 else 4e-6, atol=1e-6)
    else:
        assert torch.equal(found, wanted)


def euler(x: Tensor, velocity: Tensor, grid: Grid, step: int) -> Tensor:
    """One Euler step of a grid, each product and sum rounded once (SPEC 7): a new tensor."""
    sigma, ratio, rest = factors(grid, step)
    return ratio * x + rest * (x + sigma * velocity)


def check_euler(ops: Ops, device: str) -> None:
    """Both modalities in one launch: equal to the definition, into other rows and in place."""
    sizes = ((1300, 96), (37, 32))
    xs, velocities = ([draw(*size, seed=s + i, dtype=torch.float32, device=device) for i, size in enumerate(sizes)]
                      for s in (0, 10))  # fmt: skip
    factors = ((0.7310585975646973, 0.9182, 0.0818), (0.1, 0.0, 1.0))
    outs = {table.name: [torch.full_like(x, 9) for x in xs] for table in (ops, REFERENCE)}
    for table in (ops, REFERENCE):
        table.euler(list(zip(xs, velocities, outs[table.name], factors, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(outs[ops.name], outs["reference"], strict=True))
    # the first rows are conditions: a view that begins later must leave them alone
    rows = [x.clone() for x in xs]
    ops.euler([(x[3:], v[3:], x[3:], f) for x, v, f in zip(rows, velocities, factors, strict=True)])
    assert all(torch.equal(a[3:], b[3:]) for a, b in zip(rows, outs["reference"], strict=True))
    assert all(torch.equal(a[:3], b[:3]) for a, b in zip(rows, xs, strict=True))


def every_rounding_case(device: str) -> Tensor:
    """fp32 values on, beside and halfway between bf16 values: every upper half with seven lower halves."""
    upper = torch.arange(65536, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
    bits = (upper[:, None] | lower[None, :]).flatten()
    return (bits - ((bits >> 31) << 32)).int().view(torch.float32).to(device)


# width of the frames, clips, channels, groups, pixels reflected above and left, and below and right
FRAMES = ((7, 1, 32, 32, (1, 1)), (40, 2, 64, 32, (0, 1)), (6, 1, 128, 32, (0, 0)))


def check_frames(case: tuple[int, int, int, int, tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    """The video encoder's passes: copies equal bit for bit, norms close also in flat frames far from zero."""
    width, clips, channels, groups, edges = case
    passes = frames.choose("triton", "tf32", (channels,), torch.device(device))
    assert passes.name == "triton"
    assert frames.choose("triton", "fp32", (channels,), torch.device(device)).padded is passes.padded
    assert frames.choose("triton", "fp32", (channels, 48), torch.device(device)) is frames.PLAIN
    assert frames.choose("triton", "tf32", (channels, 48), torch.device(device)) is frames.PLAIN
    x = draw(clips, channels, 3, 37, width, seed=1, dtype=torch.float32, device=device)
    x[0, :, 1] = 30 + 1e-2 * x[0, :, 1]
    x = x.to(dtype)
    norm = torch.nn.GroupNorm(groups, channels, eps=1e-6).to(device)
    norm.weight.data = draw(channels, seed=2, dtype=torch.float32, device=device)
    norm.bias.data = draw(channels, seed=3, dtype=torch.float32, device=device)
    norm.to(dtype)
    flat = torch.full_like(x, 30.0)
    for given in (x, x.contiguous(memory_format=torch.channels_last_3d), flat):
        assert torch.equal(passes.padded(given, None, edges), frames.PLAIN.padded(given, None, edges))
        found, wanted = (table.padded(given, norm, edges) for table in (passes, frames.PLAIN))
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last_3d)
        exact = frames.PLAIN.padded(given.double(), norm.double(), edges)
        norm.to(dtype)
        assert not found[:, :, : frames.PAST].any()
        far, plain = ((out - exact).abs().max() for out in (found, wanted))
        assert far <= max(2 * plain, 2e-5), (far, plain)
