"""The client and what may stand at the other end: nobody for a while, a proxy, or something that is not twinreel."""

from __future__ import annotations

import contextlib
import errno
import http.client
import http.server
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_stub import Running, StubRunner, content, ended, running, until
from test_serve_client import Breaking
from twinreel import Client, Keyframe, Request, RequestError
from twinreel.cli import main
from twinreel.serve import client as client_module
from twinreel.serve.client import ServerError

ASKED = Request("p", duration=1)
VIDEO = {"id": "video_1", "object": "video", "status": "queued", "running": None, "position": 0, "error": None}
MODELS = {"object": "list", "data": [{"id": "m", "tasks": [], "partitions": {}}]}


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("client") / "data", tiny_original, StubRunner(0.02)) as made:
        yield made


class Door(Breaking):
    """A way to a server that can be shut: nobody answers then, and whoever is inside is put out."""

    def __init__(self, port: int) -> None:
        self.inside: list[socket.socket] = []
        super().__init__(port, 0, 0)
        self.place = self.wire.getsockname()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        self.inside.append(near)
        super()._carry(near, far)

    def shut(self, seconds: float = 0.0) -> None:
        self.wire.shutdown(socket.SHUT_RDWR)
        self.wire.close()
        for wire in self.inside:
            with contextlib.suppress(OSError):  # it left before
                wire.shutdown(socket.SHUT_RDWR)
        if seconds:
            threading.Timer(seconds, self.open).start()

    def open(self) -> None:
        self.wire = socket.create_server(self.place)
        threading.Thread(target=self._run, daemon=True).start()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience alone makes a call be tried again."""
    monkeypatch.setattr(client_module, "TRIES", 1)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_restarts_is_waited_for(site: Running, tmp_path: Path) -> None:
    door, runner = Door(site.port), site.service.dispatcher.runner
    assert isinstance(runner, StubRunner)
    client = Client(door.url, patience=20)
    door.shut(0.3)
    runner.gate.clear()
    job = client.submit(ASKED)["id"]
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.append(client.wait(job)))
    waiting.start()
    until(lambda: site.service.hub.readers())
    door.shut(0.3)
    runner.gate.set()
    waiting.join(20)
    assert done and done[0]["status"] == "completed"
    door.shut(0.3)
    client.download(job, tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == content("p", 42)
    door.shut(0.3)
    assert client.get(job)["id"] == job


def test_what_takes_the_name_meanwhile_is_kept(site: Running, tmp_path: Path) -> None:
    client, target = Client(site.url), tmp_path / "a.mp4"
    submit = client.submit

    def take(*arguments: Any, **options: Any) -> Any:
        job = submit(*arguments, **options)
        for name in ("a.mp4", "a.json"):
            (tmp_path / name).write_text("precious")
        return job

    client.submit = take  # type: ignore[method-assign]
    job = client.generate(ASKED, target)
    assert target.read_text() == (tmp_path / "a.json").read_text() == "precious"
    assert "a.mp4 was taken meanwhile" in job["warnings"][-1]
    assert job["path"] == str(tmp_path / "a-2.mp4") and (tmp_path / "a-2.json").is_file()
    assert (tmp_path / "a-2.mp4").read_bytes() == content("p", 42)
    with pytest.raises(RequestError, match="a.mp4 exists"):
        client.download(job["id"], target)
    assert client.download(job["id"], target, overwrite=True) == target and target.read_text("latin-1") != "precious"
    assert client.generate(ASKED, target, overwrite=True)["path"] == str(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-2.json", "a-2.mp4", "a.json", "a.mp4"]


@pytest.mark.parametrize("do", [lambda c, path: c.download("video_1", path), lambda c, _: c.wait("video_1")])
@pytest.mark.usefixtures("impatient")
def test_answers_that_are_always_cut_end_the_call(do: Any, tmp_path: Path) -> None:
    class Cut(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            stream = self.path.endswith("events")
            self.send_header("Content-Type", "text/event-stream" if stream else "video/mp4")
            if not stream:
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"" if stream else b"x" * 50)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ServerError, match="video_1: "):
            do(Client(f"http://127.0.0.1:{server.server_port}", timeout=3), tmp_path / "x.mp4")
        server.shutdown()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("impatient")
def test_errors_name_the_job(site: Running, tmp_path: Path) -> None:
    door = Door(site.port)
    client = Client(door.url, patience=0.1)
    job = client.submit(ASKED)["id"]
    ended(site.url, job)
    door.shut()
    for do in (client.wait, client.get, client.cancel, client.remove, lambda job: client.download(job, tmp_path / "x")):
        with pytest.raises(ServerError, match=f"^{job}: .* does not answer: .*; check") as caught:
            do(job)
        assert caught.value.status == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "waits", "told"),
    [
        (ConnectionRefusedError(111, "refused"), True, ServerError),
        (http.client.RemoteDisconnected("closed"), True, ServerError),
        (http.client.IncompleteRead(b""), True, ServerError),
        (TimeoutError("timed out"), True, ServerError),
        (OSError(errno.EHOSTUNREACH, "no route"), True, ServerError),
        (socket.gaierror(socket.EAI_AGAIN, "later"), True, ServerError),
        (ServerError(503, "starts"), True, ServerError),
        (ServerError(502, "of a proxy"), True, ServerError),
        (ServerError(429, "full", 7.0), True, ServerError),
        (ServerError(404, "gone"), False, ServerError),
        (ServerError(0, "strange"), False, ServerError),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), False, ServerError),
        (ssl.SSLCertVerificationError("expired"), False, ServerError),
        (http.client.BadStatusLine("SSH-2.0"), False, ServerError),
        (OSError(errno.ENOSPC, "the disk is full"), False, OSError),
        (FileNotFoundError(2, "removed meanwhile"), False, OSError),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception, waits: bool, told: type[Exception]
) -> None:
    """What may pass is waited for, however often; what is of this machine's files is told as it is."""
    slept: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", slept.append)
    patience = client_module._Patience(3600.0, "host", "video_1")
    if waits:
        for _ in range(9):
            patience.wait(error)
        assert len(slept) == 9 and max(slept) <= 30.0
        return
    with pytest.raises(told) as caught:
        patience.wait(error)
    assert not slept and (told is OSError or "video_1" in str(caught.value))


