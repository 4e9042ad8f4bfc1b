"""Media that clients send: where they go, and what is refused while they stream in."""

from __future__ import annotations

import base64
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
    status, answer, _ = call(
        f"{site.url}/v1/videos", body, "POST", {k.replace("_", "-"): v for k, v in headers.items()}
    )
    return status, answer


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
