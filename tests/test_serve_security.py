"""Who gets in: keys, sessions, host names, origins; and which addresses the server asks for media, and which never."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from serve_stub import Running, StubRunner, call, running, until
from twinreel import RequestError
from twinreel.serve.fetch import Fetcher, is_public
from twinreel.serve.security import COOKIE, Guard
from twinreel.serve.shapes import PICTURE

KEY = "a key of twenty five chars"
SHORT = {"target": {"duration_seconds": 1}}


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "key").write_text(KEY + "\n")
    with running(folder / "data", tiny_original, StubRunner(), api_key_file=folder / "key") as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


@pytest.fixture(scope="module")
def open_site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("open") / "data", tiny_original, names=("video.example",)) as made:
        yield made


def test_every_route_but_health_and_the_page_asks_for_the_key(site: Running) -> None:
    paths = call(f"{site.url}/openapi.json", headers={"X-API-Key": KEY})[1]["paths"]
    seen = 0
    for path, methods in paths.items():
        for method in methods:
            status, answer, _ = call(
                site.url + path.replace("{job}", "video_x").replace("{number}", "0"), None, method.upper()
            )
            if path in ("/health", "/ready"):
                assert status == 200
            elif path != "/v1/session":
                assert (status, answer["error"]["type"]) == (401, "unauthorized"), path
                seen += 1
    assert seen >= 10 and call(f"{site.url}/openapi.json")[0] == 401 and call(f"{site.url}/")[0] == 200


def test_the_key_in_either_header(site: Running) -> None:
    url = f"{site.url}/v1/videos"
    assert call(url, headers={"Authorization": f"Bearer {KEY}"})[0] == call(url, headers={"X-API-Key": KEY})[0] == 200
    for wrong in (KEY[:-1], KEY + "x", "", "\xff" * 20):
        assert call(url, headers={"X-API-Key": wrong})[0] == 401
    assert call(url, headers={"Authorization": f"Basic {KEY}"})[0] == 401


@pytest.mark.parametrize("host", ["x?", "x#", "x/health?", "localhost/v1/session#"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_host_header_opens_nothing(site: Running, monkeypatch: pytest.MonkeyPatch, host: str, method: str) -> None:
    # as of every Starlette before 1.0.1
    url = lambda self: URL(f"http://{self.headers['host']}{self.scope['path']}")  # noqa: E731
    monkeypatch.setattr(HTTPConnection, "url", property(url))
    status, answer, headers = call(f"{site.url}/v1/videos", method=method, headers={"Host": host})
    assert (status, answer["error"]["type"], headers["cache-control"]) == (401, "unauthorized", "no-store")
    known = {"Host": host, "X-API-Key": KEY}
    assert call(f"{site.url}/v1/videos?unknown=1", headers=known)[0] == 422


def test_a_session_for_browsers(site: Running) -> None:
    url = f"{site.url}/v1/session"
    assert call(url, {"key": "wrong"})[0] == call(url, {"key": 7})[0] == 401 and call(url, b"?")[0] == 422
    status, _, headers = call(url, {"key": KEY})
    cookie = headers["set-cookie"]
    assert status == 204 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and KEY not in cookie
    assert "secure" not in cookie.lower()
    secure = call(url, {"key": KEY}, headers={"Origin": site.url.replace("http:", "https:")})[2]["set-cookie"]
    assert "secure" in secure.lower()  # behind a proxy that speaks https
    value = cookie.partition(";")[0]
    assert call(f"{site.url}/v1/videos", headers={"Cookie": value})[0] == 200
    assert call(f"{site.url}/v1/videos", headers={"Cookie": value[:-1]})[0] == 401
    assert call(f"{site.url}/v1/videos", headers={"Cookie": f"{COOKIE}=99999999999.abc"})[0] == 401
    assert call(url, method="DELETE")[0] == 204


def test_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(KEY, "127.0.0.1", ())
    cookie = guard.session()
    assert guard.is_session(cookie) and not Guard(KEY, "127.0.0.1", ()).is_session(cookie)
    monkeypatch.setattr("twinreel.serve.security.time.time", lambda: 4e9)
    assert not guard.is_session(cookie)


def test_other_names_and_origins_are_refused(open_site: Running) -> None:
    """A page of another site, or one whose name was made to point here, cannot use the visitor's own server."""
    url, body = f"{open_site.url}/v1/videos", {"prompt": "p", **SHORT}
    assert call(url, headers={"Host": "evil.example"})[0] == 403
    for name in ("video.example", "localhost:1", "127.0.0.9", "[::1]:80"):
        assert call(url, headers={"Host": name})[0] == 200, name
    assert call(url, body, headers={"Origin": "https://evil.example"})[0] == 403
    for origin in ("null", "http://[::1", "", "https://"):
        assert call(url, body, headers={"Origin": origin})[0] == 403, origin
    assert call(url, body, headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert call(url, body, headers={"Origin": open_site.url})[0] == 201
    status, _, headers = call(url, method="OPTIONS", headers={"Origin": "https://evil.example"})
    assert status == 405 and not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "::1", "::",  "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
     "::ffff:10.0.0.1",     "64:ff9b::a00:1", "2002:7f00:1::", "2001:db8::1", "192.0.2.1", "198.18.0.1", "240.0.0.1",
     "fec0::1", "feff::1", "192.0.0.9", "192.0.0.170", "192.88.99.1", "3fff::1", "3fff:fff::1"],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "192.0.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


