"""Which mesh for how many ranks and how much memory: presets, what was asked for, refusals."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinreel import ConfigError, EngineConfig, topology
from twinreel.config import resolve
from twinreel.demo.tiny import tiny_spec
from twinreel.launch import Seat, seat
from twinreel.machine import Card
from twinreel.parallel import Axis, Parallel, board
from twinreel.parallel.mesh import Mesh
from twinreel.parallel.ulysses import PLAIN, Relayout, Ulysses
from twinreel.topology import (
    AUTO_CPU,
    Sizes,
    check_alike,
    choose_mesh,
    choose_variant,
    foresee,
    num_ranks,
    open_board,
    settle_variant,
)

GIB = 1 << 30
DIT = 38 * GIB  # the released DiT in bf16 without the projections that become tables
H3 = Sizes(heads=56, ffn=14_336, kv_heads=8, weights=DIT)


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
    assert chosen(4, 80, conditioner="fsdp") == Mesh(sp=4, text=1, stored=4)


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (3, {}, "must divide the 56 heads: 1, 2, 4, 7, 8, 14, 28, 56"),
        (4, {"sp": 3}, "sp: got 3, which does not divide 4 ranks"),
        (4, {"tp": 8}, "tp: got 8, which does not divide 4 ranks"),
        (1, {"tp": 2}, "tp: got 2, which does not divide one rank; change it, or gpus"),
        (1, {"conditioner": "split"}, "split is for several ranks, this run has one"),
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
    local, plain = choose_variant(config, Mesh(), choices, dit), choose_variant(config, two, choices, dit)
    assert (local.name, local.why) == ("local", "rows are on one rank")
    assert (plain.name, plain.pushed, plain.why) == ("plain", False, AUTO_CPU)
    with pytest.raises(ConfigError, match="attend: packed: needs the triton table of ops, this run has reference"):
        choose_variant(replace(config, attend="packed"), two, choices, dit)
    with pytest.raises(ConfigError, match="attend: overlapped: 1 heads a rank cannot go in 2 chunks"):
        choose_variant(replace(config, attend="overlapped"), two, choices, dit)
    with pytest.raises(ConfigError, match="this mesh has sp 1"):
        choose_variant(replace(config, attend="plain"), Mesh(tp=2), choices, dit)


def test_overlapped_is_tried_where_it_is_named_and_refused_with_its_cause() -> None:
    on_gpu = replace(resolve(EngineConfig(device="cpu"), 128), device=torch.device("cuda", 0))
    wide = replace(tiny_spec().dit, heads=56)
    tried = choose_variant(EngineConfig(attend="overlapped"), Mesh(sp=2), on_gpu, wide)
    assert (tried.name, tried.pushed, tried.chunks, tried.relayout) == ("overlapped", True, 2, PLAIN)
    far, sp = Seat(0, 2, 0, 1), Axis("sp", size=2)
    alone = Parallel(sp, Axis("tp"), control=Once("control", size=2))
    with pytest.raises(ConfigError, match="attend: overlapped: 2 ranks on several hosts cannot write into each other"):
        settle_variant(tried, alone, on_gpu, far)


@pytest.mark.parametrize("lost", [False, True])
def test_a_try_that_fails_is_passed_over_unless_it_has_cost_the_device(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that shares no memory says so in a CUDA error, too, after which the device works on."""

    def refuse(*given: object) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(board, "peer_refusal", lambda *given: None)
    monkeypatch.setattr(board, "Board", lambda *given: SimpleNamespace(probe=refuse))
    monkeypatch.setattr(torch.cuda, "synchronize", refuse if lost else lambda device: None)
    with pytest.raises(ConfigError, match="failed for good") if lost else nullcontext():
        made, problem = open_board(Parallel.single(), torch.device("cuda", 0), 1)
        assert made is None and problem == "RuntimeError: CUDA error: operation not supported"


