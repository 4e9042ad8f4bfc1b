"""A server under bad weather: many clients at once, kill -9, slow and vanished clients, full and read-only disks."""

from __future__ import annotations

import gc
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_stub import Running, StubRunner, call, content, ended, form, running, until
from twinreel import ConfigError
from twinreel.serve import app as app_module
from twinreel.serve import dispatch as dispatch_module
from twinreel.serve import server as server_module
from twinreel.serve import service as service_module
from twinreel.serve.intake import NUMBERS, TEXTS
from twinreel.stopping import Stopped

SHORT = {"target": {"duration_seconds": 1}}
KILLS = 30


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # thousands of synced commits: in memory where there is such a folder
    root = Path("/dev/shm")
    given = {"dir": root} if root.is_dir() and os.access(root, os.W_OK) else {}
    limits = {"max_queued": 16, "idle_seconds": 0.5, "keep_gib": 0.001}
    with (
        tempfile.TemporaryDirectory(**given) as folder,
        running(Path(folder) / "data", tiny_original, StubRunner(), **limits) as made,
    ):
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


def test_200_parallel_clients(site: Running) -> None:
    """Valid, invalid, cancelled and oversized requests at once: every answer is right, every accepted job ends once."""
    object.__setattr__(site.service.limits, "bytes", 50_000)
    runner: StubRunner = site.service.dispatcher.runner  # type: ignore[assignment]
    runner.seconds = 0.01
    answers: list[tuple[str, int, str | None]] = []
    lock, start = threading.Lock(), threading.Event()

    def client(number: int) -> None:
        kind = ("valid", "invalid", "cancelled", "oversized")[number % 4]
        prompt = f"client {number}"
        start.wait()
        if kind == "oversized":
            body, headers = form([("prompt", prompt), ("first_frame", b"\x89PNG\r\n\x1a\n" + os.urandom(60_000))])
            status, answer, _ = call(f"{site.url}/v1/videos", body, "POST", headers)
        else:
            asked = {"prompt": prompt, "seed": -1 if kind == "invalid" else number, **SHORT}
            status, answer, _ = call(f"{site.url}/v1/videos", asked)
            if kind == "cancelled" and status == 201:
                call(f"{site.url}/v1/videos/{answer['id']}/cancel", method="POST")
        with lock:
            answers.append((kind, status, answer.get("id")))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join(60)
    object.__setattr__(site.service.limits, "bytes", 512 << 20)
    seen = Counter((kind, status) for kind, status, _ in answers)
    assert len(answers) == 200 and {status for _, status in seen} <= {201, 413, 422, 429}, seen
    assert seen["invalid", 201] == seen["oversized", 201] == 0, seen
    assert seen["invalid", 422] + seen["invalid", 429] == 50
    assert seen["oversized", 413] + seen["oversized", 429] == 50
    assert seen["valid", 201] + seen["cancelled", 201] >= 16  # what the queue takes, whatever the runner does
    for kind, status, job in answers:
        if status == 201:
            state = ended(site.url, str(job))
            assert state["status"] == "completed" or kind == "cancelled" and state["status"] == "cancelled"
            assert runner.ran.count(str(job)) <= 1
    runner.seconds = 0.0
    assert not list((site.service.folder / "incoming").iterdir())
    assert {path.name for path in (site.service.folder / "jobs").iterdir()} <= site.service.jobs.ids()


