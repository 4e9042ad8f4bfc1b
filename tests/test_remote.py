"""http(s) media: fetched when allowed, with limits, gone afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twinreel.errors import RequestError
from twinreel.media import remote
from twinreel.request import Keyframe, Reference, Request, check_request
from twinreel.spec import Spec


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/secret")
            self.end_headers()
        elif self.path == "/there":
            self.send_response(302)
            self.send_header("Location", "/x.png")
            self.end_headers()
        elif self.path == "/x.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"pixels" * 1000)
        elif self.path == "/half":
            self.send_response(200)
            self.send_header("Content-Length", "12000")
            self.end_headers()
            self.wfile.write(b"pixels" * 1000)
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_addresses_become_files_that_do_not_stay(server: str) -> None:
    request = Request("a", references=(Reference("image", f"{server}/x.png"), Reference("image", "own.png")))
    with remote.fetched(request) as local:
        path = Path(local.references[0].source)
        assert path.read_bytes() == b"pixels" * 1000 and local.references[1].source == "own.png"
    assert not path.exists()
    with remote.fetched(Request("a", keyframes=(Keyframe(f"{server}/there"),))) as local:
        assert Path(local.keyframes[0].image).stat().st_size == 6000


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/moved", "cannot fetch"),
        ("/absent", "cannot fetch"),
        ("/half", "broke off, 6,000 bytes are missing; try again"),
    ],
)
def test_failures_name_the_field(server: str, path: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        with remote.fetched(Request("a", keyframes=(Keyframe(server + path),))):
            raise AssertionError("it was fetched")
    assert caught.value.field == "keyframes[0].image"


def test_nobody_there_and_nonsense(tmp_path: Path) -> None:
    for address in ("http://127.0.0.1:9/x", "http://", "http://[::1", "http://a b/"):
        with pytest.raises(RequestError, match="cannot fetch"):
            remote.download(address, tmp_path / "x", "references[0].source")


def test_size_and_time_are_limited(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="more than 0 MiB"):
        remote.download(f"{server}/x.png", tmp_path / "x", "references[0].source", max_bytes=5999)
    monkeypatch.setattr(remote, "MAX_SECONDS", -1.0)
    with pytest.raises(RequestError, match="took more than"):
        remote.download(f"{server}/x.png", tmp_path / "x", "references[0].source")


def test_the_door_is_shut_unless_allowed() -> None:
    for address in ("http://a/x.png", "HTTPS://a/x.png"):
        request = Request("a", references=(Reference("image", address),))
        with pytest.raises(RequestError, match="--allow-remote"):
            check_request(request, Spec())
        check_request(request, Spec(), allow_remote=True)