class Media(http.server.BaseHTTPRequestHandler):
    """A host of media: /ok, /big, /inside (redirects to a private address), /elsewhere, /round."""

    def do_GET(self) -> None:  # noqa: N802
        places = {
            "/inside": "http://10.0.0.1/x",
            "/elsewhere": "http://other.test/x",
            "/round": "/round",
            "/file": "file:///etc/passwd",
        }
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(b"x" * (3 << 20 if self.path == "/big" else 5))

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def media() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Media)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def fetcher(port: int, resolved: tuple[str, ...] = ("127.0.0.1",)) -> Fetcher:
    """media.test is on this machine, which is allowed this once."""
    names = {"media.test": resolved, "sub.media.test": resolved, "10.0.0.1": ("10.0.0.1",)}
    hosts = (".media.test", "10.0.0.1")
    allowed = lambda address: address == "127.0.0.1" or is_public(address)  # noqa: E731
    return Fetcher(hosts, lambda host, port: names[host], allowed, (80, port))


def test_fetching(media: int) -> None:
    made = fetcher(media)
    for host in ("media.test", "sub.media.test", "MEDIA.test."):
        came: list[bytes] = []
        assert made.fetch(f"http://{host}:{media}/ok", came.append, "f", 1 << 20) == 5
        assert b"".join(came) == b"xxxxx"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/big", "larger"),
        ("/inside", "not a public address"),
        ("/elsewhere", "not allowed"),
        ("/round", "redirects"),
        ("/file", "not plain http"),
        ("/none", "404"),
    ],
)
def test_fetches_that_are_refused(media: int, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        fetcher(media).fetch(f"http://media.test:{media}{path}", len, "conditions[0].uri", 1 << 20)
    assert caught.value.field == "conditions[0].uri"


@pytest.mark.parametrize(
    ("scheme", "begin"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"),
        ("http", b"HTTP/1.0 200 OK\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nX: "),
        ("https", b"\x16\x03\x03\x40\x00"),  # the head of a record of 16 KiB
    ],
)
def test_a_host_that_drips_is_left(scheme: str, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait is short and the whole would take an hour."""
    monkeypatch.setattr("twinreel.serve.fetch.MAX_SECONDS", 0.3)
    wire, seen = socket.create_server(("127.0.0.1", 0)), list[str]()

    def drip() -> None:
        line, _ = wire.accept()
        with line, contextlib.suppress(OSError):
            line.recv(9999)
            line.sendall(begin)
            for _ in range(60):
                time.sleep(0.05)
                line.sendall(b"x")
            seen.append("all of it was taken")

    with wire:
        (thread := threading.Thread(target=drip)).start()
        port = wire.getsockname()[1]
        with pytest.raises(RequestError, match="took more than 0.3 s"):
            fetcher(port).fetch(f"{scheme}://media.test:{port}/", len, "f", 1 << 20)
        thread.join()
    assert not seen


def test_names_that_point_inwards_are_refused(media: int) -> None:
    for resolved in (("192.168.0.1",), ("1.1.1.1", "10.0.0.1"), ("::1",), ()):
        with pytest.raises(RequestError, match="not a public address"):
            fetcher(media, resolved).fetch(f"http://media.test:{media}/ok", len, "f", 100)
    for address in (
        f"http://user@media.test:{media}/ok",
        "http://media.test:22/",
        "ftp://media.test/",
        "http://media.test.evil.test/",
    ):
        with pytest.raises(RequestError):
            fetcher(media).fetch(address, len, "f", 100)


def test_remote_media_of_a_request(media: int, tiny_original: Path, tmp_path: Path) -> None:
    with running(tmp_path / "data", tiny_original, fetcher=fetcher(media)) as site:
        item = {"type": "image", "uri": f"http://media.test:{media}/ok", "role": "reference"}
        status, answer, _ = call(f"{site.url}/v1/videos", {"prompt": "p", "conditions": [item], **SHORT})
        assert (status, answer["error"]["field"]) == (422, "conditions[0].uri") and "text" in answer["error"]["message"]
        item["uri"] = PICTURE
        assert call(f"{site.url}/v1/videos", {"prompt": "p", "conditions": [item], **SHORT})[0] == 201
