"""The page in Chromium, end to end over HTTP, with a runner that makes a short real video without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from page_stub import FRAMES, PageRunner
from page_window import (
    PLAYABLE,
    Window,
    button,
    colour_of,
    drop,
    jobs,
    look_over,
    names,
    until,
    write_sound,
)
from serve_stub import Running, call, ended, running
from twinreel.serve import app as server_app

PAGE = Path(server_app.__file__).with_name("page")
KEY = "a key of sixteen and more"


@pytest.fixture(scope="module")
def runner() -> PageRunner:
    return PageRunner()


@pytest.fixture(scope="module")
def site(tiny_all: Path, tmp_path_factory: pytest.TempPathFactory, runner: PageRunner) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("page") / "data", tiny_all, runner) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_held(runner: PageRunner) -> Iterator[None]:
    yield
    runner.go.set()


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Three pictures of one colour: red, green, blue."""
    made = []
    for name, colour in {"red": (210, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 200)}.items():
        made.append(tmp_path / f"{name}.png")
        Image.new("RGB", (128, 64), colour).save(made[-1])
    return made


def test_files_are_small_and_ask_nobody_else() -> None:
    files = [path for path in PAGE.iterdir() if path.is_file()]
    assert {"index.html", "style.css", "app.js"} <= {path.name for path in files}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path.name
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.\w", text), path.name
        assert max(map(len, text.splitlines())) <= 250, path.name
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page), (
        "the content security policy forbids"
    )


def test_package_has_the_page() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["twinreel"]
    root = PAGE.parents[1]
    packed = {path for pattern in patterns for path in root.glob(pattern)}
    assert {path for path in PAGE.rglob("*") if path.is_file()} <= packed


def test_from_a_sentence_to_a_video(window: Window, site: Running, runner: PageRunner) -> None:
    runner.go.clear()
    window.open(site)
    window.type("#prompt", "hold on, rain falls")
    window.click("[data-section=overall_soundscape]")
    window.one("#prompt").send_keys("drops on tin")
    window.click(window.one("#shapes input[value='1:1'] + span"))
    window.type("#length", "1")
    window.type("#seed", "9007199254740993")  # more than a number of JavaScript holds
    window.type("#steps", "21")
    window.choose("#policy", "forecast:fast")
    assert "21 steps are 20 model calls; forecast:fast makes about 9 of them" in window.text("#cost")
    job = window.made(site)
    assert job["prompt"] == "integrated_multimodal_description: hold on, rain falls\noverall_soundscape: drops on tin"
    told = (job["size"], job["seed"], job["steps"], job["policy"], job["task"])
    assert told == ("64x64", 9007199254740993, 21, "forecast:fast", "t2va")

    until(lambda: window.text("#viewer .doing") == "Step 4 of 6")
    assert window.text("#viewer-title") == "hold on, rain falls"
    assert window.text("#waiting .doing") == "Step 4 of 6" and window.text("#queue-count") == "1"
    until(lambda: window.js("return document.querySelector('#viewer img.preview')?.naturalWidth") == 14)
    assert window.js("return document.querySelector('#viewer progress').value") > 30
    assert "%" in window.driver.title
    runner.go.set()
    until(lambda: window.js(PLAYABLE))
    assert abs(window.js("return document.querySelector('#viewer video').duration") - FRAMES / 24) < 0.1
    assert not window.all("#waiting li") and window.driver.title == "twinreel"
    links = {link.text.split()[0]: link.get_attribute("href") for link in window.all("#viewer .downloads a")}
    assert set(links) == {"Video", "Sound", "Report", "Frames"}
    for name, start in {"Video": b"ftyp", "Sound": b"WAVE"}.items():
        status, data, headers = call(links[name])
        assert status == 200 and start in data[:16] and "attachment" in headers["content-disposition"]
    figures = window.js("return [...document.querySelectorAll('#viewer dd')].map((place) => place.textContent)")
    assert {"64 × 64, 1.62 s, 39 frames", "9007199254740993", "forecast:fast"} <= set(figures)
    window.click("#viewer .report summary")
    until(lambda: "denoise   1.25 s" in window.text("#viewer .report pre"))
    assert window.all(f"#past [data-id='{job['id']}'] a[aria-current]")
    window.driver.get(f"{site.url}/#v/{job['id']}")
    window.driver.refresh()  # an address that can be kept
    until(lambda: window.all("#viewer video"))


