"""The reference ops against their formulas in SPEC 2, written out; selection by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twinreel.models.layers import RMSNorm
from twinreel.models.modulation import BlockModulation, Gated
from twinreel.ops import describe, select

OPS = select()
DTYPES = (torch.float32, torch.bfloat16)
S, D, H, d = 13, 24, 3, 8


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(size: int, dtype: torch.dtype, seed: int) -> RMSNorm:
    module = RMSNorm(size, 1e-3, dtype).requires_grad_(False)
    module.weight.copy_(draw(size, seed=seed, dtype=dtype))
    return module


def modulation(dtype: torch.dtype) -> BlockModulation:
    rows = torch.randint(0, 6, (S,), generator=torch.Generator().manual_seed(0))
    tables = [draw(6, D, seed=seed, dtype=dtype) for seed in range(10, 16)]
    return BlockModulation(
        msa=Gated(tables[0], tables[1], rows, tables[2]), mlp=Gated(tables[3], tables[4], rows, tables[5])
    )


def rms(x: Tensor, by: RMSNorm) -> Tensor:
    """SPEC 2.2: everything in fp32, one rounding at the end."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + by.eps) * by.weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_once(dtype: torch.dtype):
    x, by = draw(200, D, seed=1, dtype=dtype), norm(D, dtype, 2)
    assert torch.equal(OPS.rms_norm(x, by), rms(x, by))
    assert not torch.equal(OPS.rms_norm(x, by), rms(x, RMSNorm(D, 1e-3, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_modulation_rounds_at_every_operation(dtype: torch.dtype):
    x, h, by, mod = (
        draw(S, D, seed=1, dtype=dtype),
        draw(S, D, seed=2, dtype=dtype),
        norm(D, dtype, 3),
        modulation(dtype),
    )
    r = mod.msa.rows
    expected = ((rms(x, by) * (1 + mod.msa.scale[r]).to(dtype)).to(dtype) + mod.msa.shift[r]).to(dtype)
    assert torch.equal(OPS.norm_modulate(x, by, mod.msa), expected)
    assert torch.equal(OPS.gate_add(x, h, mod.mlp), x + mod.mlp.gate[r] * h)
    residual, ready = OPS.gate_norm_modulate(x, h, by, mod)
    assert torch.equal(residual, x + mod.msa.gate[r] * h)
    assert torch.equal(ready, rms(residual, by) * (1 + mod.mlp.scale[r]) + mod.mlp.shift[r])


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_turns_halves_and_leaves_the_rest(dtype: torch.dtype):
    qkv, by_q, by_k = draw(S, H, 3, d, seed=1, dtype=dtype), norm(d, dtype, 2), norm(d, dtype, 3)
    angles = draw(S, 3, seed=4, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, v = OPS.qk_norm_rope(qkv, by_q, by_k, (cos, sin))
    for index, (out, by) in enumerate(((q, by_q), (k, by_k))):
        n = rms(qkv[:, :, index], by)
        c, s = cos[:, None], sin[:, None]
        assert torch.equal(out[..., :3], n[..., :3] * c - n[..., 3:6] * s)
        assert torch.equal(out[..., 3:6], n[..., 3:6] * c + n[..., :3] * s)
        assert torch.equal(out[..., 6:], n[..., 6:])
    assert torch.equal(v, qkv[:, :, 2])
    q, k, _ = OPS.qk_norm_rope(qkv, by_q, by_k, None)
    assert torch.equal(q, rms(qkv[:, :, 0], by_q)) and torch.equal(k, rms(qkv[:, :, 1], by_k))


def test_swiglu_reads_the_gate_first():
    u = torch.tensor([[0.0, 1.0, 5.0, 7.0]])
    assert torch.equal(OPS.swiglu(u), torch.tensor([[0.0, 7.0 * torch.nn.functional.silu(torch.tensor(1.0))]]))


def test_selection_is_by_name():
    assert select("auto", "cpu").name == "reference"
    with pytest.raises(ValueError, match="ops: got 'fast'; use auto, triton, reference"):
        select("fast")
    with pytest.raises(ValueError, match="attention: got 'flash9'; use auto, fa3, fa4, cudnn, flash, sdpa, math"):
        select("reference", "cpu", attention="flash9")


def test_describe_names_what_each_op_runs():
    names = describe(select())
    assert names["attention"] == "attention.sdpa" and names["gate_norm_modulate"] == "reference.gate_norm_modulate"
    assert set(names) == {field for field in vars(select()) if field not in ("name", "why")}
    assert set(select().why) == {"ops", "attention"}

    def mine(u: Tensor) -> Tensor:
        return u

    assert describe(replace(select(), swiglu=mine))["swiglu"].endswith("mine")
