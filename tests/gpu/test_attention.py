"""Every attention kernel that this GPU has: against float64, strided, padded, twice; and what `auto` takes."""

from __future__ import annotations

import pytest
import torch

from twinreel.ops.attention import KINDS, choose, preference, sdpa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA, BF16 = "cuda", torch.bfloat16
HEADS, DIM = 8, 128


@pytest.mark.parametrize("name", [name for name in KINDS if name != "fa4"])
@pytest.mark.parametrize(("rows", "used"), [(1000, 1000), (1024, 1003), (3, 3), (1, 1)])
def test_close_to_float64_and_blind_to_padding(name: str, rows: int, used: int) -> None:
    try:
        attend, _ = choose(name, CUDA, BF16, DIM)
    except ValueError as error:
        pytest.skip(str(error))
    qkv = torch.randn(rows, HEADS, 3, DIM, device=CUDA, dtype=BF16)
    out = attend(*qkv.unbind(2), used)
    wanted = sdpa(*(x.cpu().double() for x in qkv.unbind(2)), used).to(CUDA)
    assert (out - wanted).norm() / wanted.norm() < 8e-3
    assert not out[used:].any() and out.flatten(1).shape == (rows, HEADS * DIM)
    qkv[used:] = 1e4
    assert torch.equal(out, attend(*qkv.unbind(2), used)), "other padding, same bits"
    q, k, v = (x.contiguous() for x in qkv.unbind(2))
    assert torch.equal(out, attend(q, k, v, used)), "strides change no bit"


def test_auto_takes_the_first_that_works_and_says_why() -> None:
    function, why = choose("auto", CUDA, BF16, DIM)
    works = []
    for name in preference(torch.device(CUDA)):
        try:
            works.append(choose(name, CUDA, BF16, DIM)[0])
        except ValueError as error:
            assert str(error).split(": ", 1)[1].split()[0] in why
    assert function is works[0] and why.startswith("auto on cuda")
    print(why)


def test_fp32_has_an_attention() -> None:
    function, _ = choose("auto", CUDA, torch.float32, DIM)
    q, k, v = torch.randn(3, 200, HEADS, DIM, device=CUDA).unbind(0)
    wanted = sdpa(*(x.cpu().double() for x in (q, k, v)), 200).to(CUDA)
    assert (function(q, k, v, 200) - wanted).norm() / wanted.norm() < 1e-5
