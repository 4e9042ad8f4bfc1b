"""Where weights lie: layers that take turns give the same bits in every mode, and it is counted that they did; memory that
was given is a bound; rows in chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import twinreel.memory.choose as choosing
from tiny import BUILD, load, tiny_spec, write_tiny
from twinreel import Engine, EngineConfig, Request
from twinreel.config import MODES, MOST_ROWS, RESIDENCIES, check_config
from twinreel.errors import CheckpointError, ConfigError
from twinreel.memory.choose import GIB, Free
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.modulation import LiveModulation
from twinreel.models.streamed import Hosted, Shelf, Staged, Streamed, host_run
from twinreel.ops import select
from twinreel.parallel import Parallel
from twinreel.parallel.attend import chunks
from twinreel.planner import plan_request
from twinreel.weights import locate, read_spec
from twinreel.weights.keymap import LAYERS
from twinreel.weights.layer_files import LayerFiles
from twinreel.weights.stream import load_into

CPU = torch.device("cpu")
LAYER_COUNT = 5  # odd, and more than there are slots
REQUEST = Request("A cat plays piano.", steps=4, duration=0.9)
CALLS = REQUEST.steps - 1
PARTS = ("dit:fl2va", "modulation:ref2va", "text_encoder")
SOURCES: Mapping[str, Callable[..., Hosted | Staged]] = {"hosted": Hosted, "staged": Staged}


@pytest.fixture(scope="module", params=["original", "diffusers"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose trunk is longer than the slots are many."""
    spec = tiny_spec()
    spec = replace(spec, dit=replace(spec.dit, layers=LAYER_COUNT))
    return write_tiny(tmp_path_factory.mktemp("deep") / request.param, layout=request.param, spec=spec)


def layers_of(module: nn.Module, part: str) -> tuple[nn.Module, str]:
    path, _, leaf = LAYERS[part.partition(":")[0]].removesuffix(".").rpartition(".")
    return module.get_submodule(path), leaf


@torch.inference_mode()
def streamed(path: Path, part: str, source: str) -> tuple[nn.Module, Streamed]:
    """A part with its layers streamed."""
    checkpoint = locate(path)
    spec = read_spec(checkpoint)
    with torch.device("meta"):
        module = BUILD[part.partition(":")[0]](spec)
    owner, leaf = layers_of(module, part)
    layers = getattr(owner, leaf)
    shelves = [Shelf.of(layer) for layer in layers]
    made = Streamed(layers, SOURCES[source](shelves, LayerFiles(checkpoint, spec, part).read, CPU), CPU)
    setattr(owner, leaf, made)
    load_into(module, checkpoint, spec, part, apart=LAYERS[part.partition(":")[0]])
    return module, made


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("part", PARTS)
def test_layers_are_those_of_a_loaded_part(deep: Path, part: str, source: str) -> None:
    module, layers = streamed(deep, part, source)
    whole = load(locate(deep), part)
    owner, leaf = layers_of(whole, part)
    for number in (0, 1):
        for index, (got, wanted) in enumerate(zip(layers, getattr(owner, leaf), strict=True)):
            expected = wanted.state_dict()
            assert got.state_dict().keys() == expected.keys()
            for name, tensor in got.state_dict().items():
                assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), (number, index)
    rest = {name: x for name, x in module.state_dict().items() if not name.startswith(LAYERS[part.partition(":")[0]])}
    assert rest and all(torch.equal(x, whole.state_dict()[name]) for name, x in rest.items())


