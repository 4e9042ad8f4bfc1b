"""Media that clients send: where they go, and what is refused while they stream in."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from serve_stub import Running, StubRunner, call, ended, form, running, until
from twinreel.media.addresses import PICTURE
from twinreel.media.pictures import UNREADABLE
from twinreel.serve.fetch import Fetcher
from twinreel.serve.intake import Order, Placer
from twinreel.serve.uploads import Limits, TooLarge, Upload, picture_pixels

SHORT = {"target": {"duration_seconds": 1}}


@pytest.fixture(scope="module")
def runner() -> StubRunner:
    return StubRunner()


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory, runner: StubRunner) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve") / "data", tiny_original, runner) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


def post(site: Running, body: Any, **headers: str) -> tuple[int, Any]:
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    for left in reversed(range(5)):
        try:
            status, answer, _ = call(f"{site.url}/v1/videos", body, "POST", named)
            return status, answer
        except urllib.error.URLError as error:
            # refused while more was being sent: the system may drop the answer with the line
            if left == 0 or not isinstance(error.reason, BrokenPipeError | ConnectionResetError):
                raise
    raise AssertionError


def refused(site: Running, body: Any, field: str | None, status: int = 422) -> str:
    """The message of a refusal that names `field`; nothing was queued."""
    before = site.service.jobs.ids()
    got, answer = post(site, body)
    assert got == status, answer
    assert answer["error"]["field"] == field, answer
    assert site.service.jobs.ids() == before
    return str(answer["error"]["message"])


def png(width: int = 96, height: int = 64) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(data, "PNG")
    return data.getvalue()


def test_uploads(site: Running, runner: StubRunner) -> None:
    body, headers = form(
        [("prompt", "p"), ("seconds", "1"), ("seed", "5"), ("first_frame", png()), ("last_frame", png())]
    )
    status, made = post(site, body, **headers)
    assert status == 201, made
    assert [item["frame_index"] for item in made["inputs"]] == [0, -1] and made["seed"] == 5
    assert ended(site.url, made["id"])["status"] == "completed"  # the stub asserts that its files are there

    asked = {"prompt": "<Picture 1> <Picture 2>", "n": 2, **SHORT}
    asked["conditions"] = [{"type": "image", "uri": f"upload:{part}", "role": "reference"} for part in ("b", "a")]
    body, headers = form([("request", json.dumps(asked)), ("a", png(64, 64)), ("b", png())])
    status, made = post(site, body, **headers)
    assert status == 201, made
    assert [item["label"] for item in made["inputs"]] == ["Picture 1", "Picture 2"]
    assert call(site.url + made["inputs"][0]["url"])[1] == png() and len(made["variants"]) == 2
    assert not list((site.service.folder / "incoming").iterdir())
    assert not [path for path in site.service.folder.rglob("*") if "evil" in path.name]


def test_uploads_that_are_refused(site: Running) -> None:
    def send(*parts: tuple[str, str | bytes]) -> tuple[int, Any]:
        body, headers = form([("prompt", "p"), *parts])
        status, answer = post(site, body, **headers)
        return status, answer["error"]["field"]

    assert send(("first_frame", b"hello, this is text")) == (422, "first_frame")
    assert send(("first_frame", b"")) == (422, "first_frame")
    assert send(("reference", png()), ("reference", png(10, 600))) == (422, "reference[1]")
    body, headers = form([("prompt", "p"), ("first_frame", png()[:150])])
    status, answer = post(site, body, **headers)
    assert (status, answer["error"]["field"]) == (422, "first_frame")
    assert "truncated" in answer["error"]["message"] and "/" not in answer["error"]["message"]
    assert send(("picture", png())) == (422, "picture")
    assert send(("guidance", "7")) == (422, "guidance")
    assert send(("seed", "x")) == (422, "seed")
    assert send(("prompt", "again")) == (422, "prompt")
    assert send(*[("reference", png())] * 13) == (413, None)
    assert send(("request", "{}")) == (422, "prompt")
    asked = json.dumps({"prompt": "p"})
    body, headers = form([("request", asked), ("spare", png())])
    assert post(site, body, **headers)[1]["error"]["field"] == "spare"
    body, headers = form([("prompt", "p"), ("first_frame", png())])
    assert post(site, body[:-20], **headers)[0] == 422
    assert post(site, b"nonsense", Content_Type="multipart/form-data; boundary=x")[0] == 422
    assert post(site, b"nonsense", Content_Type="multipart/form-data")[0] == 422
    assert post(site, b"{}", Content_Type="text/plain")[0] == 415


def test_decompression_bombs_are_refused_by_their_head(site: Running) -> None:
    head = png()
    shape = b"IHDR" + (30_000).to_bytes(4, "big") * 2 + head[24:29]
    huge = head[:12] + shape + zlib.crc32(shape).to_bytes(4, "big") + head[33:]
    body, headers = form([("prompt", "p"), ("first_frame", huge)])
    status, answer = post(site, body, **headers)
    assert (status, answer["error"]["field"]) == (422, "first_frame")
    assert "900.0 million pixels" in answer["error"]["message"]
    refused(
        site,
        {"prompt": "p", "input_reference": f"data:image/png;base64,{base64.b64encode(huge).decode()}"},
        "input_reference",
    )


def test_a_picture_whose_frame_is_larger_than_itself(site: Running) -> None:
    data = io.BytesIO()
    Image.new("P", (32, 32)).save(data, "GIF")
    wide = bytearray(data.getvalue())
    frame = wide.index(b",", 13)
    wide[frame + 5 : frame + 9] = (20_000).to_bytes(2, "little") * 2
    refused(
        site,
        {"prompt": "p", "input_reference": f"data:image/gif;base64,{base64.b64encode(wide).decode()}"},
        "input_reference",
    )


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: error.__name__)
def test_a_head_that_cannot_be_read_does_not_say_its_size(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> None:
        raise error("damaged")

    Image.init()
    monkeypatch.setitem(Image.OPEN, "AVIF", (broken, None))
    assert picture_pixels(b"", "AVIF") is None


@pytest.mark.parametrize(
    ("sent", "fetched", "fits"), [(0, 100, True), (60, 40, True), (60, 41, False), (100, 1, False)]
)
def test_uploads_and_what_is_fetched_count_together(tmp_path: Path, sent: int, fetched: int, fits: bool) -> None:
    class Host(Fetcher):
        def fetch(self, address: str, take: Any, field: str, max_bytes: int) -> int:
            assert max_bytes == 100 - sent
            take(png()[:fetched])
            return fetched

    (tmp_path / "in-0").write_bytes(png()[:sent])
    order = Order({"conditions": [{"uri": "http://host/x.png"}]})
    if sent:
        order.body["conditions"].append({"uri": "upload:a"})
        order.uploads["a"] = Upload("a", tmp_path / "in-0", PICTURE, "a PNG picture", sent)
    placer = Placer(tmp_path, Limits(100, 1e6, 1.0, lambda: None), Host(()))
    with contextlib.nullcontext() if fits else pytest.raises(TooLarge):
        placer.place(order)


def test_too_large_is_said_before_the_end(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(site.service.limits, "bytes", 100_000)
    try:
        body, headers = form([("prompt", "p"), ("first_frame", png() + bytes(200_000))])
        assert post(site, body, **headers)[0] == 413
        request = urllib.request.Request(f"{site.url}/v1/videos", b"x", {"Content-Type": "application/json"})
        request.add_unredirected_header("Content-length", str(1 << 40))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=5)
        assert caught.value.code == 413
    finally:
        object.__setattr__(site.service.limits, "bytes", 512 << 20)


def part(head: bytes, data: bytes = b"p", mark: bytes = b"5f2b1c") -> bytes:
    return b"--" + mark + b"\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + data + b"\r\n"


PROMPT = part(b'name="prompt"') + part(b'name="seconds"', b"1")
END = b"--5f2b1c--\r\n"
FILE = 'name="first_frame"; filename="海.png"'


@pytest.mark.parametrize(
    ("body", "mark", "status", "field"),
    [
        (PROMPT + part(FILE.encode(), png()) + END, "5f2b1c", 201, None),
        (PROMPT + part(b'name="first_frame"; filename="\xff\xfe.png"', png()) + END, "5f2b1c", 201, None),
        (PROMPT + part(b"name=\"first_frame\"; filename=x; filename*=UTF-8''%E6%B5%B7", png()) + END, "5f2b1c", 201, None),
        (PROMPT + part("name=\"海\"".encode()) + END, "5f2b1c", 422, "海"),
        (PROMPT + part(b'name="\xff"') + END, "5f2b1c", 422, "body"),
        (PROMPT + part(b'name=""') + END, "5f2b1c", 422, "body"),
        (PROMPT + END, "x" * 5000, 422, "body"),
        (PROMPT + END, "x" * 71, 422, "body"),
        (PROMPT + END, '""', 422, "body"),
        (PROMPT + END, "5f2b1c; charset=latin-1", 201, None),
        (PROMPT.replace(b"5f2b1c", b"x" * 70) + b"--" + b"x" * 70 + b"--\r\n", "x" * 70, 201, None),
        (PROMPT + part(b'name="seed"\r\nContent-Transfer-Encoding: base64', b"NQ==") + END, "5f2b1c", 422, "seed"),
        (PROMPT + part(b'name="seed"\r\nContent-Transfer-Encoding: 8BIT', b"5") + END, "5f2b1c", 201, None),
        (PROMPT + part(b'name="seed"\r\nContent-Type: text/plain; charset=utf-16', b"5") + END, "5f2b1c", 422, "seed"),
        (PROMPT + part(b'name="seed"\r\nContent-Type: text/plain; charset="UTF-8"', b"5") + END, "5f2b1c", 201, None),
        (PROMPT + part(FILE.encode(), png()) * 2 + END, "5f2b1c", 422, "first_frame"),
        (PROMPT + part(FILE.encode().replace(b"first", b"last"), png()) * 2 + END, "5f2b1c", 422, "last_frame"),
        (PROMPT + part(b'name="seed"', b"9" * 6000) + END, "5f2b1c", 422, "seed"),
        (PROMPT + END + b"-" * 3_000_000, "5f2b1c", 413, None),  # of two million
        (b"-" * 3_000_000 + PROMPT + END, "5f2b1c", 413, None),
    ],
)  # fmt: skip
def test_forms_as_strange_as_they_come(site: Running, body: bytes, mark: str, status: int, field: str | None) -> None:
    object.__setattr__(site.service.limits, "bytes", 1_000_000)
    try:
        got, answer = post(site, body, Content_Type=f"multipart/form-data; boundary={mark}")
    finally:
        object.__setattr__(site.service.limits, "bytes", 512 << 20)
    assert got == status, answer
    assert status == 201 or answer["error"]["field"] == field and answer["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Encoding": "gzip"}, 415),
        ({"Content_Encoding": "identity"}, 201),
        ({"Content_Type": "application/json; charset=utf-16"}, 415),
        ({"Content_Type": "application/json; charset=latin-1"}, 415),
        ({"Content_Type": 'application/json; charset="UTF-8"'}, 201),
    ],
)
def test_bodies_that_are_not_what_their_bytes_say(site: Running, headers: dict[str, str], status: int) -> None:
    asked = {"Content_Type": "application/json"} | headers
    got, answer = post(site, json.dumps({"prompt": "p", **SHORT}).encode(), **asked)
    assert got == status, answer


def test_json_that_says_a_frame_twice_or_too_long_a_number(site: Running) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    refused(site, {"prompt": "p", "first_frame": picture, "input_reference": picture}, "input_reference")
    item = {"type": "image", "uri": picture, "role": "keyframe", "frame_index": -1}
    refused(site, {"prompt": "p", "conditions": [item], "last_frame": picture}, "last_frame")
    status, answer = post(site, b'{"prompt": "p", "seed": ' + b"9" * 6000 + b"}", Content_Type="application/json")
    assert status == 422 and "6,000 digits" in answer["error"]["message"] and "sys" not in answer["error"]["message"]
