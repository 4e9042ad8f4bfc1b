"""AdaLN tables made beforehand: bit-equal to live, found again, few on the device, and safe when making them fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

from golden_dit import TINY, golden_pair
from twinreel import Engine, EngineConfig, Request
from twinreel.errors import Cancelled
from twinreel.memory.choose import NEAR, Free
from twinreel.models import modulation_tables
from twinreel.models.modulation import LiveModulation, StepModulation, StepRows, step_rows
from twinreel.models.modulation_tables import PrecomputedModulation, step_key
from twinreel.schedule import make_grid
from twinreel.watch import Event, Stages

DTYPES = (torch.float32, torch.bfloat16)
ROWS = step_rows(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 0, 2]))


def live(dtype: torch.dtype) -> LiveModulation:
    return golden_pair(TINY, dtype)[1].requires_grad_(False)


class Shelf:
    """The projections of a live modulation as a source; counts what is read, and may break half-way."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.state = {name: x.clone() for name, x in live(dtype).state_dict().items()}
        self.read: list[str] = []
        self.breaks_at: str | None = None

    def __call__(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.state.items():
            if name.startswith(prefix):
                if name == self.breaks_at:
                    raise OSError("the disk is gone")
                self.read.append(name)
                yield name, tensor.clone()


def make(dtype: torch.dtype, version: str = "one") -> tuple[PrecomputedModulation, Shelf]:
    shelf = Shelf(dtype)
    return PrecomputedModulation(TINY, dtype, "cpu", shelf, lambda: version), shelf


def schedule(steps: int, shift: float = 12.0) -> list[Tensor]:
    """Distinct timesteps as a request has them: one of them at the first step, then two, once three."""
    times = make_grid(steps, shift).times
    made = [torch.stack((t, t + (1 - t) / 4)) for t in times]
    made[0] = times[:1].clone()
    made[-1] = torch.cat((made[-1], torch.tensor([0.999])))
    return made


def assert_equal(mine: StepModulation, theirs: StepModulation) -> None:
    for index in range(TINY.layers):
        for branch in ("msa", "mlp"):
            a, b = getattr(mine.block(index), branch), getattr(theirs.block(index), branch)
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("shift", "scale", "gate", "rows"))
            assert a.shift.stride() == b.shift.stride()
    a, b = mine.final(), theirs.final()
    assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("shift", "scale", "rows"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_equals_live(dtype: torch.dtype) -> None:
    made, _ = make(dtype)
    steps, projected = schedule(6), live(dtype)
    facts = made.prepare(steps)
    assert facts["adaln"] == "precompute" and facts["tables"] == "made"
    count = sum(len(step) for step in steps)
    assert facts["bytes"] == count * (18 * TINY.layers + 2) * TINY.hidden * dtype.itemsize
    for step in steps:
        assert_equal(made.step(step, ROWS), projected.step(step, ROWS))


def test_one_batch_for_all_steps_would_not_be_what_live_does() -> None:
    """The batch of each step is its own: a product over all timesteps at once is another product."""
    made, shelf = make(torch.float32)
    seen: list[int] = []
    original = modulation_tables.F.linear

    def counting(g: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seen.append(len(g))
        return original(g, weight, bias)

    class Functions:
        linear = staticmethod(counting)

    patch = pytest.MonkeyPatch()
    patch.setattr(modulation_tables, "F", Functions)
    made.prepare(schedule(4))
    patch.undo()
    assert seen == [1, 2, 3] * (TINY.layers + 1)


def test_a_schedule_is_found_again_by_its_bits() -> None:
    made, shelf = make(torch.float32)
    steps = schedule(5)
    made.prepare(steps)
    shelf.read.clear()
    assert made.prepare([step.clone() for step in steps])["tables"] == "device" and not shelf.read
    nearly = [step.clone() for step in steps]
    nearly[2] = torch.nextafter(nearly[2], torch.tensor(2.0))
    assert step_key(nearly[2]) != step_key(steps[2])
    assert made.prepare(nearly)["tables"] == "made" and shelf.read
    with pytest.raises(AssertionError, match="prepare the schedule first"):
        made.step(steps[2], ROWS)


def test_other_weights_are_another_schedule() -> None:
    versions = ["one"]
    shelf = Shelf(torch.float32)
    made = PrecomputedModulation(TINY, torch.float32, "cpu", shelf, lambda: versions[-1])
    made.prepare(schedule(4))
    versions.append("two")
    assert made.prepare(schedule(4))["tables"] == "made"
    versions.append("one")
    assert made.prepare(schedule(4))["tables"] == "device"


def test_two_stay_on_the_device_and_older_ones_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulation_tables, "ON_HOST", 2)
    made, _ = make(torch.bfloat16)
    for shift in (2.0, 3.0, 4.0):
        made.prepare(schedule(4, shift))
    assert made.held == {"device": 2, "host": 1}
    assert made.prepare(schedule(4, 2.0))["tables"] == "host"
    assert made.held == {"device": 2, "host": 1}
    for step in schedule(4, 2.0):
        assert_equal(made.step(step, ROWS), live(torch.bfloat16).step(step, ROWS))
    made.release()
    assert made.held == {"device": 0, "host": 2}, "the oldest is forgotten"
    assert made.prepare(schedule(4, 2.0))["tables"] == "host"
    assert made.prepare(schedule(4, 3.0))["tables"] == "made"


@pytest.mark.parametrize(
    ("device", "host", "held"),
    [(inf, inf, (2, 1)), (1, inf, (1, 2)), (0, 3, (0, 3)), (inf, 2, (2, 0)), (1, 1, (1, 0)), (-1, -1, (0, 0))],
)
def test_the_oldest_give_way_where_room_is_short(device: float, host: float, held: tuple[int, int]) -> None:
    made, _ = make(torch.float32)
    size = [made.prepare(schedule(4, shift))["bytes"] for shift in (2.0, 3.0, 4.0)][0]
    there, everywhere = made.make_room(device * size, host * size)
    assert (there, everywhere) == (held[0] * size, sum(held) * size) and tuple(made.held.values()) == held
    assert (made.prepare(schedule(4, 4.0))["tables"] == "made") is (sum(held) == 0)


@pytest.mark.parametrize("broken", ["time_embedder.proj_out.bias", "blocks.1.adaln_proj.linear.bias"])
def test_a_failure_half_way_loses_nothing(broken: str) -> None:
    made, shelf = make(torch.float32)
    made.prepare(schedule(5))
    before, held = made.step(schedule(5)[1], ROWS), made.held
    shelf.breaks_at = broken
    with pytest.raises(OSError, match="disk"):
        made.prepare(schedule(7))
    assert made.held == held
    assert made.prepare(schedule(5))["tables"] == "device"
    assert_equal(made.step(schedule(5)[1], ROWS), before)
    shelf.breaks_at = None
    assert made.prepare(schedule(7))["tables"] == "made"


def test_making_tables_is_a_stage_that_can_be_cancelled() -> None:
    made, _ = make(torch.float32)
    told: list[tuple[str, int, int]] = []

    def watch(event: Event) -> None:
        told.append((event.stage, event.done, event.total))
        if len(told) == 3:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        made.prepare(schedule(4), Stages(watch, torch.device("cpu")))
    assert told == [("load", 0, 3), ("load", 1, 3), ("load", 2, 3)] and made.held == {"device": 0, "host": 0}


SHORT = Request("A cat plays piano.", steps=4, duration=0.9)


def run(path: Path, **config: object) -> tuple[Engine, dict]:
    engine = Engine(EngineConfig(model=str(path), device="cpu", **config))  # type: ignore[arg-type]
    return engine, engine.generate(SHORT).report


@pytest.mark.parametrize(("layout", "residency"), [("tiny_original", "all"), ("tiny_diffusers", "stages")])
def test_an_engine_gives_the_same_bits_and_keeps_no_projection(
    layout: str, residency: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(layout)
    _, wanted = run(path)
    assert wanted["adaln"] == {"adaln": "live"} and wanted["engine"]["adaln"] == "live"
    engine, report = run(path, adaln="precompute", residency=residency)
    assert report["sha256"] == wanted["sha256"] and report["adaln"]["tables"] == "made"
    again = engine.generate(SHORT).report
    assert again["sha256"] == wanted["sha256"]
    assert again["adaln"]["tables"] == ("device" if residency == "all" else "host")
    assert not any(isinstance(part, LiveModulation) for part in engine.parts._modules.values())


@pytest.mark.parametrize(("room", "kept"), [(0.5, 1), (9, 3)])
def test_earlier_tables_get_what_a_request_leaves(tiny_all: Path, room: float, kept: int) -> None:
    engine, report = run(tiny_all, residency="stages", adaln="precompute")
    need, size = report["memory"]["predicted_bytes"]["host"], report["adaln"]["bytes"]
    engine.parts._free = Free(None, int((need + room * size) * NEAR))
    for seed in range(2):  # other timesteps, as many
        engine.generate(replace(SHORT, shifts=(6.0 + seed, 3.0)))
    (tables,) = engine.parts._tables.values()
    assert sum(tables.held.values()) == kept and tables.nbytes == kept * size


def test_step_rows_are_timestep_major() -> None:
    assert isinstance(ROWS, StepRows)
    assert ROWS.table.tolist() == [1, 0, 3, 5] and ROWS.timestep.tolist() == [0, 0, 1, 1]