@pytest.mark.parametrize("source", SOURCES)
def test_any_order_gives_the_right_layer(deep: Path, source: str) -> None:
    _, layers = streamed(deep, PARTS[0], source)
    wanted = load(locate(deep), PARTS[0]).blocks  # type: ignore[union-attr]
    for index in (3, 3, 0, 4, 2, 1, 0, 3):
        assert torch.equal(layers[index].norm1.weight, wanted[index].norm1.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(("count", "passes", "fetched"), [(1, 3, 1), (2, 3, 2), (4, 3, 13), (5, 3, 16)])
def test_two_slots_hold_the_layers_and_the_next_comes_early(count: int, passes: int, fetched: int) -> None:
    asked: list[int] = []

    def fill(index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors["weight"].fill_(index)

    class Told(Hosted):
        def send(self, index: int, slot: torch.Tensor) -> None:
            asked.append(index)
            super().send(index, slot)

    made = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(count))
    layers = Streamed(made, Told([Shelf.of(layer) for layer in made], fill, CPU), CPU)
    memory = {layer.weight.untyped_storage().data_ptr() for layer in made}  # type: ignore[operator, union-attr]
    assert len(memory) == min(count, 2)
    early = []
    for _ in range(passes):
        for index, layer in enumerate(layers):
            assert (layer.weight == index).all()
            early.append((index + 1) % count in asked[-2:])
    assert layers.fetched == len(asked) == fetched
    assert count == 5 or all(early)  # an odd list meets itself in a slot once a pass


def test_a_read_that_fails_is_told_and_the_next_works() -> None:
    failing = [True]

    def fill(index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if index == 2 and failing:
            failing.pop()
            raise CheckpointError("the file is gone")
        tensors["weight"].fill_(index)

    made = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    layers = Streamed(made, Staged([Shelf.of(layer) for layer in made], fill, CPU), CPU)
    with pytest.raises(CheckpointError, match="gone"):
        list(layers)
    assert [int(layer.weight[0, 0]) for layer in layers] == [0, 1, 2, 3]  # type: ignore[index, arg-type, union-attr]


@pytest.mark.parametrize("error", [0, 712])
def test_pages_are_locked_on_their_device_and_a_refusal_leaves_no_error(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, current, told, pending = torch.device("cuda", 1), [CPU], list[object](), list[int]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
            told.append(("lock", current[-1]))
            pending.extend([error] * bool(error))
            return error

        def cudaHostUnregister(self, *_: int) -> None:  # noqa: N802
            told.append(("unlock", current[-1]))

    def launch(*_: object, device: torch.device) -> None:
        told.append(("launch", device))
        if pending:
            raise RuntimeError(f"CUDA error {pending.pop()}")  # as torch does: once, whatever was launched

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch, "ones", launch)
    owner = nn.Identity()
    with pytest.raises(RuntimeError, match="CUDA error 712.*give less with host_memory") if error else nullcontext():
        assert len(host_run(5000, device, owner)) == 5000
    del owner
    assert told == [("lock", device), ("launch", device) if error else ("unlock", device)] and not pending


# ---- engine ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(deep: Path) -> Callable[..., tuple[Engine, dict[str, object]]]:
    def make(**config: object) -> tuple[Engine, dict[str, object]]:
        engine = Engine(EngineConfig(model=str(deep), device="cpu", threads=2, **config))  # type: ignore[arg-type]
        return engine, engine.generate(REQUEST).report

    return make


@pytest.fixture(scope="module")
def plain(run: Callable[..., tuple[Engine, dict[str, object]]]) -> dict[str, object]:
    return run()[1]


@pytest.mark.parametrize(
    ("residency", "adaln"),
    [("conditioner", "live"), ("stages", "live"), ("layers", "live"), ("layers", "precompute"), ("mapped", "live"),
     ("mapped", "precompute")],
)  # fmt: skip
def test_every_residency_gives_the_same_bits(
    run: Callable[..., tuple[Engine, dict[str, object]]], plain: dict[str, object], residency: str, adaln: str
) -> None:
    engine, report = run(residency=residency, adaln=adaln)
    memory: dict[str, object] = report["memory"]  # type: ignore[assignment]
    assert report["sha256"] == plain["sha256"]
    assert memory["residency"] == residency and memory["why"]["residency"] == "asked for"  # type: ignore[index]
    fetched: dict[str, dict[str, int]] = memory["fetched"]  # type: ignore[assignment]
    mode = MODES[residency]
    wanted = {name for name in ("text_encoder", "dit:fl2va", "modulation:fl2va") if mode.streams(name)}
    assert set(fetched) == wanted - ({"modulation:fl2va"} if adaln == "precompute" else set())
    if "dit:fl2va" in fetched:
        # each call brings every layer but those that the call before has left in its slots
        assert CALLS * LAYER_COUNT - 2 <= fetched["dit:fl2va"]["layers"] <= CALLS * LAYER_COUNT + 2
        assert fetched["dit:fl2va"]["bytes"] > 10_000 * fetched["dit:fl2va"]["layers"]
    assert ("dit:fl2va" in engine.parts.loaded) is mode.keep
    assert "text_encoder" not in engine.parts.loaded


def test_layers_in_host_memory_are_read_once(run: Callable[..., tuple[Engine, dict[str, object]]], monkeypatch) -> None:
    reads: list[int] = []
    read = LayerFiles.read
    monkeypatch.setattr(
        LayerFiles, "read", lambda self, index, tensors: (reads.append(index), read(self, index, tensors))[1]
    )
    engine, first = run(residency="layers", adaln="precompute")
    assert sorted(reads) == sorted([*range(4), *range(LAYER_COUNT)])
    assert engine.generate(REQUEST).report["sha256"] == first["sha256"] and len(reads) == 4 + LAYER_COUNT


def test_parts_that_wait_make_room_in_host_memory(run: Callable[..., tuple[Engine, dict[str, object]]]) -> None:
    engine, first = run(residency="layers", adaln="precompute")
    sizes = {name: hosted.nbytes for name, hosted in engine.parts._hosted.items()}
    assert list(sizes) == ["text_encoder", "dit:fl2va"]
    engine.parts._hosted.clear()
    # room for the larger of the two; the choice that was made for the first request is another matter
    engine.parts._free = Free(None, int(1.2 * max(sizes.values())))
    engine.parts._choose = lambda *_, **__: engine.parts._choice  # type: ignore[method-assign]
    assert engine.generate(REQUEST).report["sha256"] == first["sha256"]
    assert list(engine.parts._hosted) == ["dit:fl2va"]


@pytest.mark.parametrize(("residency", "kept"), [("mapped", []), ("stages", []), ("conditioner", ["text_encoder"])])
def test_layers_go_when_the_residency_does_not_use_them(
    run: Callable[..., tuple[Engine, dict[str, object]]], residency: str, kept: list[str]
) -> None:
    engine, first = run(residency="layers")
    assert len(engine.parts._hosted) == 3
    engine.parts._asked = replace(engine.parts._asked, residency=residency)
    report = engine.generate(REQUEST).report
    assert report["memory"]["residency"] == residency and report["sha256"] == first["sha256"]
    assert list(engine.parts._hosted) == kept


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_cpu_runs_in_the_memory_that_was_given_or_refuses(deep: Path, residency: str) -> None:
    config = EngineConfig(model=str(deep), device="cpu", threads=2, residency=residency, host_memory=0.3)
    with pytest.raises(ConfigError, match="^(residency|host_memory): .* a tenth to spare") as refused:
        Engine(config).generate(REQUEST)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(refused.value))}$"):
        plan_request(REQUEST, config)
    said = re.search(r"give (\d\.\d+)", str(refused.value))
    assert said is not None
    report = Engine(enough := replace(config, host_memory=float(said[1]))).generate(REQUEST).report
    planned = plan_request(REQUEST, enough)["memory"]
    assert report["memory"]["residency"] == planned["setting"]["residency"]
    assert report["memory"]["why"] == planned["chosen"]
    assert report["memory"]["predicted_bytes"]["host"] * choosing.NEAR <= enough.host_memory * GIB < 0.9 * GIB


