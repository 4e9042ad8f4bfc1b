"""The Triton kernels compiled: the cases of `tests/test_ops_triton.py`, and what only a GPU can show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import op_cases as cases
import winograd_cases
from op_model import check_model
from twinreel.models.video_decoder import VideoDecoder
from twinreel.ops import select, vit
from twinreel.spec import VideoVAESpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
FAR = 2**31


@pytest.fixture(scope="module", name="ops")
def kernels():  # noqa: ANN201
    return select("triton", CUDA, "sdpa")


def test_kernels_are_what_auto_takes() -> None:
    assert select("triton", CUDA, dtype=torch.bfloat16).name == "triton"
    assert select("triton", CUDA, "sdpa", dtype=torch.float32).name == "triton"
    table = select("auto", CUDA, dtype=torch.bfloat16)
    assert table.name == "triton" and table.why["ops"].startswith("auto")
    assert select("auto", CUDA, dtype=torch.float16).name == "reference"


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [*cases.SHAPES, (4096, 5376)])
def test_row_ops(ops, rows: int, width: int, dtype: torch.dtype) -> None:  # noqa: ANN001
    cases.check_rows(ops, rows, width, dtype, CUDA)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_strided_rows(ops, dtype: torch.dtype) -> None:  # noqa: ANN001
    cases.check_strides(ops, dtype, CUDA)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*cases.HEADS, (56, 128, 48)], ids=str)
def test_heads(ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:  # noqa: ANN001
    cases.check_heads(ops, heads, dtype, CUDA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_passes_of_the_video_decoder(dtype: torch.dtype) -> None:
    cases.check_vit(dtype, CUDA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", cases.FRAMES, ids=str)
def test_passes_of_the_video_encoder(case: tuple[int, int, int, int, tuple[int, int]], dtype: torch.dtype) -> None:
    cases.check_frames(case, dtype, CUDA)


@pytest.mark.parametrize(
    "case", [*winograd_cases.CONVOLUTIONS, (1, 17, 32, 48, 128, 128), (1, 9, 33, 31, 256, 256)], ids=str
)
def test_convolutions_of_the_video_encoder(case: tuple[int, ...]) -> None:
    winograd_cases.check_convolution(case, CUDA)
    if max(case[4:]) <= 64:
        winograd_cases.check_kernels(case, CUDA)


def test_strips_have_the_bits_of_the_whole() -> None:
    winograd_cases.check_strips(winograd_cases.STRIPS, CUDA)


@pytest.mark.parametrize(
    ("spec", "clip"),
    [(winograd_cases.SPEC, (5, 32, 48)), (VideoVAESpec(), (1, 64, 48)), (VideoVAESpec(), (17, 64, 64))],
)
def test_a_whole_video_encoder_in_fp32(spec: VideoVAESpec, clip: tuple[int, int, int]) -> None:
    winograd_cases.check_encoder(spec, clip, CUDA)


@pytest.mark.parametrize("compute", [torch.float16, torch.float32], ids=str)
def test_a_video_decoder_with_kernels_has_the_bits_of_the_plain_one(compute: torch.dtype) -> None:
    spec = replace(VideoVAESpec(), decoder_layers=2)
    plain = VideoDecoder(spec, compute).to(CUDA)
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.05)
    other = VideoDecoder(spec, compute, ops=vit.choose("triton", torch.device(CUDA))).to(CUDA)
    other.load_state_dict(plain.state_dict())
    z = torch.randn(1, spec.latent_channels, 7, 20, 34, device=CUDA)
    assert torch.equal(plain.decode(z, 3), other.decode(z, 3))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_swiglu_is_exact(ops, dtype: torch.dtype) -> None:  # noqa: ANN001
    cases.check_swiglu(ops, 513, 14336, dtype, CUDA, exact=True)


def test_swiglu_is_exact_for_every_bf16_gate(ops) -> None:  # noqa: ANN001
    gates = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16).to(CUDA)
    u = torch.cat((gates.view(64, 1024), torch.ones(64, 1024, dtype=torch.bfloat16, device=CUDA)), dim=1)
    out, wanted = ops.swiglu(u), cases.REFERENCE.swiglu(u)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


def test_euler(ops) -> None:  # noqa: ANN001
    cases.check_euler(ops, CUDA)


def test_the_hardware_rounds_as_the_integers_do() -> None:
    from rounding_kernel import both_ways

    x = cases.every_rounding_case(CUDA)
    bits, used = torch.zeros_like(x), torch.zeros_like(x)
    both_ways[(x.numel() // 1024,)](x, bits, used, BLOCK=1024)
    wanted = x.bfloat16().float()
    number = ~x.isnan()
    for out in (bits, used):
        assert torch.equal(out[number], wanted[number]) and out[~number].isnan().all()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_whole_model_runs_on_the_kernels(dtype: torch.dtype) -> None:
    check_model("triton", dtype, CUDA)


def last(x: Tensor, rows: int = 3) -> Tensor:
    return x[-rows:].clone()


def test_offsets_pass_two_to_the_31st(ops) -> None:  # noqa: ANN001
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    width = 5376
    rows = FAR // width + 70
    small = cases.make_case(rows=3, width=width, dtype=torch.bfloat16, device=CUDA)
    x, h = (torch.zeros(rows, width, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    x[-3:], h[-3:] = small.x, small.h
    reads = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    reads[-3:] = small.mod.msa.rows
    whole = cases.Case(x, h, small.norm, cases.read_alike(small.mod, reads))
    near = cases.read_alike(small.mod, small.mod.msa.rows)
    assert torch.equal(last(ops.gate_add(x, h, whole.mod.msa)), ops.gate_add(small.x, small.h, near.msa))
    both = zip(
        ops.gate_norm_modulate(x, h, small.norm, whole.mod),
        ops.gate_norm_modulate(small.x, small.h, small.norm, near),
        strict=True,
    )
    assert all(torch.equal(last(far), close) for far, close in both)
    assert torch.equal(last(ops.swiglu(x)), ops.swiglu(small.x))
    del x, h, whole
    heads, dim = 56, 128
    rows = FAR // (heads * 3 * dim) + 70
    qkv = torch.zeros(rows, heads, 3, dim, dtype=torch.bfloat16, device=CUDA)
    qkv[-3:] = cases.draw(3, heads, 3, dim, seed=1, dtype=torch.bfloat16, device=CUDA)
    by = [cases.norm(dim, torch.bfloat16, seed, CUDA) for seed in (2, 3)]
    turn = torch.randn(rows, 48, device=CUDA)
    rope = turn.cos().bfloat16(), turn.sin().bfloat16()
    far = ops.qk_norm_rope(qkv, *by, rope)
    close = ops.qk_norm_rope(qkv[-3:], *by, (rope[0][-3:], rope[1][-3:]))
    assert all(torch.equal(last(a), b) for a, b in zip(far, close, strict=True))


def test_same_bits_twice_and_from_a_slice_of_rows(ops) -> None:  # noqa: ANN001
    """A row's result does not depend on which rows stand beside it: row chunks and shards change no bit."""
    case = cases.make_case(2048, 5376, torch.bfloat16, CUDA)
    whole = ops.norm_modulate(case.x, case.norm, case.mod.msa)
    assert torch.equal(whole, ops.norm_modulate(case.x, case.norm, case.mod.msa))
    part = cases.read_alike(case.mod, case.mod.msa.rows[1000:1100])
    assert torch.equal(whole[1000:1100], ops.norm_modulate(case.x[1000:1100], case.norm, part.msa))


def test_compiled_and_eager_agree(ops) -> None:  # noqa: ANN001
    case = cases.make_case(64, 5376, torch.bfloat16, CUDA)

    def block(x: Tensor, h: Tensor) -> Tensor:
        x, h = ops.gate_norm_modulate(x, h, case.norm, case.mod)
        return ops.gate_add(x, ops.rms_norm(h, case.norm), case.mod.mlp)

    whole = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(case.x, case.h), block(case.x, case.h))
