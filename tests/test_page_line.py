"""The page when the line to its server is bad: proxies that answer in its place, answers that break off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from page_stub import PageRunner
from page_window import Window, drop, jobs, until
from serve_stub import Running, call, ended, running

# Before the page's own scripts; its pauses are short.
QUICK = "const later = setTimeout; window.setTimeout = (act, pause) => later(act, pause / 40);"
FETCH = """
const real = fetch;
let bad = true;
window.mend = () => (bad = false);
window.fetch = async (path, ...given) => bad && path.startsWith("PATH") ? ANSWER : real(path, ...given);
"""
STREAMS = """
window.streams = [];
window.EventSource = class extends EventSource {
  constructor(url) {
    super(window.streams.push(url) === 1 ? "/v1/videos/none/events" : url);
  }
};
"""
STATUS = """
const told = Object.getOwnPropertyDescriptor(XMLHttpRequest.prototype, "status").get;
Object.defineProperty(XMLHttpRequest.prototype, "status", { get() { return window.lie ?? told.call(this); } });
"""
BROKEN = "new Response(new ReadableStream({ start: (line) => line.error(new TypeError('broken off')) }))"


@pytest.fixture(scope="module")
def runner() -> PageRunner:
    return PageRunner()


@pytest.fixture(scope="module")
def site(tiny_all: Path, tmp_path_factory: pytest.TempPathFactory, runner: PageRunner) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("page") / "data", tiny_all, runner) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        _, job, _ = call(f"{made.url}/v1/videos", {"prompt": "an old one", "target": {"duration_seconds": 1}})
        ended(made.url, job["id"])
        yield made


@pytest.fixture
def visit(window: Window, site: Running) -> Iterator[Callable[[str], None]]:
    """Opens the page after a script of ours."""
    scripts: list[dict[str, Any]] = []

    def go(script: str) -> None:
        source = {"source": QUICK + script}
        scripts.append(window.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source))
        window.driver.get("about:blank")
        window.driver.get(site.url)

    yield go
    for script in scripts:
        window.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/ready", "new Response('<html>502</html>', {status: 502})"),
        ("/ready", "new Response('<html>503</html>', {status: 503})"),
        ("/ready", """new Response('{"error": {"message": "no room"}}', {status: 503})"""),
        ("/ready", BROKEN),
        ("/v1/models", "new Response('<html>sign in to this network</html>')"),
        ("/v1/models", "new Response('')"),
        ("/v1/models", BROKEN),
        ("/v1/videos", "new Response('', {status: 504})"),
    ],
)
def test_the_page_begins_and_goes_on(window: Window, visit: Callable[[str], None], path: str, answer: str) -> None:
    visit(FETCH.replace("PATH", path).replace("ANSWER", answer))
    if path == "/v1/videos":
        until(lambda: "does not answer" in window.text("#trouble"))
    else:
        until(lambda: window.text("#engine") == "No answer" and window.all("#past li"))
    window.js("mend()")
    until(lambda: window.text("#engine") == "Ready" and window.all("#past li"))


def test_a_stream_that_is_refused_is_opened_again(
    window: Window, visit: Callable[[str], None], site: Running, runner: PageRunner
) -> None:
    runner.go.clear()
    try:
        visit(STREAMS)
        until(lambda: window.text("#engine") == "Ready")
        window.type("#prompt", "hold on")
        window.type("#length", "1")
        job = window.made(site)
        until(lambda: len(window.js("return streams")) == 2)
        assert set(window.js("return streams")) == {f"/v1/videos/{job['id']}/events"}
    finally:
        runner.go.set()
    ended(site.url, job["id"])


@pytest.mark.parametrize(("status", "changes", "number"), [(504, False, 1), (502, True, 2), (429, False, 2)])
def test_what_may_have_been_taken_is_not_queued_twice(
    window: Window, visit: Callable[[str], None], site: Running, tmp_path: Path, status: int, changes: bool, number: int
) -> None:
    visit(STATUS)
    until(lambda: window.text("#engine") == "Ready")
    window.type("#prompt", f"said to be {status}")
    window.type("#length", "1")
    before = len(jobs(site))
    window.js("window.lie = arguments[0]", status)
    window.click("#send")
    until(lambda: f"answered {status}" in window.text("#form-error"))
    window.js("window.lie = null")
    if changes:
        Image.new("RGB", (128, 64)).save(tmp_path / "frame.png")
        drop(window, "#first-frame", tmp_path / "frame.png")
    window.click("#send")
    until(lambda: window.one("#send").get_attribute("aria-disabled") == "false")
    assert window.text("#form-error") == "" and len(jobs(site)) - before == number
