"""The engine on the tiny checkpoint: all tasks, both layouts, same bits twice, cancel, errors, memory."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from twinreel import (
    Cancelled,
    Clip,
    Engine,
    EngineConfig,
    Keyframe,
    OutputOptions,
    Picture,
    Reference,
    Request,
    RequestError,
    Sound,
    decoding,
    ranks,
)
from twinreel.noise import Rows
from twinreel.watch import Event

RNG = np.random.default_rng(1)
PICTURE = Picture(RNG.integers(0, 256, (70, 100, 3), dtype=np.uint8))
SOUND = Sound((0.1 * RNG.standard_normal((2, 16_000))).astype(np.float32), 32_000)
CLIP = Clip(RNG.integers(0, 256, (24, 64, 64, 3), dtype=np.uint8), 24.0, SOUND)
SHORT = {"steps": 3, "duration": 0.9}
T2VA = Request("A cat plays piano.", **SHORT)
FL2VA = Request("The sea.", keyframes=(Keyframe(PICTURE), Keyframe(PICTURE, -1)), **SHORT)
REF2VA = Request(
    "<Picture 1> hears <Audio 1>.", references=(Reference("image", PICTURE), Reference("video", CLIP)), **SHORT
)
ALL = {"t2va": T2VA, "fl2va": FL2VA, "ref2va": REF2VA}


def make(path: Path, **config: object) -> Engine:
    return Engine(EngineConfig(model=str(path), device="cpu", threads=2, **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tiny_original: Path) -> Engine:
    return make(tiny_original)


def hashes(engine: Engine, request: Request) -> dict[str, str]:
    return engine.generate(request).report["sha256"]


@pytest.fixture(scope="module")
def golden(engine: Engine) -> dict[str, dict[str, str]]:
    return {task: hashes(engine, request) for task, request in ALL.items()}


def test_media_and_report(engine: Engine) -> None:
    media = engine.generate(FL2VA)
    assert media.video.shape == (22, 64, 96, 3) and media.video.dtype == np.uint8
    assert media.audio.shape == (2, 37 * 800) and media.audio.dtype == np.float32 and np.abs(media.audio).max() <= 1
    report = json.loads(json.dumps(media.report, allow_nan=False))
    assert report["plan"]["task"] == "fl2va" and (report["plan"]["steps"], report["plan"]["calls"]) == (3, 2)
    assert report["request"]["seed"] == 42 and len(report["sigmas"]["video"]) == len(report["sigmas"]["audio"]) == 3
    assert [(row["kind"], row["role"]) for row in report["rows"]] == [
        ("text", "text"), ("video", "condition"), ("video", "condition"), ("audio", "target"), ("video", "target"),
    ]  # fmt: skip
    assert report["engine"]["dtypes"]["dit"] == "float32" and report["engine"]["ops"]["attention"]
    assert set(report["flags"]) == {"encode", "denoise", "decode"} and report["versions"]["torch"]
    assert {"read", "encode", "denoise", "decode"} <= set(report["stages"])
    assert all(record["peak_bytes"] > 0 for record in report["stages"].values())
    assert report["policy"]["calls"] == 2


def test_same_request_same_hashes(engine: Engine, golden: dict[str, dict[str, str]]) -> None:
    for task, request in ALL.items():
        assert hashes(engine, request) == golden[task]
    assert hashes(engine, replace(T2VA, seed=43))["frames"] != golden["t2va"]["frames"]
    assert len({each["frames"] for each in golden.values()}) == 3


def test_both_layouts_give_equal_outputs(tiny_diffusers: Path, golden: dict[str, dict[str, str]]) -> None:
    other = make(tiny_diffusers)
    assert other.parts.weights.layout == "diffusers"
    assert {task: hashes(other, request) for task, request in ALL.items()} == golden


def test_one_partition_with_all_tasks(tiny_all: Path, golden: dict[str, dict[str, str]]) -> None:
    other = make(tiny_all)
    assert hashes(other, T2VA) == golden["t2va"]
    assert hashes(other, REF2VA)["frames"] != golden["ref2va"]["frames"]  # the other partition has its own weights


def test_one_partition_alone_refuses_the_other_tasks(tiny_original: Path, golden: dict[str, dict[str, str]]) -> None:
    other = make(tiny_original / "FL2VA")
    with pytest.raises(RequestError, match="t2va, fl2va"):
        other.generate(REF2VA)
    assert other.parts.loaded == ()  # refused before any weight
    assert hashes(other, T2VA) == golden["t2va"]


def test_residency_does_not_change_bits(tiny_original: Path, golden: dict[str, dict[str, str]]) -> None:
    other = make(tiny_original, residency="stages")
    assert other.describe()["residency"] == "stages"
    for task, request in ALL.items():
        assert hashes(other, request) == golden[task]
        assert other.parts.loaded == ()


def test_parts_are_loaded_when_first_needed(tiny_original: Path) -> None:
    other = make(tiny_original)
    assert other.parts.loaded == ()
    other.generate(T2VA)
    assert set(other.parts.loaded) == {
        "text_encoder", "dit:fl2va", "modulation:fl2va", "video_decoder", "audio_decoder",
    }  # fmt: skip


def test_bf16_is_another_result_of_the_same_shape(tiny_original: Path, golden: dict[str, dict[str, str]]) -> None:
    other = make(tiny_original, precision="bf16")
    media = other.generate(T2VA)
    assert media.report["engine"]["dtypes"]["dit"] == "bfloat16"
    assert media.report["sha256"]["frames"] != golden["t2va"]["frames"]
    assert other.parts["dit:fl2va"].final_layer.video_out.weight.dtype == torch.float32


def test_render_writes_what_save_writes(engine: Engine, tmp_path: Path, golden: dict[str, dict[str, str]]) -> None:
    report = engine.render(T2VA, tmp_path / "a.mp4", OutputOptions(crf=30))
    saved = engine.generate(T2VA).save(tmp_path / "b.mp4", crf=30)
    assert (tmp_path / "a.mp4").read_bytes() == saved.read_bytes()
    beside = [json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json")]
    assert beside[0]["sha256"] == beside[1]["sha256"] == report["sha256"]
    assert report["sha256"]["frames"] == golden["t2va"]["frames"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.mp4", "b.json", "b.mp4"]


@pytest.mark.parametrize(
    ("name", "output", "field"),
    [
        ("a.avi", OutputOptions(), "output"),
        ("none/a.mp4", OutputOptions(), "output"),
        ("a.mp4", OutputOptions(crf=52), "crf"),
        ("a.mp4", OutputOptions(preset="best"), "preset"),
    ],
)
def test_bad_outputs_are_refused_first(
    engine: Engine, tmp_path: Path, name: str, output: OutputOptions, field: str
) -> None:
    events: list[Event] = []
    with pytest.raises(RequestError) as caught:
        engine.render(T2VA, tmp_path / name, output, events.append)
    assert caught.value.field == field and events == []


def test_progress_counts_every_call_and_frame(engine: Engine) -> None:
    events: list[Event] = []
    engine.generate(T2VA, events.append)
    calls = [(event.done, event.total) for event in events if event.stage == "denoise"]
    assert calls == [(0, 2), (1, 2), (2, 2)]
    assert [event.done for event in events if event.stage == "decode"][-1] == 22
    assert all(event.eta is None or event.eta >= 0 for event in events)


def test_cancel_ends_within_a_step_and_the_next_request_works(
    engine: Engine, golden: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    seen: list[Event] = []

    def watch(event: Event) -> None:
        seen.append(event)
        if event.stage == "denoise" and event.done == 1:
            engine.cancel()

    with pytest.raises(Cancelled):
        engine.generate(replace(T2VA, steps=50), watch)
    assert max(event.done for event in seen if event.stage == "denoise") == 1
    with pytest.raises(Cancelled):
        engine.render(
            T2VA, tmp_path / "a.mp4", watch=lambda event: engine.cancel() if event.stage == "decode" else None
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.latents.safetensors"]
    assert hashes(engine, T2VA) == golden["t2va"]


def test_a_value_that_is_not_finite_stops_at_its_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    dit = engine.parts["dit:fl2va"] if "dit:fl2va" in engine.parts.loaded else None
    if dit is None:
        engine.generate(T2VA)
        dit = engine.parts["dit:fl2va"]
    steps = []

    def broken(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> object:
        steps.append(1)
        return (output[0], output[1] * float("nan")) if len(steps) == 2 else None

    hook = dit.register_forward_hook(broken)
    try:
        with pytest.raises(FloatingPointError, match="step 1: the audio velocity"):
            engine.generate(T2VA)
    finally:
        hook.remove()
    assert len(steps) == 2


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if isinstance(o, torch.Tensor))


def test_sound_beside_the_pictures_changes_no_bit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = engine.generate(T2VA).report["sha256"]
    monkeypatch.setattr(decoding, "apart", lambda parts: True)
    assert engine.generate(T2VA).report["sha256"] == wanted


def test_memory_returns_to_idle(engine: Engine) -> None:
    for request in ALL.values():
        engine.generate(request)
    idle = live_tensor_bytes()
    for request in ALL.values():
        engine.generate(request)
    assert live_tensor_bytes() == idle
    with pytest.raises(Cancelled):
        engine.generate(REF2VA, lambda event: engine.cancel() if event.stage == "denoise" else None)
    with pytest.raises(RequestError):
        engine.generate(replace(REF2VA, references=(Reference("image", "/no/such.png"),)))
    with pytest.raises(ZeroDivisionError):
        engine.generate(T2VA, lambda event: 1 // 0 if event.stage == "decode" else None)
    assert live_tensor_bytes() == idle


def test_no_gradients_and_no_rank(engine: Engine) -> None:
    kept: list[Rows] = []
    original = engine._vote
    engine._vote = lambda step, velocity: kept.append(velocity) or original(step, velocity)  # type: ignore[method-assign]
    try:
        engine.generate(T2VA)
    finally:
        engine._vote = original  # type: ignore[method-assign]
    assert kept and all(t.grad_fn is None and not t.requires_grad for rows in kept for t in (rows.video, rows.audio))
    assert not torch.distributed.is_initialized()


def test_no_socket_is_opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    engine.generate(REF2VA)


def test_two_threads_take_turns(engine: Engine, golden: dict[str, dict[str, str]]) -> None:
    results: dict[str, dict[str, str]] = {}
    threads = [
        threading.Thread(target=lambda t=task, r=request: results.update({t: hashes(engine, r)}))
        for task, request in ALL.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == golden


def test_a_run_that_would_wait_for_itself_is_refused(
    engine: Engine, golden: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    calls = (
        lambda: engine.generate(T2VA),
        lambda: engine.render(T2VA, tmp_path / "a.mp4"),
        lambda: engine.decode(tmp_path / "a.latents.safetensors", tmp_path / "a.mp4"),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="in the middle of a run"):
            engine.generate(T2VA, lambda event, call=call: call() if event.stage == "encode" else None)  # type: ignore[misc]
    assert hashes(engine, T2VA) == golden["t2va"]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda engine, path: engine.generate(T2VA, 5), "watch"),
        (lambda engine, path: engine.generate(T2VA, None), "watch"),
        (lambda engine, path: engine.generate(T2VA, boundary=5), "boundary"),
        (lambda engine, path: engine.render(T2VA, path, watch="x"), "watch"),
        (lambda engine, path: engine.render(T2VA, path, {}), "output"),
        (lambda engine, path: engine.render(T2VA, path, OutputOptions(private=1)), "private"),
        (lambda engine, path: engine.render("A cat.", path), "request"),
        (lambda engine, path: engine.render(T2VA, None), "output"),
        (lambda engine, path: engine.decode("x", path, ""), "output"),
        (lambda engine, path: engine.decode(5, path), "latents"),
        (lambda engine, path: engine.decode("a\0b", path), "latents"),
        (lambda engine, path: engine.decode("", path), "latents"),
        (lambda engine, path: Clip(CLIP.frames, 24.0, notes=5), "notes"),
        (lambda engine, path: replace(PICTURE, notes="x"), "notes"),
        (lambda engine, path: replace(SOUND, notes=(5,)), "notes"),
    ],
)
def test_values_of_other_types_are_refused_by_name(
    engine: Engine, tmp_path: Path, call: Callable[[Engine, Path], object], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(engine, tmp_path / "a.mp4")
    assert caught.value.field == field and not list(tmp_path.iterdir())


def test_a_process_of_its_own_gives_the_same_hashes(tiny_original: Path, golden: dict[str, dict[str, str]]) -> None:
    code = (
        "import json, sys, torch\n"
        "from twinreel import *\n"
        "e = Engine(EngineConfig(model=sys.argv[1], device='cpu', threads=2))\n"
        "r = e.generate(Request('A cat plays piano.', steps=3, duration=0.9)).report['sha256']\n"
        "assert 'diffusers' not in sys.modules and 'torchvision' not in sys.modules\n"
        "print(json.dumps(r))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_original)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == golden["t2va"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_closed_engine_refuses(tiny_original: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.Ranks, "_start", lambda ranks: None)
    engine = Engine(EngineConfig(model=str(tiny_original), device="cpu", gpus=gpus))
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed; make another"):
        engine.generate(Request("a ball"))
