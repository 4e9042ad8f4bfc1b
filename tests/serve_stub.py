"""A runner without a model for the tests of the server, and a server around it: in a thread, or as a program.

python tests/serve_stub.py FOLDER --port 0 --seconds 0.02
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinreel.config import EngineConfig
from twinreel.serve.options import ServeOptions
from twinreel.serve.runner import EngineLost, Work, outcome_file
from twinreel.serve.server import listen, make_server
from twinreel.serve.service import Service

STEPS = 5


class StubRunner:
    """Writes bytes that follow from the request.

    The prompt may say slow (deaf), crash, rank, both of them once, gone (for good), fail.
    """

    alive = True

    def __init__(self, seconds: float = 0.0, log: Path | None = None) -> None:
        self.seconds, self.log = seconds, log
        self.ran: list[str] = []
        self.starts = 0
        self.resumed: list[str] = []
        self._cancelled: set[str] = set()
        self.gate = threading.Event()  # cleared by a test to hold jobs back
        self.gate.set()

    def start(self) -> dict[str, Any]:
        self.starts += 1
        return {"model": "stub", "device": "none"}

    def stop(self) -> None:
        self._cancelled.update(self.ran)
        self.gate.set()

    def cancel(self, job: str) -> None:
        self._cancelled.add(job)

    def run(self, work: Work) -> Iterator[dict[str, Any]]:
        self.ran.append(work.id)
        if "gone" in work.body["prompt"] and (self.ran.count(work.id) < 2 or "good" in work.body["prompt"]):
            raise EngineLost("the engine is not running")
        self._note(f"begin {work.id}")
        folder, prompt = Path(work.folder), work.body["prompt"]
        saved = folder / "latents.safetensors"
        if saved.exists():
            self.resumed.append(work.id)
        steps = range(0 if saved.exists() else 200 if "slow" in prompt else STEPS)
        for step in steps:
            yield {"event": "progress", "stage": "denoise", "done": step, "total": len(steps), "eta": 1.0, "note": ""}
            yield {"event": "preview", "file": "preview.webp"}
            self.gate.wait(20)
            time.sleep(0.02 if "slow" in prompt else self.seconds / STEPS)
            if work.id in self._cancelled:
                if "deaf" in prompt:
                    raise EngineLost("the engine was stopped")
                yield {"event": "cancelled"}
                return
        if "fail" in prompt:
            yield {"event": "failed", "kind": "FloatingPointError", "field": None, "message": "step 3: not finite"}
            return
        resumed = saved.exists()
        saved.write_bytes(b"latents of " + prompt.encode())
        yield {"event": "progress", "stage": "decode", "done": 0, "total": 1, "eta": None, "note": ""}
        if "rank" in prompt and not ("once" in prompt and resumed):
            yield {"event": "failed", "kind": "RankLost", "field": None, "message": "rank 1 ended by signal SIGKILL"}
            return
        if "crash" in prompt and not ("once" in prompt and resumed):
            raise EngineLost("the engine ended: signal SIGKILL; its last words: OSError: /srv/weights/part.safetensors")
        yield {"event": "progress", "stage": "decode", "done": 1, "total": 1, "eta": 0.0, "note": ""}
        yield {"event": "done", "outcome": self._write(folder, work)}

    def _write(self, folder: Path, work: Work) -> dict[str, Any]:
        data = content(work.body["prompt"], work.body["seed"])
        for i, item in enumerate(work.body["conditions"]):
            assert Path(item["uri"]) == folder / f"in-{i}" and Path(item["uri"]).read_bytes()
        (folder / "video.mp4").write_bytes(data)
        (folder / "video.json").write_text(json.dumps({"seed": work.body["seed"]}))
        files = {"video": "video.mp4", "report": "video.json", "latents": "latents.safetensors"}
        outcome = {
            "files": files,
            "sizes": {name: (folder / name).stat().st_size for name in files.values()},
            "sha256": {"file": hashlib.sha256(data).hexdigest()},
            "steps": 50,
            "calls": 49,
            "stages": {"denoise": self.seconds},
            "peaks": {"denoise": 1000},
            "cache": {"hits": 1, "misses": 2},
        }
        outcome_file(folder).write_text(json.dumps(outcome))
        self._note(f"end {work.id}")
        return outcome

    def _note(self, text: str) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(text + "\n")


def content(prompt: str, seed: int) -> bytes:
    """What the stub makes of a request: 20,000 bytes."""
    return hashlib.sha256(f"{prompt}|{seed}".encode()).digest() * 625


class Running:
    """A server in a thread, at `url`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._wire = listen(service.options.host, 0)
        self.port = self._wire.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(service)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            self.server.run(sockets=[self._wire])

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: self.server.started, 10)
        return self

    def __exit__(self, *error: object) -> None:
        self.service.refuse_more()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"


def running(folder: Path, model: Path, runner: Any = None, **changes: Any) -> Running:
    """A server with a stub runner on the sizes of `model`; `probe` and `fetcher` go to `Service`."""
    given = {name: changes.pop(name) for name in ("probe", "fetcher") if name in changes}
    changes = {"data": folder, "drain_seconds": 0.2, "spare_gib": 0.001, "idle_seconds": 5.0} | changes
    runner = StubRunner() if runner is None else runner
    return Running(Service(ServeOptions(**changes), EngineConfig(model=str(model)), runner=runner, **given))


def until(condition: Any, seconds: float = 10.0) -> Any:
    """The first true value of `condition()`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return value


def call(
    url: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """(status, JSON or bytes, headers) of one request; a dict or list goes as JSON."""
    data, sent = body, dict(headers or {})
    if isinstance(body, dict | list):
        data = json.dumps(body).encode()
        sent.setdefault("Content-Type", "application/json")
    request = urllib.request.Request(url, data, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, _decoded(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _decoded(error), dict(error.headers)


def _decoded(answer: Any) -> Any:
    data = answer.read()
    return json.loads(data) if data and answer.headers.get("content-type", "").startswith("application/json") else data


def form(parts: list[tuple[str, str | bytes]]) -> tuple[bytes, dict[str, str]]:
    """A multipart body of fields (text) and files (bytes), and its header."""
    mark = "5f2b1c"
    body = b""
    for name, value in parts:
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{name}"'
        head += '; filename="../../evil.png"\r\nContent-Type: text/html' if isinstance(value, bytes) else ""
        body += head.encode() + b"\r\n\r\n" + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    return body + f"--{mark}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={mark}"}


def ended(url: str, job: str, seconds: float = 30.0) -> dict[str, Any]:
    """The job, once it has ended."""

    def look() -> Any:
        status, body, _ = call(f"{url}/v1/videos/{job}")
        assert status == 200, body
        return body if body["status"] in ("completed", "failed", "cancelled") else None

    return dict(until(look, seconds))


def serve(folder: Path, model: Path, seconds: float) -> None:
    """Serve with a stub until killed; says its number and port."""
    options = ServeOptions(data=folder, drain_seconds=0.2, spare_gib=0.001, max_queued=1000, max_starts=1000)
    runner = StubRunner(seconds, folder.with_suffix(".log"))
    service = Service(options, EngineConfig(model=str(model)), runner=runner)
    wire = listen("127.0.0.1", 0)
    print(os.getpid(), wire.getsockname()[1], flush=True)
    make_server(service).run(sockets=[wire])


def main() -> None:
    """A server for every line of the input, forked from this process, which has everything imported."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.02)
    asked = parser.parse_args()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the killed
    while sys.stdin.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(asked.folder, asked.model, asked.seconds)
            os._exit(0)


if __name__ == "__main__":
    main()
