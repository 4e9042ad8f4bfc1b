"""The DiT's own promises: names and sizes, fp32 islands, padding, patch projections, tensor-parallel shards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from golden_dit import ODD, TINY, build, golden_pair, golden_weights
from twinreel.models.dit import FP32_PREFIXES, DiT, Kind, RowState, make_row_state, rope_table
from twinreel.models.layers import ColumnLinear, Linears, RowLinear
from twinreel.models.modulation import LiveModulation
from twinreel.ops import select
from twinreel.parallel import Axis, Parallel
from twinreel.spec import DiTSpec

DTYPES = (torch.float32, torch.bfloat16)
T, NA, NV = 5, 74, 40


def released() -> dict[str, Tensor]:
    with torch.device("meta"):
        modules = build(DiTSpec(), torch.bfloat16)
    states = [module.state_dict() for module in modules]
    assert not states[0].keys() & states[1].keys()
    return states[0] | states[1]


def row_state(spec: DiTSpec, dtype: torch.dtype) -> RowState:
    """Text, audio, video rows at random positions."""
    rows = torch.arange(T + NA + NV)
    positions = torch.rand(len(rows), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 90
    tags = torch.tensor([1] * T + [2] * NA + [0] * NV)
    indices = (rows[:T], rows[T + NA :], rows[T : T + NA])
    return make_row_state(positions, tags, indices, spec, dtype, "cpu")


def inputs(spec: DiTSpec) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((NV, spec.video_row), (NA, spec.audio_channels), (T, spec.text_dim))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@torch.inference_mode()
def run(dit: DiT, modulation: LiveModulation, at: RowState) -> tuple[Tensor, Tensor]:
    video, audio, text = inputs(dit.spec)
    times = torch.tensor([0.2, 0.7])
    return dit(video, audio, dit.refine(text), at, modulation.at(times, (at.tags == 2).long(), at))


def test_the_released_model_has_the_released_tensors():
    state = released()
    assert len(state) == 534  # 535 in the file with rope.inv_freq
    assert sum(tensor.numel() for tensor in state.values()) == 33_122_992_896
    assert sum(tensor.nbytes for tensor in state.values()) == 66_280_430_080
    assert state["blocks.49.attn.qkv_proj.weight"].shape == (21504, 5376)
    assert state["token_refiner.blocks.1.mlp.fc1.weight"].shape == (28672, 5376)
    assert state["blocks.0.adaln_proj.linear.weight"].shape == (96768, 2688)


def test_exactly_the_islands_are_fp32():
    state = released()
    wide = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in state if name.startswith(FP32_PREFIXES)}
    assert sum(state[name].numel() for name in wide) == 17_222_144
    assert {tensor.dtype for name, tensor in state.items() if name not in wide} == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "reason"), [(torch.float16, "passes 65504"), (torch.float64, "bfloat16")])
def test_other_dtypes_are_refused_with_the_reason(dtype: torch.dtype, reason: str):
    with pytest.raises(ValueError, match=reason):
        DiT(TINY, select(), Parallel.single(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [TINY, ODD], ids=["tiny", "odd"])
def test_padding_changes_no_bit(spec: DiTSpec, dtype: torch.dtype):
    modules, at = golden_pair(spec, dtype), row_state(spec, dtype)
    more = 128 - at.used
    padded = replace(
        at,
        tags=torch.cat((at.tags, torch.full((more,), -1))),
        rope=tuple(torch.cat((table, torch.ones(more, table.shape[1], dtype=dtype))) for table in at.rope),
    )
    for plain, wide in zip(run(*modules, at), run(*modules, padded), strict=True):
        assert plain.isfinite().all() and torch.equal(plain, wide)


@pytest.mark.parametrize("hidden", [64, 96, 5376])
def test_patch_projections_over_the_whole_shard_equal_those_over_the_rows(hidden: int):
    spec = replace(TINY, hidden=hidden, layers=0, refiner_layers=0)
    dit, at = build(spec, torch.float32)[0].requires_grad_(False), row_state(TINY, torch.float32)
    video, audio, _ = inputs(spec)
    refined = torch.randn(T, hidden, generator=torch.Generator().manual_seed(3))
    for rows in (12, 17, 40):
        some = replace(at, video_indices=at.video_indices[-rows:])
        packed = dit.embed(video[-rows:], audio, refined, some)
        assert torch.equal(packed[some.video_indices], dit.video_patch_proj(video[-rows:].clone()))
        assert torch.equal(packed[some.audio_indices], dit.audio_patch_proj(audio))
        assert torch.equal(packed[some.text_indices], refined)
        assert not packed[T + NA : len(packed) - rows].any()


def test_rope_angles_are_fp32_products_of_fp32_positions():
    positions = torch.tensor([[1000.0 + 1 / 3, 31.7, -5.2]], dtype=torch.float64)
    cos, sin = rope_table(positions, TINY, torch.bfloat16, "cpu")
    assert cos.dtype == sin.dtype == torch.bfloat16 and cos.shape == (1, 12)
    frequencies = torch.tensor([10000 ** (-j / 4) for j in range(4)], dtype=torch.float32)
    angles = torch.cat([positions[0, axis].float() * frequencies for axis in range(3)])
    assert torch.equal(cos[0], angles.cos().bfloat16()) and torch.equal(sin[0], angles.sin().bfloat16())


def test_a_model_built_on_meta_and_filled_equals_one_built_in_place():
    weights = golden_weights(TINY)
    with torch.device("meta"):
        modules = build(TINY, torch.float32)
    for module in modules:
        module.load_state_dict({name: weights[name] for name in module.state_dict()}, assign=True)
    at = row_state(TINY, torch.float32)
    for ours, meta in zip(run(*golden_pair(TINY, torch.float32), at), run(*modules, at), strict=True):
        assert torch.equal(ours, meta)


def test_row_linear_is_the_only_layer_that_reduces(monkeypatch: pytest.MonkeyPatch):
    modules, at = golden_pair(TINY, torch.float32), row_state(TINY, torch.float32)
    reduced: list[Tensor] = []
    monkeypatch.setattr(Axis, "all_reduce", lambda self, x: reduced.append(x) or x)
    run(*modules, at)
    assert len(reduced) == sum(isinstance(module, RowLinear) for module in modules[0].modules()) == 2 * (2 + 2)


@dataclass(frozen=True)
class Meeting:
    """Where the two ranks of a test meet, each a thread of this process."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=30))
    parts: list[Tensor | None] = field(default_factory=lambda: [None, None])

    def add(self, rank: int, x: Tensor) -> Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        total = self.parts[0] + self.parts[1]
        self.barrier.wait()
        return total