@dataclass(frozen=True)
class Heard(Axis):
    """A control axis on which the other rank says `other`."""

    other: Any = None

    def tell_all(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_ranks_that_choose_differently_are_refused() -> None:
    choices, variant = resolve(EngineConfig(device="cpu", ops="reference"), 128), topology.Variant("plain", "auto")
    alone = Parallel.single()
    check_alike(alone, choices, variant)
    same = "ops reference, attention attention.sdpa, attend plain"
    check_alike(replace(alone, control=Heard("control", size=2, other=same)), choices, variant)
    other = same.replace("sdpa", "fa3")
    with pytest.raises(ConfigError, match=f"do not allow the same: rank 0 {same}; rank 1 {other}; name ops"):
        check_alike(replace(alone, control=Heard("control", size=2, other=other)), choices, variant)


def test_auto_takes_the_fastest_that_works_on_cuda_and_says_what_it_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu, config = replace(resolve(EngineConfig(device="cpu"), 128), device=torch.device("cuda", 0)), EngineConfig()
    plain = choose_variant(config, Mesh(sp=2), on_gpu, replace(tiny_spec().dit, heads=56))
    assert plain.name == "plain" and plain.why.startswith("auto; passed over: packed and overlapped: needs the triton")
    kernels = Relayout("packed", PLAIN.pack, PLAIN.merge)
    monkeypatch.setattr(topology, "_kernels", lambda *_: (kernels, None))
    few = choose_variant(config, Mesh(sp=2), on_gpu, replace(tiny_spec().dit, heads=2))
    assert (few.name, few.pushed, few.relayout) == ("packed", False, kernels)
    assert few.why == "auto; passed over: overlapped: 1 heads a rank cannot go in 2 chunks"
    tried = choose_variant(config, Mesh(sp=2), on_gpu, replace(tiny_spec().dit, heads=56))
    assert (tried.name, tried.pushed, tried.chunks, tried.relayout, tried.why) == (
        "overlapped",
        True,
        2,
        kernels,
        "auto",
    )
    assert foresee(Mesh(sp=2, text=2), tried, {"sp, tp": "asked for"}) == {
        "ranks": 2, "sp": 2, "tp": 1, "conditioner": 2, "attend": "overlapped",
        "why": {"sp, tp": "asked for", "attend": "auto; the ranks try it at start-up, else packed"},
    }  # fmt: skip
    alone = Parallel(Axis("sp", size=2), Axis("tp"), control=Once("control", size=2))
    parallel, settled = settle_variant(tried, alone, on_gpu, Seat(0, 2, 0, 1))
    assert (settled.name, settled.pushed, settled.chunks) == ("packed", False, 1)
    assert settled.why.startswith("auto; passed over: overlapped: 2 ranks on several hosts")
    assert parallel.board is None and parallel.chunks == 1
    made = parallel.attend(lambda q, k, v, used: q)
    assert isinstance(made, Ulysses) and made.relayout is kernels and made.chunks == 1


@dataclass(frozen=True)
class Once(Axis):
    """Ranks that all say what this one says."""

    def tell_all(self, value: Any) -> list[Any]:
        return [value] * self.size


def test_the_feed_forward_width_is_dealt_out_too() -> None:
    small = Sizes(heads=3, ffn=416, kv_heads=3, weights=DIT, memory=GIB)  # as the model in the package has them
    with pytest.raises(
        ConfigError, match="tp: 3 ranks cannot share a feed-forward width of 416; use 1, or change gpus"
    ):
        choose_mesh(EngineConfig(gpus=3, tp=3), 3, small)
    assert choose_mesh(EngineConfig(gpus=3), 3, small)[0].tp == 1  # though the weights do not fit


def test_a_launcher_decides_how_many() -> None:
    place = Seat(1, 4, 1, 4)
    assert num_ranks(EngineConfig(), place) == num_ranks(EngineConfig(gpus=4), place) == 4
    assert num_ranks(EngineConfig(), None) == 1
    with pytest.raises(ConfigError, match="the launcher started 4 processes"):
        num_ranks(EngineConfig(gpus=2), place)


@pytest.mark.parametrize(
    ("config", "place", "memory"),
    [
        ({}, None, 80),
        ({"gpus": 2}, None, 48),
        ({"gpus": 3}, None, 24),
        ({"device": "cuda:1"}, None, 48),
        ({"device": "cuda:2"}, None, 24),
        ({"device": "cuda:7"}, None, None),  # which `resolve` refuses
        ({"device": "cpu", "gpus": 2}, None, None),
        ({}, Seat(3, 4, 1, 2), 48),  # two on each of two hosts
    ],
)
def test_only_cards_that_the_ranks_use_count(
    config: dict[str, Any], place: Seat | None, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [Card(size * GIB, GIB, name="a card") for size in (80, 48, 24)]
    monkeypatch.setattr(topology, "cuda_memory", lambda: cards)
    monkeypatch.setattr(topology, "seat", lambda: place)
    assert topology.sizes_of(tiny_spec(), EngineConfig(**config)).memory == (memory and memory * GIB)


def test_a_card_of_which_nothing_is_known_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cuda_memory", lambda: [Card(0, 0, told=False)])
    assert topology.sizes_of(tiny_spec(), EngineConfig()).memory is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"WORLD_SIZE": "3"}, "RANK: is not set, and WORLD_SIZE is 3"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got '', at least 1 is possible"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: got '0'"),
        ({"WORLD_SIZE": "3", "RANK": "3"}, "RANK: got '3', 0 to 2 is possible"),
        ({"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK: got 'x'"),
        ({"WORLD_SIZE": "3", "RANK": "0", "LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE: got '7', 1 to 3"),
        ({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK: is not set"),
        ({"WORLD_SIZE": "3", "RANK": "0"}, "MASTER_ADDR: is not set"),
        ({"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT: got '0', 1 to 65535"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_refused(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        if name in given:
            monkeypatch.setenv(name, given[name])
    with pytest.raises(ConfigError, match=re.escape(words)):
        seat()


def test_a_launcher_says_where_a_process_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert seat() is None
    more = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for name, value in (more | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    assert seat() == Seat(3, 4, 1, 2)


def test_who_sits_together() -> None:
    mesh = Mesh(sp=4, tp=2, text=4)
    assert list(mesh.members("tp")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(mesh.members("sp")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(mesh.members("text")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(mesh.members("every")) == [list(range(8))]
    with pytest.raises(ValueError, match="text to divide"):
        Mesh(sp=7, text=2)
