"""Ranks of one engine: whatever goes wrong on one of them ends its request with the cause, and the next one works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from PIL import Image

import faulty_rank
from test_engine import T2VA
from test_launcher import free_port
from twinreel import Cancelled, ConfigError, Engine, EngineConfig, Keyframe, Reference, Request, RequestError, ranks
from twinreel.conditioning import ConditionCache
from twinreel.output.placing import hold
from twinreel.watch import Event, ignore

MOST = 30.0  # seconds until a request of which something is lost has ended, twinreel's promise


@pytest.fixture(scope="module")
def model(tiny_original: Path) -> str:
    return str(tiny_original)


@contextmanager
def with_faults(config: EngineConfig) -> Iterator[Engine]:
    """Ranks in which things go wrong on demand."""
    before, ranks.ENTRY = ranks.ENTRY, "faulty_rank"
    try:
        made = Engine(config)
    finally:
        ranks.ENTRY = before
    with closing(made):
        yield made


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with with_faults(EngineConfig(model=model, device="cpu", threads=1, gpus=2, conditioner="whole")) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(model: str) -> dict[str, str]:
    """What one process makes of the good request."""
    threads = torch.get_num_threads()
    try:
        return Engine(EngineConfig(model=model, device="cpu", threads=1)).generate(T2VA).report["sha256"]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def good_one_after(engine: Engine, wanted: dict[str, str]) -> Iterator[None]:
    """After each test the engine makes a good request, with the bits of one process."""
    yield
    assert engine.generate(T2VA).report["sha256"] == wanted
    assert not torch.distributed.is_initialized()


def pids(engine: Engine) -> list[int]:
    assert engine._ranks is not None
    return engine._ranks.pids


def at_step(step: int, act: Callable[[], object]) -> Callable[[Event], None]:
    def watch(event: Event) -> None:
        if event.stage == "denoise" and event.done == step:
            act()

    return watch


def test_the_report_says_who_did_what(engine: Engine) -> None:
    report = engine.generate(T2VA).report
    topology = report["engine"]["topology"]
    assert (topology["ranks"], topology["sp"], topology["tp"], topology["attend"]) == (2, 2, 1, "plain")
    assert len(report["ranks"]) == 2
    for mine in report["ranks"]:
        assert {"encode", "denoise"} <= set(mine["stages"])
        steps = mine["communication"]["denoise"]
        assert len(steps) == report["plan"]["calls"]
        for step in steps:
            costs = step["collectives"]
            assert step["seconds"] > step["exposed_seconds"] > 0 and step["waiting_seconds"] > 0
            # two blocks, there and back; and the vote
            assert costs["sp.all_to_all"]["calls"] == 4 and costs["sp.all_to_all"]["bytes"] > 0
            assert costs["every.vote"]["calls"] >= 1 and costs["sp.all_to_all"]["exposed_seconds"] > 0
    json.dumps(report, allow_nan=False)


def test_events_and_boundaries_come_from_rank_0(engine: Engine) -> None:
    events: list[Event] = []
    values: dict[str, list[int]] = {}
    rows: dict[str, list[int]] = {}

    def boundary(name: str, tensors: dict[str, torch.Tensor], part: int = 0, parts: int = 1) -> None:
        values.setdefault(name, []).append(part)
        rows[name] = [len(tensor) for tensor in tensors.values()]

    engine.generate(T2VA, events.append, boundary)
    assert {"read", "encode", "denoise", "decode"} <= {event.stage for event in events}
    assert rows["velocity"] == rows["noise"]  # of all ranks
    assert values["velocity"] == [0, 1] and {"noise", "latents", "frames"} <= set(values)


def test_corrupt_media_is_everyones_request_error(engine: Engine, tmp_path: Path) -> None:
    before = pids(engine)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG no more")
    with pytest.raises(RequestError) as caught:
        engine.generate(replace(T2VA, references=(Reference("image", broken),)))
    assert caught.value.field.startswith("references[0]")
    assert pids(engine) == before  # refused together, nobody was lost


def test_an_error_of_one_rank_before_the_loop_is_everyones(engine: Engine) -> None:
    before = pids(engine)
    with pytest.raises(PermissionError, match="rank 1 cannot read its profile"):
        engine.generate(replace(T2VA, steps=4))
    assert pids(engine) == before


def test_a_gpu_that_fails_for_good_costs_its_process(engine: Engine) -> None:
    before = pids(engine)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.generate(replace(T2VA, steps=6))
    assert not set(before) & set(pids(engine))  # though all ranks have agreed on the error


@pytest.mark.parametrize("where", ["watch", "boundary", "thread"])
def test_an_engine_closed_in_mid_run_ends_it_and_starts_nothing(model: str, where: str) -> None:
    config = EngineConfig(model=model, device="cpu", threads=1, gpus=2)
    other = Engine(config, ConditionCache(1 << 20))  # as a server's
    children, closer = pids(other), Thread(target=other.close)

    def act() -> None:
        closer.start() if where == "thread" else other.close()

    def boundary(name: str, tensors: dict[str, torch.Tensor], part: int = 0, parts: int = 1) -> None:
        if where == "boundary" and name == "velocity":
            act()

    watch = ignore if where == "boundary" else at_step(1, act)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the engine was closed in the middle of this run"):
        other.generate(replace(T2VA, steps=400), watch, boundary if where == "boundary" else None)
    if where == "thread":
        closer.join()
    assert time.monotonic() - start < MOST and not pids(other) and not any(alive(pid) for pid in children)


def test_who_follows_the_values_may_be_slow(engine: Engine) -> None:
    def boundary(name: str, tensors: dict[str, torch.Tensor], part: int = 0, parts: int = 1) -> None:
        if name == "velocity" and not part:
            assert sum(x.nbytes for x in tensors.values()) > 1 << 17  # more than a pipe holds
            time.sleep(faulty_rank.PATIENCE + 2)

    before = pids(engine)
    assert engine.generate(replace(T2VA, duration=6.0), ignore, boundary) and pids(engine) == before


@pytest.mark.parametrize("at", ["noise", "velocity", "frames"])
def test_an_error_of_who_follows_the_values_ends_the_run(engine: Engine, at: str) -> None:
    def boundary(name: str, tensors: dict[str, torch.Tensor], part: int = 0, parts: int = 1) -> None:
        if name == at:
            raise KeyError("theirs")

    before = pids(engine)
    with pytest.raises(KeyError, match="theirs"):
        engine.generate(replace(T2VA, duration=4.0), ignore, boundary)
    assert pids(engine) == before


def test_twenty_bad_requests_around_a_good_one(engine: Engine, wanted: dict[str, str]) -> None:
    before = pids(engine)
    bad = [replace(T2VA, duration=0.1), Request(""), replace(T2VA, keyframes=(Keyframe("/no/such.png"),))]
    for round_ in range(2):
        for number in range(10):
            with pytest.raises(RequestError):
                engine.generate(bad[number % len(bad)])
        if not round_:
            assert engine.generate(T2VA).report["sha256"] == wanted
    assert pids(engine) == before


def test_what_a_request_cost_is_not_in_the_next_ones_report(engine: Engine) -> None:
    """Neither the collectives of one that was ended nor the time since."""
    with pytest.raises(Cancelled):
        engine.generate(replace(T2VA, steps=400), at_step(2, engine.cancel))
    time.sleep(2.0)
    for mine in engine.generate(T2VA).report["ranks"]:
        costs = mine["communication"]["encode"]
        assert (
            "sp.all_to_all" not in costs["collectives"] and costs["seconds"] < mine["stages"]["encode"]["seconds"] + 1
        )


def test_cancel_in_mid_run(engine: Engine) -> None:
    before = pids(engine)
    with pytest.raises(Cancelled):
        engine.generate(T2VA, at_step(1, engine.cancel))
    assert pids(engine) == before


def test_an_error_of_the_watch_ends_the_run(engine: Engine) -> None:
    before = pids(engine)
    with pytest.raises(KeyError, match="mine"):
        engine.generate(replace(T2VA, steps=40), at_step(1, lambda: {}["mine"]))
    assert pids(engine) == before


def test_an_exception_on_rank_1_in_the_middle_of_a_step(engine: Engine) -> None:
    before, start = pids(engine), time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1 divided by nothing") as caught:
        engine.generate(replace(T2VA, prompt="explode"))
    assert time.monotonic() - start < MOST
    assert "on rank 1 of 2" in caught.value.__notes__ and not set(before) & set(pids(engine))


def test_a_rank_that_is_late_for_a_vote(engine: Engine) -> None:
    before, start = pids(engine), time.monotonic()
    with pytest.raises(RuntimeError, match=r"Timed out|signal SIGABRT \(often because an exchange"):
        engine.generate(replace(T2VA, prompt="dawdle"))
    assert time.monotonic() - start < MOST and not set(before) & set(pids(engine))


def test_a_killed_rank(engine: Engine) -> None:
    victim, start = pids(engine)[1], time.monotonic()
    with pytest.raises(ranks.RankLost, match="rank 1 ended by signal SIGKILL"):
        engine.generate(replace(T2VA, steps=40), at_step(2, lambda: os.kill(victim, signal.SIGKILL)))
    assert time.monotonic() - start < MOST and victim not in pids(engine)


def test_a_stuck_rank(engine: Engine) -> None:
    victim, start = pids(engine)[1], time.monotonic()
    with pytest.raises(ranks.RankLost, match=r"^rank 1 gave no sign of life for \d+ s\nrank 0 then: ") as caught:
        engine.generate(replace(T2VA, steps=40), at_step(2, lambda: os.kill(victim, signal.SIGSTOP)))
    assert time.monotonic() - start < MOST and len(caught.value.__notes__) == 1


def test_a_rank_stuck_while_weights_are_loaded(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 5.0)
    picture, victim = tmp_path / "picture.png", pids(engine)[1]
    Image.new("RGB", (64, 64), (200, 30, 30)).save(picture)

    def watch(event: Event) -> None:
        if event.stage == "load" and "ref2va" in event.note and not event.done:
            os.kill(victim, signal.SIGSTOP)

    start = time.monotonic()
    with pytest.raises(ranks.RankLost, match="rank 1 gave no sign of life for 5 s"):
        engine.generate(replace(T2VA, references=(Reference("image", picture),)), watch)
    assert time.monotonic() - start < MOST


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_between_requests_costs_none(engine: Engine, wanted: dict[str, str], rank: int) -> None:
    victim = pids(engine)[rank]
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.5)  # it is seen once it has gone
    assert engine.generate(T2VA, ignore).report["sha256"] == wanted and victim not in pids(engine)


def test_ranks_that_did_not_come_back_are_started_once_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(pids(engine)[1], signal.SIGKILL)
    time.sleep(0.5)  # it is seen once it has gone
    monkeypatch.setattr(ranks, "MEETING", 0.2)
    with pytest.raises(ranks.RankLost, match="rank 0 was not ready after 0 s"):
        engine.generate(T2VA)
    assert not pids(engine)  # and yet the good request after this is made


def test_a_working_folder_that_is_gone_costs_no_rank(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, gone = pids(engine), tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    start = time.monotonic()
    with pytest.raises(ConfigError, match="working folder"):
        engine.generate(T2VA)
    assert time.monotonic() - start < ranks.ENDING and pids(engine) == before
    monkeypatch.chdir(tmp_path)  # of which the good request after this knows


@pytest.mark.parametrize("end", ["keyboard", "cancel", "rank 0", "rank 1"])
def test_latents_that_are_kept_are_named_with_what_finishes_them(engine: Engine, tmp_path: Path, end: str) -> None:
    target, latents = tmp_path / "a.npz", tmp_path / "a.latents.safetensors"

    def watch(event: Event) -> None:
        if event.stage != "decode" or not event.done:
            return
        if end == "keyboard":
            raise KeyboardInterrupt
        engine.cancel() if end == "cancel" else os.kill(pids(engine)[int(end[-1])], signal.SIGKILL)

    with pytest.raises((KeyboardInterrupt, Cancelled, ranks.RankLost)) as caught:
        engine.render(replace(T2VA, duration=4.0), target, watch=watch)
    (told,) = (note for note in caught.value.__notes__ if "latents" in note)
    assert f"kept in {latents}; finish with: twinreel decode {latents} -o {target}" in told
    assert latents.exists() and not target.exists()
    before = pids(engine)
    with closing(hold(latents)), pytest.raises(RequestError, match="another run is finishing"):
        engine.decode(latents, target)
    assert engine.decode(latents, target)["path"] == str(target) and not latents.exists() and pids(engine) == before


def test_the_file_is_written_by_rank_0(engine: Engine, tmp_path: Path) -> None:
    report = engine.render(T2VA, tmp_path / "a.npz")
    assert report["path"] == str(tmp_path / "a.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.npz"]
    with pytest.raises(RequestError, match="exists"):
        engine.render(T2VA, tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 3}, "gpus: got 3; it must divide the 2 heads"),
        ({"gpus": 2, "sp": 2, "tp": 2}, "2 times 2 is not the number of ranks, 2"),
        ({"gpus": 0}, "gpus: got 0"),
        ({"tp": 2}, "tp: got 2, which does not divide one rank"),
        ({"gpus": 2, "device": "cuda:1"}, "for 2 ranks"),
        ({"attend": "packed"}, "this mesh has sp 1"),
        ({"gpus": 2, "attend": "ring"}, "attend: got 'ring'"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_before_a_process_starts(
    model: str, options: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.Ranks, "_start", lambda self: pytest.fail("started"))
    with pytest.raises(ConfigError, match=words):
        Engine(EngineConfig(**({"model": model, "device": "cpu"} | options)))  # type: ignore[arg-type]


PARENT = """
import sys, time
from twinreel import Engine, EngineConfig
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", threads=1, gpus=2))
print(*engine._ranks.pids, flush=True)
time.sleep(600)
"""


def test_ranks_end_with_the_process_that_started_them(model: str) -> None:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    command, own = [sys.executable, "-c", PARENT, model], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2 and all(Path(f"/proc/{pid}").exists() for pid in children)
        parent.kill()
    end = time.monotonic() + MOST
    while time.monotonic() < end and any(alive(pid) for pid in children):
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_torchrun_and_a_second_engine_beside_the_first(model: str, engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    words = ["generate", T2VA.prompt, "--model", model, "--steps", "3", "--duration", "0.9", "--device", "cpu"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command += ["-m", "twinreel", *words, "--conditioner", "whole", "--threads", "1", "-o", str(out), "--json"]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["ok"] and out.is_file()
    assert json.loads(lines[0])["sha256"]["frames"] == engine.generate(T2VA).report["sha256"]["frames"]