def test_again_and_onwards(window: Window, site: Running) -> None:
    window.open(site)
    window.type("#prompt", "a disc rolls to the right")
    window.type("#length", "1")
    job = window.made(site)
    ended(site.url, job["id"])
    until(lambda: window.all("#viewer video"))
    window.click(button(window, "Again with another seed"))
    new = until(
        lambda: next((item for item in jobs(site) if item["prompt"] == job["prompt"] and item["id"] != job["id"]), None)
    )
    assert new["seed"] != job["seed"] and new["request"]["target"] == job["request"]["target"]
    ended(site.url, new["id"])
    until(lambda: new["id"] in window.driver.current_url and window.all("#viewer video"))
    window.click(button(window, "Use last frame as first"))
    until(lambda: window.all("#first-frame img"))
    assert window.text("#task") == "From a first frame on"
    window.type("#prompt", "it rolls on")
    window.type("#length", "1")
    made = window.made(site)
    assert made["task"] == "fl2va" and colour_of(site, made["inputs"][0]["url"]) == "blue", (
        "only the last frame is blue"
    )
    ended(site.url, made["id"])
    until(lambda: window.all("#viewer video"))
    window.click(button(window, "Edit a copy"))
    until(lambda: window.one("#prompt").get_attribute("value") == "it rolls on" and window.all("#first-frame img"))
    assert window.one("#seed").get_attribute("value") == str(made["seed"])


def test_references_are_numbered_named_and_reordered(window: Window, site: Running, pictures: list[Path]) -> None:
    from selenium.webdriver import ActionChains

    window.open(site)
    window.files("references", *pictures)
    want = [("<Picture 1>", "red.png"), ("<Picture 2>", "green.png"), ("<Picture 3>", "blue.png")]
    assert names(window) == want and window.text("#task") == "With 3 pictures as references"
    grip = window.one("#references li:nth-child(3) .grip")
    grip.send_keys("\ue013")  # the arrow up
    assert [name for _, name in names(window)] == ["red.png", "blue.png", "green.png"]
    assert window.js("return document.activeElement.closest('li').innerText").count("blue.png") == 1
    assert "Picture 2, place 2 of 3" in until(lambda: window.text("#announcer"))
    grip, target = window.one("#references li:nth-child(1) .grip"), window.one("#references li:nth-child(3)")
    ActionChains(window.driver, 30).click_and_hold(grip).move_to_element(target).release().perform()
    assert [name for _, name in names(window)] == ["blue.png", "green.png", "red.png"]

    window.type("#prompt", "the thing of")
    assert [chip.text for chip in window.all("#unnamed-labels button")] == [f"<Picture {i}>" for i in (1, 2, 3)]
    window.click("#references li:nth-child(2) .label")
    assert window.one("#prompt").get_attribute("value") == "the thing of <Picture 2>"
    assert len(window.all("#unnamed-labels button")) == 2
    window.type("#length", "1")
    job = window.made(site)
    assert [item["label"] for item in job["inputs"]] == ["Picture 1", "Picture 2", "Picture 3"]
    assert [colour_of(site, item["url"]) for item in job["inputs"]] == ["blue", "green", "red"]
    ended(site.url, job["id"])
    window.click("#references li:nth-child(1) .remove")
    assert [label for label, _ in names(window)] == ["<Picture 1>", "<Picture 2>"]
    assert window.js("return document.activeElement.className") == "remove", "the focus stays in the list"


def test_what_is_dropped_makes_the_task(window: Window, site: Running, pictures: list[Path], tmp_path: Path) -> None:
    window.open(site)
    assert window.text("#task") == "From text alone"
    drop(window, "#last-frame", pictures[0])
    assert window.text("#task") == "Towards a last frame"
    drop(window, "h1", pictures[1])  # anywhere: where there is room
    assert window.text("#task") == "From the first frame to the last"
    assert window.one("#first-frame img").get_attribute("alt") == "green.png"
    window.click("#to-references")
    assert names(window) == [("<Picture 1>", "green.png"), ("<Picture 2>", "red.png")]
    voice = tmp_path / "voice.wav"
    write_sound(voice)
    drop(window, "#reference-slot", voice)
    assert window.text("#task") == "With 2 pictures and 1 sound as references"
    assert names(window)[-1] == ("<Audio 1>", "voice.wav") and window.one("#sound-length").is_displayed()
    assert not window.one("#to-frames").is_displayed()
    words = tmp_path / "words.txt"
    words.write_text("no medium")
    drop(window, "#reference-slot", words)
    assert "words.txt is no picture, clip or sound" in window.text("#media-error")


