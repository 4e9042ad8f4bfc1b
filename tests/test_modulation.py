"""AdaLN: the order of its table, its precision, and when its projections run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from golden_dit import TINY, golden_pair
from twinreel.models.modulation import LiveModulation, table_rows, time_features

D = TINY.hidden
TIMES = torch.tensor([0.25, 0.999, 1.0])
INDICES = torch.tensor([0, 0, 1, 2, 0, 0])
TAGS = torch.tensor([1, 0, 0, 2, 2, -1])


@dataclass(frozen=True)
class Rows:
    tags: Tensor = TAGS


def live(dtype: torch.dtype) -> LiveModulation:
    return golden_pair(TINY, dtype)[1].requires_grad_(False)


def test_time_features_are_cosines_then_sines_of_unscaled_time():
    features = time_features(torch.tensor([0.0, 0.5]), 8)
    assert torch.equal(features[0], torch.tensor([1.0] * 4 + [0.0] * 4))
    frequencies = 10000 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(features[1], torch.cat(((0.5 * frequencies).cos(), (0.5 * frequencies).sin())))


def test_table_rows_are_timestep_major_and_padding_reads_the_video_row():
    assert table_rows(INDICES, TAGS).tolist() == [1, 0, 3, 8, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_tables_are_in_the_checkpoints_order(dtype: torch.dtype):
    modulation = live(dtype)
    step = modulation.at(TIMES, INDICES, Rows())
    block = step.block(1)
    embedding = torch.nn.functional.silu(modulation.time_embedder(TIMES)).to(dtype)
    whole = modulation.blocks[1](embedding).view(3, 3, 6, D)  # timestep, modality, vector
    vectors = (block.msa.shift, block.msa.scale, block.msa.gate, block.mlp.shift, block.mlp.scale, block.mlp.gate)
    for index, vector in enumerate(vectors):
        assert vector.dtype == dtype and torch.equal(vector, whole[:, :, index].reshape(9, D))
    assert torch.equal(block.msa.rows, table_rows(INDICES, TAGS)) and block.mlp.rows is block.msa.rows
    final = step.final()
    shift, scale = modulation.final_layer(embedding).chunk(2, dim=-1)
    assert torch.equal(final.shift, shift) and torch.equal(final.scale, scale) and torch.equal(final.rows, INDICES)


def test_the_time_embedder_stays_fp32_and_is_rounded_after_the_silu():
    modulation = live(torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in modulation.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"time_embedder.{layer}.{part}" for layer in ("proj_in", "proj_out") for part in ("weight", "bias")
    }
    seen: list[Tensor] = []
    modulation.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    modulation.at(TIMES, INDICES, Rows()).block(0)
    wide = modulation.time_embedder(TIMES)
    assert wide.dtype == torch.float32
    assert torch.equal(seen[0], torch.nn.functional.silu(wide).bfloat16())
    assert not torch.equal(seen[0], torch.nn.functional.silu(wide.bfloat16()))


def test_a_block_is_projected_when_it_is_asked_for():
    modulation = live(torch.float32)
    calls: list[int] = []
    for index, block in enumerate(modulation.blocks):
        block.register_forward_pre_hook(lambda _, args, index=index: calls.append(index))
    step = modulation.at(TIMES, INDICES, Rows())
    assert calls == []
    step.block(1)
    assert calls == [1]
