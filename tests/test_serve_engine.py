"""The whole server with the real engine on the tiny checkpoint: both partitions, cache, crash, cancel, shutdown."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from serve_stub import Running, call, ended, until
from twinreel import Client, Engine, EngineConfig, Keyframe, Picture, Reference, Request
from twinreel.serve.client import ServerError
from twinreel.serve.options import ServeOptions
from twinreel.serve.runner import EngineRunner
from twinreel.serve.service import Service

PICTURE = Picture(np.random.default_rng(2).integers(0, 256, (64, 96, 3), dtype=np.uint8))
SHORT = {"duration": 0.9, "steps": 3}
REF = Request("<Picture 1> rings.", references=(Reference("image", PICTURE),), **SHORT)


@pytest.fixture(scope="module")
def config(tiny_original: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_original), device="cpu", threads=2)


@pytest.fixture(scope="module")
def site(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("engine") / "data"
    options = ServeOptions(data=folder, spare_gib=0.001, drain_seconds=10, warm=("t2va@64x64x0.9",))
    with Running(Service(options, config)) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200, 90)
        yield made


def test_both_partitions_give_the_bits_of_an_engine_at_home(
    site: Running, config: EngineConfig, tmp_path: Path
) -> None:
    client, requests = Client(site.url), (REF, Request("The sea.", keyframes=(Keyframe(PICTURE),), **SHORT))
    with closing(Engine(config)) as engine:
        made = [engine.generate(request).report["sha256"] for request in requests]
    for request, expected in zip(requests, made, strict=True):
        job = client.generate(request, tmp_path / f"{request.resolved_task}.mp4")
        assert {name: job["sha256"][name] for name in expected} == expected
        assert set(job["files"]) == {"video", "audio", "frames", "latents", "report"}


def test_the_cache_is_used_and_changes_nothing(site: Running) -> None:
    client, urls = Client(site.url), []
    jobs = [
        client.wait(client.submit(request)["id"]) for request in (REF, REF, Request(REF.prompt + "!", **vars_of(REF)))
    ]
    for job in jobs:
        urls.append(call(f"{site.url}/v1/videos/{job['id']}/content?variant=report")[1]["conditioning"])
    assert urls[1] == {"hits": 2, "misses": 0} and urls[2] == {"hits": 1, "misses": 1}
    assert jobs[0]["sha256"] == jobs[1]["sha256"] != jobs[2]["sha256"]
    assert 'twinreel_cache_lookups_total{result="hits"}' in call(f"{site.url}/metrics")[1].decode()


def vars_of(request: Request) -> dict[str, object]:
    return {name: value for name, value in vars(request).items() if name != "prompt"}


def test_variants_of_the_content(site: Running) -> None:
    client = Client(site.url)
    job = client.wait(client.submit(Request("Rain.", **SHORT))["id"])
    url = f"{site.url}/v1/videos/{job['id']}/content?variant="
    assert call(url + "audio")[1][:4] == b"RIFF" and call(url + "frames")[1][:2] == b"PK"
    report = call(url + "report")[1]
    assert report["plan"]["task"] == "t2va" and str(site.service.folder) not in str(report)
    assert b"twinreel latents" in call(url + "latents")[1]


def test_a_policy_that_skips_nothing_is_warned_of(site: Running) -> None:
    client = Client(site.url)
    job = client.wait(client.submit(Request("Rain.", policy="reuse", **SHORT))["id"])
    assert any("reuse has no meaning for 2 calls" in warning for warning in job["warnings"])


def test_a_killed_engine_resumes_at_decode(site: Running) -> None:
    runner = site.service.dispatcher.runner
    assert isinstance(runner, EngineRunner)
    client = Client(site.url)
    expected = client.wait(client.submit(Request("Hail.", duration=2, steps=2))["id"])["sha256"]
    job, pid = client.submit(Request("Hail.", duration=2, steps=2)), runner.pid
    for _, state in client.events(job["id"]):
        if state["running"] and state["running"]["stage"] == "decode" and pid is not None:
            os.kill(pid, signal.SIGKILL)
            pid = None
    assert pid is None, "the decode was over too soon: the test shows nothing"
    state = ended(site.url, job["id"], 60)
    assert (state["status"], state["retried"], state["sha256"]) == ("completed", 1, expected), state["error"]
    outcome = site.service.jobs.get(job["id"]).outcome  # type: ignore[union-attr]
    assert outcome["resumed"] and "twinreel_engine_restarts_total 1.0" in call(f"{site.url}/metrics")[1].decode()


def test_an_engine_that_ends_between_jobs_is_replaced(site: Running) -> None:
    runner = site.service.dispatcher.runner
    assert isinstance(runner, EngineRunner) and runner.pid is not None
    before = runner.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: call(f"{site.url}/ready")[0] == 503)
    until(lambda: call(f"{site.url}/ready")[0] == 200, 90)
    assert runner.pid not in (None, before)


def test_cancel_ends_within_a_step(site: Running) -> None:
    client = Client(site.url)
    job = client.submit(Request("Long.", duration=4, steps=400))
    until(lambda: (client.get(job["id"])["running"] or {}).get("stage") == "denoise", 30)
    begun = time.monotonic()
    client.cancel(job["id"])
    with pytest.raises(ServerError, match="cancelled"):
        client.wait(job["id"])
    assert time.monotonic() - begun < 5
    assert client.wait(client.submit(Request("Next.", **SHORT))["id"])["status"] == "completed"
