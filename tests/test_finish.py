"""Nothing lost: latents outlive every failure after sampling, and finish the run; the file is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from interrupted import LATENTS, T2VA, interrupt, names
from twinreel import (
    Cancelled,
    Engine,
    EngineConfig,
    Keyframe,
    OutputOptions,
    Request,
    RequestError,
    cli,
)
from twinreel import finish as finishing
from twinreel import progress as progressing
from twinreel.output import write as writing
from twinreel.output.latents import FORMAT
from twinreel.watch import Event


@pytest.mark.parametrize("stage", ["read", "load", "encode", "denoise"])
def test_a_failure_before_the_latents_leaves_nothing(tiny_all: Path, tmp_path: Path, stage: str):
    engine = Engine(EngineConfig(model=str(tiny_all), device="cpu", threads=2))

    def watch(event: Event) -> None:
        if event.stage == stage:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.render(T2VA, tmp_path / "a.mp4", watch=watch)
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_in_decode_keeps_latents_that_finish_the_run(
    engine: Engine, tmp_path: Path, whole: bytes, error: type[BaseException]
):
    notes = interrupt(engine, tmp_path, error=error).__notes__
    assert names(tmp_path) == [LATENTS]
    assert len(notes) == 1 and f"twinreel decode {tmp_path / LATENTS} -o {tmp_path / 'a.mp4'}" in notes[0]
    with pytest.raises(RequestError, match="twinreel decode"):
        engine.render(T2VA, tmp_path / "a.mp4")
    report = engine.decode(tmp_path / LATENTS, tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == whole and names(tmp_path) == ["a.json", "a.mp4"]
    assert report["request"]["prompt"] == T2VA.prompt and report["decoded_by"]["versions"]["torch"]
    beside = json.loads((tmp_path / "a.json").read_text())
    assert beside["sha256"] == report["sha256"] and {"denoise", "decode", "mux"} <= set(beside["stages"])


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_run_never_replaces_what_it_reads(engine: Engine, tmp_path: Path, number: int, capsys):
    picture, asked = tmp_path / "a.json", tmp_path / "b.json"
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    asked.write_text('{"prompt": "A cat."}')
    (tmp_path / "c.json").write_bytes(save({}, {"format": FORMAT}))  # refused before more of it is read
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run, words = (
        (lambda to: engine.render(replace(T2VA, keyframes=(Keyframe(str(picture)),)), to, OutputOptions(overwrite=True)),
         ["generate", "A cat.", "--first", str(picture), "-o", str(tmp_path / "a.mp4")]),
        (None, ["generate", "--request", str(asked), "-o", str(tmp_path / "b.mp4")]),
        (lambda to: engine.decode(tmp_path / "c.json", to, OutputOptions(overwrite=True)),
         ["decode", str(tmp_path / "c.json"), "-o", str(tmp_path / "c.mp4")]),
        (None, ["generate", "A cat.", "--trace", str(tmp_path / "d"), "-o", str(tmp_path / "d")]),
    )[number]  # fmt: skip
    if run is not None:
        with pytest.raises(RequestError, match="which this run needs"):
            run(words[-1])
    assert cli.main([*words, "--overwrite", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == "output"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", [".mkv", ".webm", ".wav", ".npz", ""])
def test_every_format_and_no_leftovers(engine: Engine, tmp_path: Path, suffix: str):
    report = engine.render(T2VA, tmp_path / f"a{suffix}")
    assert names(tmp_path) == sorted([f"a{suffix}", "a.json"])
    assert report["faults"] == [] and report["written"]["samples"] == 37 * 800
    assert report["written"]["frames"] == (0 if suffix == ".wav" else 22)
    media = engine.generate(T2VA)
    if suffix == ".npz":
        with np.load(tmp_path / "a.npz") as arrays:
            assert np.array_equal(arrays["frames"], media.video) and np.array_equal(arrays["audio"], media.audio)
    if suffix:
        assert media.save(tmp_path / f"b{suffix}").read_bytes() == (tmp_path / f"a{suffix}").read_bytes()


def test_exact_seconds(engine: Engine, tmp_path: Path):
    report = engine.render(T2VA, tmp_path / "a.mp4", OutputOptions(exact_seconds=True))
    assert report["written"]["seconds"] == {"picture": 22 / 24, "sound": 0.9}
    report = engine.render(replace(T2VA, duration=1.0), tmp_path / "b.mp4", OutputOptions(exact_seconds=True))
    assert report["written"]["seconds"] == {"picture": 1.0, "sound": 1.0} and report["plan"]["frames"] == 39
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 24


def test_private_leaves_prompt_and_paths_out(engine: Engine, tmp_path: Path, tiny_all: Path):
    returned = engine.render(T2VA, tmp_path / "a.mp4", OutputOptions(private=True))
    text = (tmp_path / "a.json").read_text()
    assert "secret" not in text and str(tmp_path) not in text and str(tiny_all) not in text
    assert json.loads(text)["plan"]["frames"] == 22 and returned["path"] == str(tmp_path / "a.mp4")
    (tmp_path / "open").mkdir()
    engine.render(T2VA, tmp_path / "open" / "a.mp4")
    assert "secret" in (tmp_path / "open" / "a.json").read_text()
    (tmp_path / "kept").mkdir()
    interrupt(engine, tmp_path / "kept", private=True)
    assert b"secret" not in (tmp_path / "kept" / LATENTS).read_bytes()
    engine.decode(tmp_path / "kept" / LATENTS, tmp_path / "kept" / "a.mp4", OutputOptions(private=True))
    assert "secret" not in (tmp_path / "kept" / "a.json").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 192 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_seen_before_sampling(engine: Engine, small_disk: Path):
    events: list[Event] = []
    with pytest.raises(RequestError, match="are needed"):
        engine.render(T2VA, small_disk / "a.mp4", watch=events.append)
    assert {event.stage for event in events} == {"read"} and names(small_disk) == []


@pytest.mark.parametrize("room", [120_000, 0])
def test_a_disk_that_fills_up_while_writing(
    engine: Engine, small_disk: Path, tmp_path: Path, whole: bytes, room: int, monkeypatch: pytest.MonkeyPatch
):
    """With `room` the latents still fit beside the file; without, they go to the folder for temporary files."""
    monkeypatch.setattr("twinreel.engine.check_space", lambda *args: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (small_disk / "ballast").write_bytes(bytes(192 * 1024 - 4096 - room))
    with pytest.raises(OSError) as caught:
        engine.render(T2VA, small_disk / "a.npz")
    assert caught.value.errno == errno.ENOSPC
    kept = (small_disk if room else tmp_path) / LATENTS
    assert str(kept) in caught.value.__notes__[0] and "twinreel decode" in caught.value.__notes__[0]
    assert names(small_disk) == ([LATENTS] if room else []) + ["ballast"]
    with pytest.raises(OSError):
        engine.decode(kept, small_disk / "a.mp4", OutputOptions(crf=0))  # PyAV's turn: no room for it either
    assert "a.mp4" not in names(small_disk)
    engine.decode(kept, tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == whole and not kept.exists()


def test_without_any_place_for_latents_the_run_goes_on(
    engine: Engine, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finishing, "save_latents", full)
    report = engine.render(T2VA, tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == whole and "not kept" in report["warnings"][0]
    monkeypatch.setattr(writing, "FULL_SHARE", -1.0)  # any sound is a fault
    assert "latents" not in engine.render(T2VA, tmp_path / "b.wav")


def test_a_bad_picture_is_a_fault_and_keeps_the_latents(engine: Engine, tmp_path: Path, monkeypatch):
    decoder = engine.parts["video_decoder"]
    good = decoder.clips
    monkeypatch.setattr(decoder, "clips", lambda *a, **k: (x * float("nan") for x in good(*a, **k)), raising=False)
    report = engine.render(T2VA, tmp_path / "a.mp4")
    assert names(tmp_path) == ["a.json", LATENTS, "a.mp4"]
    assert "of its values are not finite and come out black" in report["faults"][0] and len(report["faults"]) == 1
    assert engine.render(T2VA, tmp_path / "b.wav")["faults"] == []


def test_a_bad_waveform_is_a_fault_and_keeps_the_latents(engine: Engine, tmp_path: Path, monkeypatch, capsys):
    decoder = engine.parts["audio_decoder"]
    good = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda latents: good(latents) * float("nan"), raising=False)
    report = engine.render(T2VA, tmp_path / "a.mp4")
    assert names(tmp_path) == ["a.json", LATENTS, "a.mp4"]
    assert "not finite" in report["faults"][0] and report["latents"] == str(tmp_path / LATENTS)
    assert json.loads((tmp_path / "a.json").read_text())["faults"] == report["faults"]
    from twinreel.flags import ReportFlags

    assert cli.tell(report, ReportFlags()) == 5
    assert "not finite" in capsys.readouterr().err
    assert engine.render(T2VA, tmp_path / "b.mp4", OutputOptions(audio=False))["faults"] == []


def test_memory_that_ends_in_decode_is_tried_again_and_reported(
    engine: Engine, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
):
    engine.generate(T2VA)
    vit = engine.parts["video_decoder"].decoder
    runs: list[int] = []

    def fail(error: BaseException, *calls: int) -> object:
        def hook(module: object, inputs: object) -> None:
            runs.append(1)
            if len(runs) in calls:
                raise error

        return vit.register_forward_pre_hook(hook)

    for number, (calls, ways) in enumerate(
        {(1,): ["alone in memory"], (1, 2): ["alone in memory", "tile by tile"]}.items()
    ):
        runs.clear()
        hook = fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), *calls)
        report = engine.render(T2VA, tmp_path / f"{number}.mp4")
        hook.remove()  # type: ignore[attr-defined]
        assert [retry["then"] for retry in report["decode"]["retries"]] == ways and report["decode"]["way"] == ways[-1]
        assert (tmp_path / f"{number}.mp4").read_bytes() == whole
        assert set(engine.parts.loaded) == {"video_decoder", "audio_decoder"}  # the others made room
    runs.clear()
    hook = fail(MemoryError(), 1, 2, 3)
    with pytest.raises(MemoryError) as caught:
        engine.render(T2VA, tmp_path / "a.mp4")
    hook.remove()  # type: ignore[attr-defined]
    assert "finish with" in caught.value.__notes__[0]
    assert engine.render(T2VA, tmp_path / "b.mp4")["decode"]["retries"] == []


def test_a_retry_goes_on_where_it_stopped(engine: Engine, tmp_path: Path):
    """Out of memory in the middle: earlier clips are in the file already, later ones follow without a seam."""
    request = replace(T2VA, duration=2.0)
    calm = engine.generate(request).report["sha256"]
    vit = engine.parts["video_decoder"].decoder
    for last in (2, 3):
        runs: list[int] = []

        def hook(module: object, inputs: object, runs: list[int] = runs, last: int = last) -> None:
            runs.append(1)
            if len(runs) == last:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        handle = vit.register_forward_pre_hook(hook)
        report = engine.render(request, tmp_path / f"{last}.npz")
        handle.remove()
        assert report["decode"]["retries"][0]["at"] == f"clip {last - 1}"
        assert report["sha256"]["frames"] == calm["frames"]


class Signalling(progressing.Quiet):
    """A watch that sends this process a signal at a stage."""

    stage, number = "", signal.SIGINT

    def __call__(self, event: Event) -> None:
        if event.stage == self.stage and event.done:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("stage", "number", "code"),
    [("denoise", signal.SIGTERM, 143), ("decode", signal.SIGTERM, 143), ("decode", signal.SIGINT, 130)],
)
def test_signals_end_in_order(
    tiny_all: Path, tmp_path: Path, stage: str, number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys
):
    watch = Signalling()
    watch.stage, watch.number = stage, number
    monkeypatch.setattr(progressing, "progress", lambda quiet: watch)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    words = ["--model", str(tiny_all), "--device", "cpu", "--json"]
    made = ["generate", "A cat.", "--duration", "0.9", "--steps", "4", "-o", str(tmp_path / "a.mp4"), *words]
    assert cli.main(made) == code
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    out, err = capsys.readouterr()
    assert json.loads(out)["exit"] == code and "stopping at the next step" in err
    if stage == "denoise":
        assert names(tmp_path) == []
        return
    assert names(tmp_path) == [LATENTS]
    assert f"twinreel decode {tmp_path / LATENTS} -o {tmp_path / 'a.mp4'} --model {tiny_all}" in err
    watch.stage = "never"
    assert cli.main(["decode", str(tmp_path / LATENTS), *words]) == 0
    assert names(tmp_path) == ["a.json", "a.mp4"]
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "a.mp4")


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize(
    ("name", "seconds", "exact"), [("a.mp4", 0.9, False), ("a.mp4", 1.0, True), ("a.wav", 0.9, False)]
)
def test_cancel_while_the_rest_is_written_keeps_the_latents(
    engine: Engine, tmp_path: Path, name: str, seconds: float, exact: bool, done: int
):
    def watch(event: Event) -> None:
        if (event.stage, event.done) == ("mux", done):
            engine.cancel()

    with pytest.raises(Cancelled):
        engine.render(replace(T2VA, duration=seconds), tmp_path / name, OutputOptions(exact_seconds=exact), watch=watch)
    assert names(tmp_path) == [LATENTS]


def test_a_failure_behind_the_cut_leaves_no_file(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """39 frames are made and 24 kept, so that the writer has all it wants before the last clip is made."""
    real, written = finishing.write_media, threading.Event()

    def write(*args: Any, ready: Any, **more: Any) -> Any:
        return real(*args, ready=lambda: (written.set(), ready()), **more)

    def watch(event: Event) -> None:
        if (event.stage, event.done) == ("decode", 39):
            assert written.wait(20)
            raise ZeroDivisionError

    monkeypatch.setattr(finishing, "write_media", write)
    with pytest.raises(ZeroDivisionError):
        engine.render(replace(T2VA, duration=1.0), tmp_path / "a.mp4", OutputOptions(exact_seconds=True), watch=watch)
    assert names(tmp_path) == [LATENTS]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from twinreel import Engine, EngineConfig, Request
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", threads=1))
engine.generate(Request("A cat.", steps=2, duration=0.9))  # one thread, so that the children may go on from here
rng = random.Random(7)
events = ("read", "denoise", "decode", "decode", "decode", "mux", "mux", "mux")
for trial, stage in enumerate(events):
    folder = Path(sys.argv[2]) / str(trial)
    folder.mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        watch = lambda event: os.write(writing, event.stage[0].encode())
        engine.render(Request("A cat.", steps=2, duration=0.9), folder / "a.mp4", watch=watch)
        os._exit(0)
    os.close(writing)
    while (seen := os.read(reading, 1)) not in (stage[0].encode() if stage != "decode" else b"d", b""):
        pass
    while stage == "decode" and seen and seen != b"m" and rng.random() < 0.8:
        seen = os.read(reading, 1)
    time.sleep(rng.random() * (0.03 if stage == "mux" else 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
"""


