"""Where weights lie, on one CUDA device: same bits in every mode, copies beside work, page-locked memory given back, peaks
as predicted. Skips where there is no device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tiny import tiny_spec, write_tiny
from twinreel import Engine, EngineConfig, Request
from twinreel.layout import shard
from twinreel.memory.estimate import CUDA_OWN, estimate
from twinreel.memory.estimate import Setting as Kept
from twinreel.models.streamed import Hosted, Shelf, Staged, Streamed, host_run
from twinreel.ops import select
from twinreel.pipeline import predictor
from twinreel.spec import Spec
from twinreel.tools.bench_dit import STEP, Setting, Sizes, equal, inputs, plan_of, time_call
from twinreel.tools.bench_memory import Models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REQUEST = Request("A cat plays piano.", steps=5, duration=0.9)
LAYERS = 5
WIDTH = 4096  # of the layers below: 32 MiB each, and products that take longer than a copy


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_spec()
    spec = replace(spec, dit=replace(spec.dit, layers=LAYERS))
    return write_tiny(tmp_path_factory.mktemp("deep") / "model", spec=spec)


def make(path: Path, **config: object) -> Engine:
    return Engine(EngineConfig(model=str(path), device="cuda", **config))  # type: ignore[arg-type]


@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_every_residency_gives_the_same_bits(deep: Path, ops: str) -> None:
    wanted = make(deep, ops=ops, residency="all").generate(REQUEST).report["sha256"]
    for residency in ("conditioner", "stages", "layers", "mapped"):
        for adaln in ("live", "precompute"):
            engine = make(deep, ops=ops, residency=residency, adaln=adaln)
            for _ in range(2):  # the second request finds the layers of the first
                report = engine.generate(REQUEST).report
                assert report["sha256"] == wanted, (residency, adaln)
            fetched = report["memory"]["fetched"]
            assert ("text_encoder" in fetched) is (residency != "stages")
            if residency in ("layers", "mapped"):
                assert fetched["dit:fl2va"]["layers"] >= 4 * LAYERS - 2


def test_auto_and_the_cap_of_a_process(deep: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    try:
        parts = make(deep).parts
        assert parts._free.device is not None and parts._free.device <= total // 4
        assert parts.residency == "all" and "GiB free" in parts.why["residency"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


# ---- layers ----------------------------------------------------------------------------------------------------------


def value(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.bfloat16) * WIDTH**-0.5


def layers_of(source: type[Hosted] | type[Staged], count: int = 6) -> Streamed:
    def write(index: int, tensors: Mapping[str, Tensor]) -> None:
        tensors["weight"].copy_(value(index))

    with torch.device("meta"):
        made = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(count))
    device = torch.device("cuda", 0)
    return Streamed(made, source([Shelf.of(layer) for layer in made], write, device), device)


def walk(layers: object, x: Tensor) -> Tensor:
    for layer in layers:  # type: ignore[attr-defined]
        for _ in range(8):
            x = torch.tanh(layer(x))
    return x


@pytest.mark.parametrize("source", [Hosted, Staged])
@torch.inference_mode()
def test_no_layer_is_used_before_it_has_come_or_after_it_has_gone(source: type[Hosted] | type[Staged]) -> None:
    streamed, resident = layers_of(source), nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
    for index, layer in enumerate(resident):
        layer.weight = nn.Parameter(value(index).cuda(), requires_grad=False)
    x = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)
    wanted = walk(resident, x)
    for rows in (4096, 4096, 16, 16):  # work longer than a copy, and shorter
        expected = wanted if rows == 4096 else walk(resident, x[:rows])
        assert torch.equal(walk(streamed, x[:rows]), expected)


@torch.inference_mode()
def test_copies_run_beside_work() -> None:
    from torch.profiler import ProfilerActivity, profile

    streamed = layers_of(Hosted, 8)
    x = torch.randn(8192, WIDTH, device="cuda", dtype=torch.bfloat16)
    walk(streamed, x)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        walk(streamed, x)
        torch.cuda.synchronize()
    device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in device if "HtoD" in event.name or "Host to Device" in event.name]
    work = [event.time_range for event in device if "Mem" not in event.name]
    copies = [copy for copy in copies if copy.end - copy.start > 50]  # microseconds: a layer, not a scalar
    beside = [copy for copy in copies if any(run.start < copy.end and copy.start < run.end for run in work)]
    assert len(copies) >= 7, [event.name for event in device][:20]
    assert len(beside) >= len(copies) - 1, f"{len(beside)} of {len(copies)} copies ran beside work"


def test_host_memory_is_page_locked_and_given_back() -> None:
    streamed = layers_of(Hosted, 3)
    runs = streamed._source._runs  # type: ignore[attr-defined]
    assert all(is_locked(run) for run in runs)
    kept = runs[0]
    streamed[1]
    del streamed, runs
    gc.collect()
    assert not is_locked(kept)
    layers_of(Hosted, 3)


def test_a_lock_that_is_refused_fails_no_kernel_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, real, locked = torch.device("cuda", 0), torch.cuda.cudart(), list[int]()

    class Twice:
        def cudaHostRegister(self, *words: int) -> int:  # noqa: N802
            locked.append(words[0])
            real.cudaHostRegister(*words)
            return int(real.cudaHostRegister(*words))

    monkeypatch.setattr(torch.cuda, "cudart", Twice)
    try:
        with pytest.raises(RuntimeError, match="CUDA error 712"):  # already registered
            host_run(1 << 20, device, device)
        assert torch.ones(1, device=device).item() == 1
    finally:
        real.cudaHostUnregister(locked[0])


def is_locked(run: Tensor) -> bool:
    """Whether the driver knows these pages; `Tensor.is_pinned` knows torch's own only."""
    kind = ctypes.c_uint(0)
    memory_type = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    pointer = ctypes.c_ulonglong(run.data_ptr())
    error = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(kind), memory_type, pointer)
    return error == 0 and kind.value == 1  # CU_MEMORYTYPE_HOST


# ---- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", ["reference", "triton"])
@torch.inference_mode()
def test_peaks_are_as_predicted(ops: str) -> None:
    spec = tiny_spec()
    dit = replace(spec.dit, hidden=2048, heads=16, head_dim=128, ffn=8192, layers=12, rope_freqs=16, time_dim=512)
    spec: Spec = replace(spec, dit=dit, world=replace(spec.world, area_cap=1344 * 768, short_edge=768))
    setting = Setting(torch.device("cuda", 0), torch.bfloat16, "precompute", 0.05, False)
    table = select(ops, "cuda", "auto", dtype=torch.bfloat16, head_dim=128)
    plan, layout = plan_of(Sizes(22, (1344, 768), 300), spec)
    rows = {kind: len(getattr(layout, f"{kind}_indices")) for kind in ("text", "audio", "video")}
    steps, text, start = inputs(spec, plan, layout, setting)
    models, outputs, before = Models(spec, table, setting), [], torch.cuda.memory_allocated()
    for residency in ("stages", "layers"):
        model, modulation = models.get(residency)
        modulation.prepare([timesteps for timesteps, _ in steps])
        call = predictor(model, modulation, text, shard(layout, 1, 0), steps)
        row, out = time_call(partial(call, STEP, start), setting)
        outputs.append(out)
        kept = Kept("cuda", 2, 2, 4, residency, "precompute", ops)
        predicted = estimate(plan, rows, spec, kept)["denoise"]["device"] - CUDA_OWN
        measured = row["peak_gib"] * 2**30 - before
        assert 0.9 < predicted / measured < 1.1, (residency, predicted / 2**20, measured / 2**20)
        del model, modulation, call
    assert equal(*outputs)
