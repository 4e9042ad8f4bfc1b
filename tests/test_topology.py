"""Which mesh for how many ranks and how much memory: presets, what was asked for, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinreel import ConfigError, EngineConfig
from twinreel.config import resolve
from twinreel.demo.tiny import tiny_spec
from twinreel.launch import Seat
from twinreel.parallel.mesh import Mesh
from twinreel.topology import Sizes, choose_mesh, choose_strategy, num_ranks

GIB = 1 << 30
DIT = 38 * GIB  # the released DiT in bf16 without the projections that become tables
H3 = Sizes(heads=56, kv_heads=8, weights=DIT)


def chosen(count: int, memory: int | None, **options: object) -> Mesh:
    config = EngineConfig(gpus=count, **options)  # type: ignore[arg-type]
    return choose_mesh(config, count, replace(H3, memory=memory and memory * GIB))[0]


@pytest.mark.parametrize(
    ("count", "memory", "mesh"),
    [
        (1, 140, Mesh()),
        (2, 140, Mesh(sp=2, text=2)),
        (4, 80, Mesh(sp=4, text=4)),  # pure Ulysses where the weights fit
        (4, 48, Mesh(sp=2, tp=2, text=4)),
        (8, 24, Mesh(sp=2, tp=4, text=8)),
        (8, 140, Mesh(sp=8, text=8)),
        (7, 140, Mesh(sp=7, text=1)),  # 8 key and value heads do not go over 7 ranks
        (2, 8, Mesh(tp=2, text=2)),  # does not fit either way: the least that could
        (8, None, Mesh(sp=8, text=8)),
    ],
)
def test_presets(count: int, memory: int | None, mesh: Mesh) -> None:
    assert chosen(count, memory) == mesh


def test_what_is_asked_for() -> None:
    assert chosen(4, 80, sp=2) == chosen(4, 80, tp=2) == chosen(4, 80, sp=2, tp=2) == Mesh(2, 2, 4)
    assert chosen(4, 80, conditioner="whole").text == 1


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (3, {}, "must divide the 56 heads: 1, 2, 4, 7, 8, 14, 28, 56"),
        (4, {"sp": 3}, "sp: got 3; it must divide"),
        (4, {"tp": 8}, "sp, tp: 0 times 8|sp, tp"),
        (4, {"sp": 4, "tp": 4}, "4 times 4 is not the number of ranks, 4"),
        (7, {"conditioner": "split"}, "cannot deal 8 key and value heads to 7 ranks"),
    ],
)
def test_refusals(count: int, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(count, 80, **options)


def test_attend_variants() -> None:
    two, dit = Mesh(sp=2), tiny_spec().dit
    config, choices = EngineConfig(device="cpu", ops="reference"), resolve(EngineConfig(device="cpu"), dit.head_dim)
    assert choose_strategy(config, Mesh(), choices, dit)[1:] == ("local", "rows are on one rank")
    assert choose_strategy(config, two, choices, dit)[1] == "plain"
    with pytest.raises(ConfigError, match="attend: packed: needs the triton table of ops, this run has reference"):
        choose_strategy(replace(config, attend="packed"), two, choices, dit)
    with pytest.raises(ConfigError, match="attend: overlapped: 1 heads a rank cannot go in 2 chunks"):
        choose_strategy(replace(config, attend="overlapped"), two, choices, dit)
    with pytest.raises(ConfigError, match="this mesh has sp 1"):
        choose_strategy(replace(config, attend="plain"), Mesh(tp=2), choices, dit)


def test_a_launcher_decides_how_many() -> None:
    place = Seat(1, 4, 1, 4)
    assert num_ranks(EngineConfig(), place) == num_ranks(EngineConfig(gpus=4), place) == 4
    assert num_ranks(EngineConfig(), None) == 1
    with pytest.raises(ConfigError, match="the launcher started 4 processes"):
        num_ranks(EngineConfig(gpus=2), place)


def test_who_sits_together() -> None:
    mesh = Mesh(sp=4, tp=2, text=4)
    assert list(mesh.members("tp")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(mesh.members("sp")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(mesh.members("text")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(mesh.members("every")) == [list(range(8))]
    with pytest.raises(ValueError, match="text to divide"):
        Mesh(sp=7, text=2)