class Nursery:
    """Starts stub servers on one folder that can be killed, each in some 50 ms."""

    def __init__(self, folder: Path, model: Path) -> None:
        script = Path(__file__).with_name("serve_stub.py")
        words = [sys.executable, str(script), str(folder), "--model", str(model), "--seconds", "0.03"]
        given: Any = {"env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **given)
        self.pid = 0

    def start(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        pid, port = self.process.stdout.readline().split()
        self.pid = int(pid)
        return f"http://127.0.0.1:{port}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        until(lambda: not Path(f"/proc/{self.pid}").exists())

    def close(self) -> None:
        self.process.communicate(timeout=10)


def test_kill_9_at_random_moments(tiny_original: Path, tmp_path: Path) -> None:
    """30 times: nothing that a client was told of is lost, nothing is delivered twice, and keys still hold."""
    rng, folder = random.Random(8), tmp_path / "data"
    nursery, told, tries = Nursery(folder, tiny_original), {}, itertools.count()
    for _ in range(KILLS):
        url, alive = nursery.start(), threading.Event()

        def post_until_killed(url: str = url, alive: threading.Event = alive) -> None:
            while not alive.wait(0.01):
                seed = next(tries)
                body = {"prompt": f"job {seed}", "seed": seed, **SHORT}
                try:
                    status, answer, _ = call(f"{url}/v1/videos", body, headers={"Idempotency-Key": f"key {seed}"})
                except (OSError, http.client.HTTPException):
                    continue
                assert status == 201, answer
                told[answer["id"]] = seed

        thread = threading.Thread(target=post_until_killed)
        thread.start()
        time.sleep(rng.uniform(0.05, 0.5))
        nursery.kill()
        alive.set()
        thread.join()
    url = nursery.start()
    assert len(told) > 2 * KILLS
    for job, seed in told.items():
        body = {"prompt": f"job {seed}", "seed": seed, **SHORT}
        assert ended(url, job, 60)["status"] == "completed"
        assert call(f"{url}/v1/videos/{job}/content")[1] == content(body["prompt"], seed)
        status, again, _ = call(f"{url}/v1/videos", body, headers={"Idempotency-Key": f"key {seed}"})
        assert (status, again["id"]) == (200, job)
    nursery.kill(signal.SIGTERM)
    nursery.close()
    lines = folder.with_suffix(".log").read_text().splitlines()
    began = Counter(line for line in lines if line.startswith("begin"))
    assert max(began.values()) > 1, "no kill hit a running job: the test shows nothing"
    for job in told:  # once its outcome was there it was never begun again
        last = len(lines) - 1 - lines[::-1].index(f"end {job}")
        assert f"begin {job}" not in lines[last:] and lines.count(f"end {job}") == 1, job


@pytest.mark.parametrize("prompt", ["slow", "slow deaf"])
def test_a_clean_shutdown_puts_the_running_job_back(tiny_original: Path, tmp_path: Path, prompt: str) -> None:
    with running(tmp_path / "data", tiny_original, StubRunner()) as site:
        _, made, _ = call(f"{site.url}/v1/videos", {"prompt": prompt, **SHORT})
        until(lambda: call(f"{site.url}/v1/videos/{made['id']}")[1]["status"] == "in_progress")
        stream = socket.create_connection(("127.0.0.1", site.port))
        stream.sendall(f"GET /v1/videos/{made['id']}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        begun = time.monotonic()
    assert time.monotonic() - begun < 8  # the open stream was ended, too
    stream.close()
    with running(tmp_path / "data", tiny_original, StubRunner()) as site:
        state = site.service.jobs.get(made["id"])
        assert state is not None and state.status in ("queued", "in_progress") and state.crashes == 0
        assert state.starts == (state.status == "in_progress")


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "ignored by whoever started it"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_an_orderly_end(
    site: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int,
    ignored: bool,
) -> None:  # fmt: skip
    class Stops:
        stopped_by: int | None = None

        def run(self, sockets: list[socket.socket]) -> None:
            sockets[0].close()
            self.stopped_by = number
            if not ignored:
                raise Stopped(number)

    monkeypatch.setattr(server_module, "make_server", lambda service: Stops())
    monkeypatch.setattr(server_module.logging, "basicConfig", lambda **given: None)
    monkeypatch.setattr(server_module, "listen", lambda host, port: socket.create_server(("127.0.0.1", 0)))
    told: list[str] = []
    assert server_module.serve(site.service, told.append) == code
    assert told and "stopped in order" in capsys.readouterr().err


def test_slow_and_vanished_clients(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    silent = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(30)]
    halves = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(10)]
    head = (
        b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    )
    for wire in halves:
        wire.sendall(head)
    gone = socket.create_connection(("127.0.0.1", site.port))
    gone.sendall(head)
    gone.close()
    seconds = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(5)]
    for wire in seconds:  # a whole request, then half of another
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        assert wire.recv(4096).startswith(b"HTTP/1.1 200")
    begun = time.monotonic()
    assert call(f"{site.url}/health")[0] == 200 and time.monotonic() - begun < 2
    for wire in seconds:
        wire.settimeout(5)
        while wire.recv(4096):
            pass
        wire.close()
    for wire in silent:
        wire.settimeout(5)
        assert wire.recv(1) == b""
        wire.close()
    for wire in halves:
        wire.settimeout(5)
        assert wire.recv(4096).startswith(b"HTTP/1.1 408")
        wire.close()
    until(lambda: not list((site.service.folder / "incoming").iterdir()))


def test_a_reader_that_does_not_read(site: Running) -> None:
    """A stalled event stream and a stalled download hold up nobody, and end when their client does."""
    _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "slow reader", **SHORT})
    wires = []
    for path in ("events", "content"):
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        wire.connect(("127.0.0.1", site.port))
        wire.sendall(f"GET /v1/videos/{made['id']}/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wires.append(wire)
    call(f"{site.url}/v1/videos/{made['id']}/cancel", method="POST")
    _, other, _ = call(f"{site.url}/v1/videos", {"prompt": "other", **SHORT})
    assert ended(site.url, other["id"])["status"] == "completed"
    for wire in wires:
        wire.close()
    until(lambda: site.service.hub.readers() == 0)


def test_full_disk(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(site.service.folder)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        status, answer, headers = call(f"{site.url}/v1/videos", {"prompt": "p", **SHORT})
        assert (status, answer["error"]["type"]) == (503, "unavailable") and headers["retry-after"]
        status, told, _ = call(f"{site.url}/ready")
        assert (status, told["ready"]) == (503, False) and told["cause"] == answer["error"]["message"]
    with monkeypatch.context() as patch:  # found out only while writing

        def full(*words: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(service_module.os, "link", full)
        status, answer, _ = call(f"{site.url}/v1/videos", {"prompt": "p", "input_reference": picture(), **SHORT})
        assert status == 503 and "disk" in answer["error"]["message"]
    db = site.service.jobs._db
    db.execute("PRAGMA query_only=1")
    try:
        assert call(f"{site.url}/v1/videos", {"prompt": "p", **SHORT})[0] == 503
        assert call(f"{site.url}/health")[0] == 200
    finally:
        db.execute("PRAGMA query_only=0")
    _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "room again", **SHORT})
    assert ended(site.url, made["id"])["status"] == "completed"
    assert {path.name for path in (site.service.folder / "jobs").iterdir()} <= site.service.jobs.ids()


def picture() -> str:
    from twinreel.serve.shapes import PICTURE

    return PICTURE


def test_folders_that_cannot_be_used(tiny_original: Path, tmp_path: Path) -> None:
    for folder in (Path("/proc/self/nowhere"), tmp_path / "file" / "data"):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="cannot be written"):
            running(folder, tiny_original)
    with running(tmp_path / "data", tiny_original), pytest.raises(ConfigError, match="another server"):
        running(tmp_path / "data", tiny_original)
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    (tmp_path / "data" / "queue.sqlite").write_bytes(b"no queue at all " * 99)
    with pytest.raises(ConfigError, match="queue.sqlite cannot be used"):
        running(tmp_path / "data", tiny_original)
    for host in ("a" * 300, "no such\0name", "999.999.999.999"):
        with pytest.raises(ConfigError, match="cannot listen"):
            server_module.listen(host, 0)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.sampled_from(["9" * 400, "1e999", "../../x", "%00"]),
)  # fmt: skip
PLACES = [("body", name) for name in (*TEXTS, *NUMBERS, "conditions", "target", "first_frame", "unknown")]
PLACES += [("target", name) for name in ("short_edge", "aspect_ratio", "duration_seconds", "width")]
PLACES += [("condition", name) for name in ("type", "uri", "role", "frame_index", "start_time_seconds", "fit")]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_fuzzed_bodies(site: Running, place: tuple[str, str]) -> None:
    """20 values a field: an answer with a reason, or a job; never a 500, never an answer without the shape."""
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(VALUES)
    def send(value: Any) -> None:
        body: dict[str, Any] = {"prompt": "fuzz", "target": {"duration_seconds": 1}}
        if place[0] == "condition":
            item = {"type": "image", "uri": "data:image/png;base64,AAAA", "role": "keyframe", "frame_index": 0}
            body["conditions"] = [item | {place[1]: value}]
        elif place[0] == "target":
            body["target"][place[1]] = value
        else:
            body[place[1]] = value
        text = json.dumps(body).encode("utf-8", "surrogatepass")
        connection.request("POST", "/v1/videos", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
        assert answer.status in (201, 413, 422, 429), (value, answer.status, told)
        if answer.status == 422:
            assert told["error"]["message"] and told["error"]["field"], told

    send()
    connection.close()


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_flat_over_500_jobs(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SHORTEST_GAP", 0.001)
    monkeypatch.setattr(dispatch_module, "SWEEP", 1.0)  # keep_gib holds about 50 of these jobs
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)

    def ask(method: str, path: str, body: Any = None) -> bytes:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        return connection.getresponse().read()

    def ten(number: int) -> None:
        body = json.dumps({"prompt": f"flat {number}", "n": 5, **SHORT})
        jobs = [json.loads(ask("POST", "/v1/videos", body)) for _ in range(2)]
        assert b"event: completed" in ask("GET", f"/v1/videos/{jobs[1]['variants'][-1]}/events")
        data = ask("GET", f"/v1/videos/{jobs[1]['variants'][-1]}/content")
        assert data == content(f"flat {number}", 46)

    for number in range(10):
        ten(number)
    level, files = resident(), len(os.listdir("/proc/self/fd"))
    for number in range(50):
        ten(number)
    assert resident() - level < 12 << 20
    assert len(os.listdir("/proc/self/fd")) <= files + 3 and not site.service.hub._states
    connection.close()
    time.sleep(1.0)
    site.service.dispatcher.wake()
    until(lambda: len(list((site.service.folder / "jobs").iterdir())) < 70)