def test_errors_stand_at_their_fields(window: Window, site: Running, tmp_path: Path, pictures: list[Path]) -> None:
    window.open(site)
    window.click("#send")
    assert "Is empty" in window.text("#prompt-error")
    assert window.js("return document.activeElement.id") == "prompt"
    window.one("#prompt").send_keys("a")
    assert window.text("#prompt-error") == "" and not window.all("[aria-invalid]")
    for css, value, place, words in (
        ("#length", "99", "length", "the nearest is 6"),
        ("#steps", "1", "steps", "2"),
        ("#variants", "99", "variants", "from 1 to 8"),
        ("#seed", "x", "seed", "whole number"),
        ("#seed", str(2**63), "seed", "from 0 to 9223372036854775807"),
    ):
        old = window.one(css).get_attribute("value")
        window.type(css, value)
        window.click("#send")
        until(lambda place=place, words=words: words in window.text(f"#{place}-error"), 5)
        assert window.js("return document.activeElement.id") == place
        assert window.one(css).get_attribute("aria-invalid") == "true"
        assert f"{place}-error" in window.one(css).get_attribute("aria-describedby")
        window.type(css, old)
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(pictures[0].read_bytes()[:60])
    window.files("references", pictures[0], damaged)
    window.click("#send")
    until(lambda: window.all("#references li:nth-child(2).invalid"), 20)
    assert window.text("#references li:nth-child(2) .error") and not window.text("#references li:nth-child(1) .error")
    assert not [job for job in jobs(site) if job["prompt"] == "a"], "nothing was queued"


def test_cancel_and_failure(window: Window, site: Running, runner: PageRunner) -> None:
    runner.go.clear()
    window.open(site)
    window.type("#prompt", "hold, blind")
    window.type("#length", "1")
    window.type("#variants", "2")
    job = window.made(site)
    until(lambda: len(window.all("#waiting li")) == 2)
    until(lambda: "No preview" in window.text("#viewer .why"))
    assert len(window.all("#viewer [aria-pressed]")) == 2
    window.click("#waiting li:nth-child(2) .stop")
    until(lambda: len(window.all("#waiting li")) == 1)
    window.click(button(window, "Cancel"))
    until(lambda: window.text("#viewer .screen") == "Cancelled")
    assert {item["status"] for item in jobs(site) if item["group"] == job["group"]} == {"cancelled"}
    runner.go.set()
    window.type("#variants", "1")
    window.type("#prompt", "this will fail")
    window.made(site)
    until(lambda: window.all("#viewer .error") and "step 3: not finite" in window.text("#viewer .error"))


def test_history_is_filtered_and_removed(window: Window, site: Running) -> None:
    for i in range(13):
        call(f"{site.url}/v1/videos", {"prompt": f"heron {i}", "target": {"duration_seconds": 1}})
    until(lambda: not call(f"{site.url}/v1/videos?status=queued")[1]["data"], 20)
    until(lambda: not call(f"{site.url}/v1/videos?status=in_progress")[1]["data"], 20)
    window.open(site)
    until(lambda: len(window.all("#past li")) == 12)
    window.type("#words", "heron")
    until(lambda: window.text("#history-count") == "12 or more videos")
    oldest = window.all("#past li")[-1].get_attribute("data-id")
    call(f"{site.url}/v1/videos/{oldest}", method="DELETE")  # by somebody else: what comes after it is still found
    window.click("#older")
    until(lambda: len(window.all("#past li")) == 12 and not window.all(f"#past [data-id='{oldest}']"))
    window.type("#words", "heron 7")
    until(lambda: len(window.all("#past li")) == 1)
    window.click("#past a")
    until(lambda: window.all("#viewer video"))
    window.click(button(window, "Remove"))
    window.click(button(window, "Remove for good"))
    until(
        lambda: window.text("#past-empty") == "Nothing fits these filters." and not window.one("#viewer").is_displayed()
    )
    assert not call(f"{site.url}/v1/videos?q=heron+7")[1]["data"]
    window.type("#words", "")
    window.choose("#by-status", "failed")
    until(lambda: {item.text for item in window.all("#past .still")} == {"Failed"})
    window.choose("#by-status", "")
    window.choose("#by-task", "ref2va")
    until(lambda: window.all("#past li") and all("References" in item.text for item in window.all("#past a")))