def test_one_device_only(deep: Path) -> None:
    for name in ("conditioner", "layers", "mapped"):
        with pytest.raises(ConfigError, match=f"^residency: {name} is for one GPU"):
            Engine(EngineConfig(model=str(deep), device="cpu", gpus=2, residency=name))
    with pytest.raises(ConfigError, match="^row_chunk: is for one GPU"):
        Engine(EngineConfig(model=str(deep), device="cpu", gpus=2, row_chunk=8192))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host_memory": 0}, "host_memory: got 0; use GiB"),
        ({"host_memory": True}, "host_memory: got True"),
        ({"row_chunk": 100}, "row_chunk: got 100; use a multiple of 8,192"),
        ({"row_chunk": -8192}, "row_chunk"),
        ({"row_chunk": MOST_ROWS + 8192}, "row_chunk: got 1056768; .* up to 1,048,576"),
        ({"row_chunk": 8192**99}, "row_chunk: got .{,99}; use"),
        ({"residency": "disk"}, "auto, all, conditioner, stages, layers, mapped"),
    ],
)
def test_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(EngineConfig(**values))  # type: ignore[arg-type]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chunk", "sizes"), [(10, 0, [10]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3])])
def test_chunks(count: int, chunk: int, sizes: list[int]) -> None:
    parts = chunks(count, chunk)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(count))