def test_an_interrupted_generate_ends_at_once(site: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is not held up by the patience for a server that is away; it says which job is left."""
    door = Door(site.port)
    client = Client(door.url, patience=3600)

    def stop(job: str, watch: Any) -> None:
        door.shut()
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "wait", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        client.generate(ASKED, tmp_path / "a.mp4")
    assert "may still run" in caught.value.__notes__[0] and "video_" in caught.value.__notes__[0]


class Strange:
    """Answers by `answers[path]`, else by `usual`: (status, content type, body), or the bytes of no HTTP at all."""

    def __init__(self, usual: Any, answers: dict[str, Any] | None = None) -> None:
        strange = self
        self.asked: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                strange.asked.append(path)
                made = (answers or {}).get(path, usual)
                if isinstance(made, bytes):
                    self.wfile.write(made)
                    return
                status, kind, data = made
                data = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                if status == 301:
                    self.send_header("Location", "https://elsewhere.test/")
                if b"chunked" not in data:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *words: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Strange:
        threading.Thread(target=lambda: self.server.serve_forever(0.02), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


JSON, DEEP = "application/json", b"[" * 100_000 + b"]" * 100_000
STRANGE: dict[str, tuple[Any, str]] = {
    "moved": ((301, "text/html", b""), "answered 301 Moved Permanently; it points to 'https://elsewhere.test/'"),
    "a page": ((200, "text/html", b"<!doctype html>hello"), r"200 OK \(text/html\) with '<!doctype html>hello'"),
    "an object": ((200, JSON, {}), "with '{}'"),
    "a list": ((200, JSON, []), r"with '\[\]'"),
    "nothing": ((200, JSON, b""), "with nothing"),
    "null": ((200, JSON, None), "with 'null'"),
    "lists in lists": ((200, JSON, DEEP), r"with '\[\[\["),
    "objects in objects": ((200, JSON, b'{"a":' * 50_000), "with"),
    "no UTF-8": ((200, JSON, b"\xff\xfe{"), "with"),
    "other models": ((200, JSON, {"object": "list", "data": [{"id": "m", "object": "model"}]}), "with"),
    "another kind of job": ((200, JSON, {"id": 5, "object": "video", "status": []}), "with"),
    "an error of others": ((422, JSON, {"detail": [{"msg": "no"}]}), "answered 422"),
    "an error without words": ((400, JSON, {"error": {"message": 5}}), "answered 400"),
    "an error in depth": ((500, JSON, DEEP), "answered 500"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "it answered SSH-2.0-OpenSSH_9.2"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_not_twinreel_is_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: None)
    answer, words = STRANGE[kind]
    with Strange(answer) as strange:
        client = Client(strange.url)
        asks: list[Callable[[], Any]] = [client.model, client.list, lambda: client.submit(ASKED)]
        asks += [
            lambda: client.get("x"),
            lambda: client.cancel("x"),
            lambda: client.remove("x"),
            lambda: client.wait("x"),
        ]
        for ask in asks:
            with pytest.raises(ServerError, match=words) as caught:
                ask()
            assert "give the address of a twinreel server" in str(caught.value)
        assert main(["generate", "p", "--server", strange.url, "-o", str(tmp_path / "a.mp4"), "-q"]) == 1
    told = capsys.readouterr().err
    assert "the server did not do it" in told and "unexpected" not in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/videos/video_1/events", (200, "text/event-stream", b"event: queued\ndata: {}\n\n")),
        ("/v1/videos/video_1/events", (200, "text/event-stream", b"event: queued\ndata: " + DEEP + b"\n\n")),
        (
            "/v1/videos/video_1/events",
            (200, "text/event-stream", b"data: " + json.dumps(VIDEO | {"running": 5}).encode()),
        ),
        ("/v1/videos/video_1/events", (200, "text/html", b"<!doctype html>")),
        ("/v1/videos/video_1/content", (301, "text/html", b"")),
        ("/v1/videos/video_1/content", (200, "text/html", b"chunked")),
    ],
)
def test_strange_answers_on_the_way(path: str, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: None)
    over = json.dumps(VIDEO | {"status": "completed"}).encode()
    answers = {"/v1/videos": (201, JSON, VIDEO), "/v1/models": (200, JSON, MODELS)}
    answers["/v1/videos/video_1/events"] = (200, "text/event-stream", b"event: completed\ndata: " + over + b"\n\n")
    if answer[2].startswith(b"data: "):
        answer = (*answer[:2], answer[2] + b"\n")
    with Strange((404, JSON, {}), answers | {path: answer}) as strange, pytest.raises(ServerError):
        Client(strange.url).generate(ASKED, tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


def test_a_medium_that_vanishes_is_told_as_such(site: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = tmp_path / "a.png"
    medium.write_bytes(b"x")
    monkeypatch.setattr(client_module.secrets, "token_hex", lambda size: medium.unlink(missing_ok=True) or "mark")
    with pytest.raises(FileNotFoundError):
        Client(site.url, patience=3600).submit(Request("p", keyframes=(Keyframe(str(medium)),), duration=1))