@dataclass(frozen=True)
class Threaded(Axis):
    """A tp axis between threads."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.add(self.rank, x)


def sharded(rank: int, meeting: Meeting) -> tuple[DiT, LiveModulation]:
    parallel = Parallel(Axis("sp"), Threaded("tp", 2, rank, meeting))
    dit, modulation = DiT(TINY, select(), parallel, torch.float32), golden_pair(TINY, torch.float32)[1]
    weights = golden_weights(TINY)
    for name, module in dit.named_modules():
        if isinstance(module, ColumnLinear | RowLinear):
            weights[f"{name}.weight"] = module.shard(weights[f"{name}.weight"])
    dit.load_state_dict({name: weights[name] for name in dit.state_dict()})
    return dit, modulation


def test_two_tp_ranks_agree_with_each_other_and_with_one():
    meeting, at = Meeting(), row_state(TINY, torch.float32)
    ranks = [sharded(rank, meeting) for rank in range(2)]
    assert ranks[0][0].blocks[0].attn.qkv_proj.weight.shape == (3 * 32, 64)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda modules: run(*modules, at), ranks)
    for a, b, whole in zip(first, second, run(*golden_pair(TINY, torch.float32), at), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, whole, atol=2e-5, rtol=1e-4)  # sums over halves round otherwise


def test_every_parameter_takes_part():
    modules, at = golden_pair(TINY, torch.float32), row_state(TINY, torch.float32)
    video, audio, text = inputs(TINY)
    mod = modules[1].at(torch.tensor([0.2, 0.7]), (at.tags == 2).long(), at)
    outputs = modules[0](video, audio, modules[0].refine(text), at, mod)
    sum(output.square().sum() for output in outputs).backward()
    for module in modules:
        assert not [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()]


def test_blocks_are_built_from_the_linears_they_are_handed():
    class Column(ColumnLinear):
        pass

    kinds = {1: Kind(select(), Linears(column=Column))}
    dit = DiT(TINY, select(), Parallel.single(), torch.float32, kinds)
    built = {name for name, module in dit.named_modules() if isinstance(module, Column)}
    assert built == {"blocks.1.attn.qkv_proj", "blocks.1.mlp.fc1"}


def test_heads_must_be_dealt_out_evenly():
    with pytest.raises(ValueError, match="3 cannot be dealt out evenly to 2 ranks"):
        DiT(ODD, select(), Parallel(Axis("sp"), Axis("tp", size=2)), torch.float32)