# Triton's interpreter takes a second a block
@pytest.mark.parametrize(
    ("table", "rows", "chunk"), [("reference", 230, 64), ("reference", 230, 100), ("triton", 30, 16)]
)
@torch.inference_mode()
def test_rows_in_chunks_give_the_same_bits(table: str, rows: int, chunk: int) -> None:
    spec, dtype = replace(tiny_spec().dit, layers=1), torch.float32
    dit = DiT(spec, select(table, "cpu", dtype=dtype, head_dim=spec.head_dim), Parallel.single(), dtype)
    modulation = LiveModulation(spec, dtype)
    torch.manual_seed(0)
    for parameter in (*dit.parameters(), *modulation.parameters()):
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    kinds = torch.tensor([1] * 5 + [2] * 12 + [0] * (rows - 17))
    where = tuple((kinds == tag).nonzero().flatten() for tag in (1, 0, 2))
    positions = torch.rand(rows, 3, dtype=torch.float64) * 9
    widths = (spec.hidden, spec.video_row, spec.audio_channels)
    text, video, audio = (torch.randn(len(index), width) for index, width in zip(where, widths, strict=True))
    made = []
    for size in (0, chunk):
        at = make_row_state(positions, kinds, where, spec, dtype, "cpu", chunk=size)  # type: ignore[arg-type]
        mod = modulation.at(torch.tensor([0.3, 0.6]), torch.arange(rows) % 2, at)
        seen: list[int] = []
        linears = dit.blocks[0].mlp.fc1, dit.blocks[0].attn.qkv_proj  # type: ignore[union-attr]
        told = lambda module, rows, out, seen=seen: seen.append(len(out))  # noqa: E731
        hooks = [linear.register_forward_hook(told) for linear in linears]  # type: ignore[operator, union-attr]
        made.append(dit(video, audio, text, at, mod))
        assert seen == ([rows] if not size else [size] * (rows // size) + [rows % size]) * 2
        for hook in hooks:
            hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_a_request_runs_in_chunks(
    run: Callable[..., tuple[Engine, dict[str, object]]], plain: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinreel.config.ROW_UNIT", 16)
    _, report = run(row_chunk=32)
    assert report["sha256"] == plain["sha256"] and report["memory"]["row_chunk"] == 32  # type: ignore[index]


def test_tables_of_the_running_schedule_stay_where_memory_is_just_enough(tiny_original: Path) -> None:
    """They are among what the request needs: nothing need be left for them besides."""

    def runs(memory: float) -> tuple[int, list[str]]:
        config = EngineConfig(
            model=str(tiny_original), device="cpu", residency="stages", adaln="precompute", host_memory=memory
        )
        engine = Engine(config)
        made = [engine.generate(REQUEST).report["adaln"]["tables"] for _ in range(3)]
        return engine.parts._choice.host_bytes, made

    need, plenty = runs(64.0)
    assert plenty[0] == "made" and "made" not in plenty[1:]
    assert runs((need * choosing.NEAR + 1024) / GIB) == (need, plenty)
