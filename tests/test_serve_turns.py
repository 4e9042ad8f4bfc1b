"""What takes long is done in turns, and nobody else waits for it: checks of media, and frames of a finished video."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serve_stub import StubRunner, call, ended, running, until
from twinreel import RequestError
from twinreel.serve import probe as probe_module
from twinreel.serve import turns as turns_module
from twinreel.serve.child import Child
from twinreel.serve.fetch import Fetcher
from twinreel.serve.probe import STOPPED, Probe
from twinreel.serve.service import CHECKS, WAITING
from twinreel.serve.shapes import PICTURE
from twinreel.serve.turns import Busy, Turns

SHORT = {"target": {"duration_seconds": 1}}


def together(number: int, do: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=do) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


class Slow(Probe, Fetcher):
    """A reading process and a remote host that answer when they are told to."""

    def __init__(self) -> None:
        Probe.__init__(self)
        self.go, self.held, self.asked = threading.Event(), 0, Counter[str]()

    def check(self, body: Any, spec: Any, model: Any) -> dict[str, Any]:
        self.held += 1
        self.go.wait(20)
        raise RequestError("conditions", "it was slow")

    def fetch(self, address: str, take: Any, field: str, max_bytes: int) -> int:
        self.held += 1
        self.go.wait(20)
        raise RequestError(field, "it was slow")

    def frames(self, video: Path, target: Path) -> None:
        self.asked[target.parent.name] += 1
        self.go.wait(20)
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("frame-00000.png", b"x" * 1000)


@pytest.mark.parametrize("address", [PICTURE, "http://slow.test/clip.mp4"], ids=["slow clips", "slow hosts"])
def test_slow_media_hold_up_nobody(address: str, tiny_original: Path, tmp_path: Path) -> None:
    slow, many = Slow(), CHECKS + WAITING + 9
    seen: list[tuple[int, str | None]] = []

    def upload() -> None:
        item = {"type": "image", "uri": address, "role": "reference"}
        status, _, headers = call(f"{site.url}/v1/videos", {"prompt": "p", "conditions": [item], **SHORT})
        seen.append((status, headers.get("retry-after")))

    with running(tmp_path / "data", tiny_original, probe=slow, fetcher=slow) as site:
        threads = together(many, upload)
        until(lambda: len(seen) == 9)
        assert seen == [(429, "10")] * 9 and slow.held == CHECKS
        for path in ("/health", "/ready", "/v1/models", "/v1/videos", "/"):
            assert call(site.url + path)[0] == 200, path
        status, made, _ = call(f"{site.url}/v1/videos", {"prompt": "text alone", **SHORT})
        assert status == 201 and ended(site.url, made["id"])["status"] == "completed"
        slow.go.set()
        for thread in threads:
            thread.join(20)
        assert Counter(status for status, _ in seen) == {429: 9, 422: many - 9}
        assert not list((site.service.folder / "incoming").iterdir())


def test_frames_are_made_once(tiny_original: Path, tmp_path: Path) -> None:
    slow, seen = Slow(), list[tuple[int, bytes]]()
    with running(tmp_path / "data", tiny_original, StubRunner()) as site:
        site.service.extractor = slow
        _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "p", **SHORT})
        before = ended(site.url, made["id"])
        url, size = f"{site.url}/v1/videos/{made['id']}", site.service.jobs.get(made["id"]).bytes  # type: ignore[union-attr]
        threads = together(12, lambda: seen.append(call(f"{url}/content?variant=frames")[:2]))
        until(lambda: slow.asked)
        assert call(f"{site.url}/health")[0] == call(f"{url}/content")[0] == 200
        slow.go.set()
        for thread in threads:
            thread.join(20)
        target = site.service.jobs.path(made["id"]) / "frames.zip"
        assert slow.asked == {made["id"]: 1} and seen == [(200, target.read_bytes())] * 12
        after = call(url)[1]
        assert (before["files"]["frames"], after["files"]["frames"]) == (0, target.stat().st_size)
        assert site.service.jobs.get(made["id"]).bytes == size + target.stat().st_size  # type: ignore[union-attr]
        # whoever asks the service itself finds them, too
        target.unlink()
        job = site.service.jobs.get(made["id"])
        for thread in together(4, lambda: site.service.frames(job)):  # type: ignore[arg-type]
            thread.join(20)
        assert slow.asked == {made["id"]: 2}


def test_a_reader_is_stopped_in_the_middle(tmp_path: Path) -> None:
    """A server that ends waits for no medium: neither for the one that is read nor for those in line."""
    told: list[str] = []
    probe = Probe([sys.executable, "-c", "import time; time.sleep(60)"])

    def ask() -> None:
        with pytest.raises(RequestError) as caught:
            probe.frames(tmp_path / "a", tmp_path / "b")
        told.append(str(caught.value))

    threads = together(4, ask)
    until(lambda: probe._child)
    probe.stop()
    for thread in threads:
        thread.join(10)
    assert len(told) == 4 and sum("shutting down" in text for text in told) >= 3


def test_a_reader_that_was_started_meanwhile_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, told = Probe([sys.executable, "-c", "import time; time.sleep(60)"]), list[str]()
    begun: list[threading.Thread] = []

    def start(command: Any) -> Child:
        begun.extend(together(1, probe.stop))
        until(lambda: probe._stopped)  # and finds no process to end
        return Child(command)

    monkeypatch.setattr(probe_module, "Child", start)

    def ask() -> None:
        with pytest.raises(RequestError) as caught:
            probe.frames(tmp_path / "a", tmp_path / "b")
        told.append(caught.value.message)

    for thread in [*together(1, ask), *begun]:
        thread.join(10)
    assert told == [STOPPED]


def test_a_reader_that_ends_names_no_path(tmp_path: Path) -> None:
    probe = Probe([sys.executable, "-c", "raise OSError('no /srv/media/clip.mp4')"])
    with pytest.raises(RequestError, match="no clip.mp4") as caught:
        probe.frames(tmp_path / "a", tmp_path / "b")
    assert "/srv" not in str(caught.value)


def test_frames_that_cannot_be_read(tiny_original: Path, tmp_path: Path) -> None:
    with running(tmp_path / "a data", tiny_original, StubRunner()) as site:  # what the stub makes is no MP4
        _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "p", **SHORT})
        ended(site.url, made["id"])
        status, told, _ = call(f"{site.url}/v1/videos/{made['id']}/content?variant=frames")
        assert (status, told["error"]["type"]) == (503, "unavailable")
        assert told["error"]["message"] == "the frames cannot be read: Invalid data found when processing input"


def test_a_turn_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "LONGEST_WAIT", 0.05)
    go = threading.Event()

    async def play() -> None:
        turns = Turns("checks", 1, 2)
        first = asyncio.create_task(turns.run(go.wait, 20))
        with pytest.raises(Busy, match="take long"):
            await asyncio.gather(asyncio.sleep(0.01), turns.run(json.loads, "1"))
        go.set()
        assert await first and await turns.run(json.loads, "1") == 1
        with pytest.raises(ValueError):
            await turns.run(json.loads, "x")
        assert await turns.run(json.loads, "2") == 2  # one that fails gives its turn back

    asyncio.run(play())


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/videos", "/v1/models", "/metrics", "/openapi.json", "/",
                                  "/v1/videos/video_x", "/nothing"])  # fmt: skip
def test_head_is_get_without_a_body(path: str, tiny_original: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", tiny_original) as site:
        until(lambda: call(f"{site.url}/ready")[0] == 200)
        got, told = call(site.url + path), call(site.url + path, method="HEAD")
        assert (told[0], told[1], told[2]["content-type"]) == (got[0], b"", got[2]["content-type"])


def test_head_of_a_job(tiny_original: Path, tmp_path: Path) -> None:
    runner = StubRunner()
    runner.gate.clear()
    with running(tmp_path / "data", tiny_original, runner) as site:
        _, made, _ = call(f"{site.url}/v1/videos", {"prompt": "p", **SHORT})
        url = f"{site.url}/v1/videos/{made['id']}"
        status, _, headers = call(f"{url}/events", method="HEAD")  # it runs, and yet the answer ends
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for method in ("GET", "HEAD"):
            status, _, headers = call(f"{url}/cancel", method=method)
            assert (status, headers["allow"]) == (405, "POST")
        runner.gate.set()
        ended(site.url, made["id"])
        status, data, headers = call(f"{url}/content", method="HEAD")
        assert (status, data, headers["content-length"], headers["content-type"]) == (200, b"", "20000", "video/mp4")