def test_kill_at_any_point_leaves_a_whole_file_or_latents_or_nothing(tiny_all: Path, tmp_path: Path):
    engine = Engine(EngineConfig(model=str(tiny_all), device="cpu", threads=1))
    words = [sys.executable, "-c", KILLED, str(tiny_all), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    engine.render(Request("A cat.", steps=2, duration=0.9), tmp_path / "calm.mp4")
    calm, states = (tmp_path / "calm.mp4").read_bytes(), set()
    for folder in sorted(entry for entry in tmp_path.iterdir() if entry.is_dir()):
        found = {name for name in names(folder) if not name.endswith(".part")}  # nobody was left to remove that
        states.add(frozenset(found))
        if "a.mp4" in found:
            assert (folder / "a.mp4").read_bytes() == calm
        if LATENTS in found:
            engine.decode(folder / LATENTS, folder / "again.mp4")
            assert (folder / "again.mp4").read_bytes() == calm
    assert states <= {frozenset(), frozenset({LATENTS}), frozenset({LATENTS, "a.mp4"}),
                      frozenset({LATENTS, "a.mp4", "a.json"}), frozenset({"a.mp4", "a.json"})}  # fmt: skip
    assert frozenset() in states and any(LATENTS in state for state in states)
    torch.set_num_threads(2)  # the engine above has set one
