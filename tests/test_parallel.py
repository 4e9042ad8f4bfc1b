"""Axes: the identity at size 1, slices and collectives at size 2; layers that own their shard rule."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twinreel.models.layers import ColumnLinear, RowLinear
from twinreel.parallel import Axis, Local, Meter, Parallel
from twinreel.parallel.meter import Cost

SINGLE = Axis("tp")
TWO = tuple(Axis("tp", size=2, rank=rank) for rank in range(2))

WORKER = """
import sys, torch, torch.distributed as dist
from twinreel.parallel import Axis, Meter
from twinreel.parallel.team import Team, is_agreed
from twinreel.parallel.tiles import deal
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
meter = Meter()
axis = Axis("sp", size=2, rank=rank, meter=meter)
mine = torch.arange(4.0).view(2, 2) + 10 * rank
assert axis.all_gather(mine).tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
assert axis.all_gather(mine.t(), dim=1).tolist() == [[0, 2, 10, 12], [1, 3, 11, 13]]
assert axis.vote(torch.tensor([rank, 1 - rank, 0])).tolist() == [1, 1, 0]
assert axis.all_reduce(mine).tolist() == [[10, 12], [14, 16]]
own = torch.full((3 * rank, 2), float(rank))
assert axis.join(own, (0, 3)).tolist() == [[1, 1]] * 3
assert axis.join(torch.full((2 - rank,), rank), (2, 1)).tolist() == [0, 0, 1]
assert axis.exchange(torch.tensor([[10 * rank], [10 * rank + 1]])).wait().tolist() == [[rank], [10 + rank]]
assert axis.tell_all({"rank": rank}) == [{"rank": 0}, {"rank": 1}] and axis.from_first(rank) == 0

made = []
def make(job):
    made.append(job)
    return torch.full((2 if job < 2 else 1, 3), float(job))
for count in (1, 2, 3):  # fewer jobs than ranks; the last one shorter
    made.clear()
    sizes = [2, 2, 1][:count]
    dealt = [part.tolist() for part in deal(make, sizes, axis, torch.device("cpu"))]
    assert dealt == [[[float(job)] * 3] * size for job, size in enumerate(sizes)], dealt
    assert made == list(range(rank, count, 2))

lap = meter.lap()
costs = lap["collectives"]
assert lap["seconds"] >= lap["exposed_seconds"] + lap["compute_seconds"] > 0 and lap["hidden_seconds"] == 0
assert lap["waiting_seconds"] == costs["sp.vote"]["exposed_seconds"] > 0
assert lap["bytes"] == sum(cost["bytes"] for cost in costs.values())
assert costs["sp.all_to_all"]["calls"] == 1 and costs["sp.all_to_all"]["bytes"] == 8  # int64 to the other rank
assert costs["sp.all_reduce"]["bytes"] == 16 and costs["sp.all_reduce"]["exposed_seconds"] > 0 and not meter.lap()

team = Team(axis)
assert team.leads == (rank == 0) and team.first(lambda: rank) == 0 and team.together(lambda: rank) == rank
class Local(Exception):
    pass
def fail(who, error):
    if rank == who:
        raise error
for attempt, kind, words in (
    (lambda: team.first(lambda: fail(0, ValueError("no"))), ValueError, "no"),
    (lambda: team.together(lambda: fail(1, ValueError("no"))), ValueError, "no"),
    (lambda: team.together(lambda: fail(1, type("Odd", (Exception,), {})("kept"))), RuntimeError, "Odd: kept"),
):
    try:
        attempt()
    except kind as error:
        assert str(error) == words and is_agreed(error), error
    else:
        raise AssertionError("an error of one rank is every rank's")
dist.destroy_process_group()
"""


def test_an_axis_of_one_rank_is_the_identity_and_starts_nothing():
    x = torch.arange(6.0).view(2, 3)
    for result in (SINGLE.all_reduce(x), SINGLE.all_gather(x), SINGLE.vote(x)):
        assert result is x
    assert SINGLE.share(7) == 7 and torch.equal(SINGLE.slice(x, 1), x)
    assert not torch.distributed.is_initialized()


def test_an_axis_deals_out_evenly_or_says_why_not():
    x = torch.arange(8).view(2, 4)
    assert [axis.slice(x, 1).tolist() for axis in TWO] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(ValueError, match="'tp': 7 cannot be dealt out evenly to 2 ranks"):
        TWO[0].share(7)
    with pytest.raises(ValueError, match="rank 2 is not within its 2 ranks"):
        Axis("tp", size=2, rank=2)


def test_collectives_over_two_processes(tmp_path: Path):
    command = [sys.executable, "-c", WORKER, str(tmp_path / "meet")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


@dataclass(frozen=True)
class Halves(Axis):
    """Two ranks in one process: `all_reduce` keeps the partial sums for the test to add."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def test_sharded_layers_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=generator) for shape in ((5, 6), (16, 6), (4, 8)))
    gate, value = (x @ up.t()).chunk(2, dim=1)
    total = torch.zeros(5, 4)
    for rank in range(2):
        axis = Halves("tp", size=2, rank=rank)
        column, row = ColumnLinear(6, 16, axis, torch.float32, parts=2), RowLinear(8, 4, axis, torch.float32)
        assert column.weight.shape == (8, 6) and row.weight.shape == (4, 4)
        column.load_state_dict({"weight": column.shard(up)})
        row.load_state_dict({"weight": row.shard(down)})
        mine = slice(4 * rank, 4 * rank + 4)
        own_gate, own_value = column(x).chunk(2, dim=1)
        torch.testing.assert_close(own_gate, gate[:, mine])
        torch.testing.assert_close(own_value, value[:, mine])
        total += row(own_gate * own_value).detach()
    torch.testing.assert_close(total, (gate * value) @ down.t())


def test_layers_on_one_rank_are_plain_linears():
    for layer in (ColumnLinear(6, 16, SINGLE, torch.float32, parts=2), RowLinear(6, 16, SINGLE, torch.float32)):
        x = torch.randn(5, 6)
        assert torch.equal(layer.shard(layer.weight), layer.weight)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_the_strategy_is_a_field_and_local_refuses_shared_rows():
    parallel = Parallel.single()
    assert isinstance(parallel.attend(lambda q, k, v, used: q), Local)
    with pytest.raises(ValueError, match="Local attends over the rows of one rank; axis 'sp' has 2"):
        Parallel(sp=Axis("sp", size=2), tp=SINGLE).attend(lambda q, k, v, used: q)
    made = Parallel(sp=Axis("sp", size=2), tp=SINGLE, strategy=lambda attention, axis: (attention, axis.size))
    assert made.attend("dense") == ("dense", 2)


class Reached:
    """An event of a GPU that somebody waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_no_collective_is_queued_far_ahead_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    meter, events, queued = Meter(), [Reached() for _ in range(5)], list[str]()
    meter._waits = [(Cost(), None, event) for event in events]
    axis, x = Axis("sp", size=2, meter=meter), torch.zeros(2, 4)
    for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: queued.append(name), raising=False)
    for number, collective in enumerate((axis.all_reduce, axis.gather, axis.exchange, axis.vote)):
        assert [event.waited for event in events[:5]] == [0, 0, 0, number, 0]
        collective(x)
        assert len(queued) == number + 1
    meter._waits = meter._waits[-1:]
    axis.vote(x)
    assert [event.waited for event in events] == [0, 0, 0, 4, 0]