def test_readable_everywhere(window: Window, site: Running, runner: PageRunner, pictures: list[Path]) -> None:
    runner.go.clear()
    try:
        window.open(site)
        window.js("document.querySelectorAll('details').forEach((part) => part.open = true)")
        look_over(window)
        window.files("references", *pictures)
        window.type("#prompt", "hold <Picture 1>")
        window.type("#length", "99")
        window.click("#send")
        until(lambda: window.text("#length-error"))
        look_over(window)
        window.prefer(prefers_reduced_motion="reduce")
        window.type("#length", "1")
        window.type("#seed", str(2**63 - 1))
        window.made(site)
        until(lambda: window.all("#viewer canvas.preview"))  # a still one
        assert window.js("return document.getAnimations().length") == 0
        look_over(window)
    finally:
        window.prefer()
        runner.go.set()
        window.size(1280, 900)
    until(lambda: window.all("#viewer video"))
    window.js("document.querySelectorAll('details').forEach((part) => part.open = true)")
    look_over(window)
    window.size(1280, 900)
    window.click("#theme")
    assert window.js("return getComputedStyle(document.documentElement).colorScheme") == "light"
    window.click("#theme")
    assert window.js("return getComputedStyle(document.documentElement).colorScheme") == "dark"
    window.click("#theme")


def test_keyboard_alone(window: Window, site: Running) -> None:
    from selenium.webdriver import ActionChains, Keys

    window.open(site)
    window.driver.get(f"{site.url}/?again")
    until(lambda: window.text("#engine") == "Ready")
    press = lambda *keys: ActionChains(window.driver, 10).send_keys(*keys).perform()  # noqa: E731
    press(Keys.TAB)
    assert window.js("return document.activeElement.textContent") == "Skip to the prompt"
    press(Keys.ENTER)
    until(lambda: window.js("return document.activeElement.id") == "prompt")
    before = len(jobs(site))
    press("a gull cries")
    ActionChains(window.driver, 10).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    until(lambda: len(jobs(site)) == before + 1)
    until(lambda: "Done: a gull cries" in window.text("#announcer"))


def test_key_and_lost_server(window: Window, tiny_all: Path, tmp_path: Path) -> None:
    secret = tmp_path / "key.txt"
    secret.write_text(f"{KEY}\n")
    with running(tmp_path / "data", tiny_all, PageRunner(), api_key_file=secret) as locked:
        window.driver.get(locked.url)
        until(lambda: window.one("#key-dialog").get_attribute("open") is not None)
        assert window.js("return document.activeElement.id") == "key"
        window.type("#key", "not it")
        window.click("#key-form [type=submit]")
        until(lambda: window.text("#key-error") == "That is not the key.")
        window.type("#key", KEY)
        window.click("#key-form [type=submit]")
        until(lambda: window.text("#engine") == "Ready")
        assert KEY not in window.js("return document.cookie + JSON.stringify([{...localStorage}, {...sessionStorage}])")
        window.type("#prompt", "behind the door")
        window.type("#length", "1")
        window.click("#send")
        until(lambda: window.js(PLAYABLE))
        window.click("#sign-out")
        until(lambda: window.one("#key-dialog").get_attribute("open") is not None)
        window.click("#key-later")
        until(lambda: window.text("#engine") == "Locked" and window.text("#sign-out") == "Sign in")
        window.click("#sign-out")
        window.type("#key", KEY)
        window.click("#key-form [type=submit]")
        until(lambda: window.text("#engine") == "Ready")
        window.type("#prompt", "into nothing")
    window.click("#send")
    until(lambda: "does not answer" in window.text("#form-error"))
    assert window.one("#prompt").get_attribute("value") == "into nothing"
    window.driver.get_log("browser")  # what failed here was meant to


def test_nothing_was_refused_or_fetched_elsewhere(window: Window, site: Running) -> None:
    window.open(site)
    assert window.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": "1"})
    asked = window.js("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked and all(name.startswith((site.url, "blob:", "data:")) for name in asked)
    said = [entry for entry in window.driver.get_log("browser") if "422" not in entry["message"]]
    assert not said, said
