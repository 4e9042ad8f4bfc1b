"""Dense attention: the definition and its padding rule, and how one implementation is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twinreel.ops import attention as dense
from twinreel.ops import select
from twinreel.ops.attention import KINDS, Kind, choose, probe, refusal

DTYPES = (torch.float32, torch.bfloat16)
H, d = 3, 8
CUDA = torch.device("cuda", 0)


def draw(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, H, 3, d, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("rows", [13, 643])  # 643: CPU's last block of queries is short, which padding would fill
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["auto", "math"])
def test_attention_takes_views_and_ignores_padding(name: str, dtype: torch.dtype, rows: int) -> None:
    attend = choose(name, "cpu", dtype, d)[0]
    qkv = draw(rows, dtype)
    views = qkv.unbind(2)
    whole = attend(*views, rows)
    assert whole.shape == (rows, H, d) and whole.dtype == dtype
    assert torch.equal(whole, attend(*(x.contiguous() for x in views), rows))
    weights = torch.einsum("shd,thd->hst", views[0].float(), views[1].float()).div(d**0.5).softmax(-1)
    close = torch.einsum("hst,thd->shd", weights, views[2].float())
    torch.testing.assert_close(whole.float(), close, atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    padded = torch.cat((qkv, torch.full((61, H, 3, d), 1e4, dtype=dtype)))
    out = attend(*padded.unbind(2), rows)
    assert torch.equal(out[:rows], whole) and not out[rows:].any()


def test_names_on_a_cpu() -> None:
    assert choose("auto", "cpu") == (dense.sdpa, "auto on cpu (whichever kernel PyTorch picks)")
    assert choose("math", "cpu")[1].startswith("asked for")
    for name in ("fa3", "fa4", "cudnn", "flash"):
        with pytest.raises(ValueError, match=f"attention: {name} is not available on cpu: {name} needs a CUDA device"):
            choose(name, "cpu")
    with pytest.raises(ValueError, match="attention: got 'flash9'; use auto, fa3"):
        choose("flash9", "cpu")
    assert "untested" in KINDS["fa4"].note


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it is a Hopper; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_what_each_kind_needs(hopper: None) -> None:
    assert refusal(KINDS["fa3"], CUDA, torch.bfloat16, 128) is None
    assert "64 or 128 dims, not 72" in str(refusal(KINDS["fa3"], CUDA, torch.bfloat16, 72))
    assert "not torch.float32" in str(refusal(KINDS["cudnn"], CUDA, torch.float32, 128))
    assert "needs compute capability 10.0 or newer" in str(refusal(KINDS["fa4"], CUDA, torch.bfloat16, 128))
    assert refusal(KINDS["sdpa"], CUDA, torch.float32, 72) is None


def test_auto_takes_the_first_that_works_and_says_what_it_passed_over(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []

    def answer(kind: Kind, *place: object) -> str | None:
        name = next(name for name in KINDS if KINDS[name] is kind)
        probed.append(name)
        return None if name == "flash" else "ImportError: no such wheel"

    monkeypatch.setattr(dense, "probe", answer)
    function, why = choose("auto", CUDA, torch.bfloat16, 128)
    assert function is dense.flash and probed == ["fa3", "cudnn", "flash"]
    assert why == ("auto on cuda:0; passed over: fa3 ImportError: no such wheel; cudnn ImportError: no such wheel")
    function(*draw(9, torch.bfloat16).unbind(2), 9)
    assert len(probed) == 3, "a probe is for start-up, not for calls"
    with pytest.raises(ValueError, match="attention: cudnn is not available on cuda:0: cudnn ImportError"):
        choose("cudnn", CUDA, torch.bfloat16, 128)


def test_fp32_on_cuda_leaves_the_half_precision_kernels_out(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "probe", lambda *place: None)
    function, why = choose("auto", CUDA, torch.float32, 128)
    assert function is dense.sdpa and "fa3 takes bf16 or fp16" in why


def broken(*_: object) -> Tensor:
    raise RuntimeError("no kernel\nsecond line")


def wrong(q: Tensor, k: Tensor, v: Tensor, used: int) -> Tensor:
    return dense.sdpa(k, q, v, used)


def leaky(q: Tensor, k: Tensor, v: Tensor, used: int) -> Tensor:
    return dense.sdpa(q, k, v, used).index_fill(0, torch.tensor([155]), 1.0)


@pytest.mark.parametrize(
    ("function", "words"),
    [(dense.sdpa, None), (broken, "RuntimeError: no kernel"), (wrong, "relative error"),
     (leaky, "padding are not zero"), (dense.fa3, "ModuleNotFoundError"), (dense.fa4, "ModuleNotFoundError")],
)  # fmt: skip
def test_the_probe_finds_what_is_broken(function: Callable[..., Tensor], words: str | None) -> None:
    problem = probe(Kind(function), torch.device("cpu"), torch.bfloat16, 64)
    assert problem is None if words is None else words in str(problem)


def test_the_table_carries_the_reason() -> None:
    table = select("reference", "cpu", "math")
    assert table.attention is dense.math and "square of the rows" in table.why["attention"]
