"""For the tests of the page: Chromium without a window, and words for what a person does with it."""

from __future__ import annotations

import base64
import os
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

import serve_stub
from serve_stub import Running, call

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --force-color-profile=srgb"
PLAYABLE = "return document.querySelector('#viewer video')?.readyState >= 1"
FAINT = (Path(__file__).parent / "page_contrast.js").read_text(encoding="utf-8")
OUTSIDE = """
if (document.documentElement.scrollWidth <= innerWidth) return null;
const wide = (part) => part.getBoundingClientRect().right > innerWidth || part.scrollWidth > part.clientWidth + 1;
return [...document.querySelectorAll('body *')].filter(wide).map((part) => `${part.tagName} #${part.id}`)
"""
NAMED = {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "radio", "slider"}
NAMED |= {"progressbar", "progressIndicator", "img", "image"}
DROP = """
const [place, names] = arguments, data = new DataTransfer();
for (const name of names) {
  const bytes = Uint8Array.from(atob(name[1]), (c) => c.charCodeAt(0));
  data.items.add(new File([bytes], name[0], {type: ''}));
}
for (const type of ['dragover', 'drop']) {
  place.dispatchEvent(new DragEvent(type, {bubbles: true, cancelable: true, dataTransfer: data}));
}
"""


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of `condition()`; elements that are drawn anew meanwhile are looked for again."""
    from selenium.common.exceptions import JavascriptException, StaleElementReferenceException

    def look() -> Any:
        try:
            return condition()
        except (StaleElementReferenceException, JavascriptException):
            return None

    return serve_stub.until(look, seconds)


def missing_browser() -> str | None:
    """Why the page cannot be tested here, None when it can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    absent = [path for path in (CHROMIUM, DRIVER) if not os.access(path, os.X_OK)]
    return f"{', '.join(absent)} not found; apt-get install chromium chromium-driver" if absent else None


def browser(folder: Path, width: int = 1280, height: int = 900) -> Chrome:
    """Chromium without a window, with a profile of its own in `folder`."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options, Service(DRIVER))


class Window:
    """The browser, with words for what a person does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def one(self, css: str) -> Any:
        return until(lambda: self.all(css), 10)[0]

    def text(self, css: str) -> str:
        return str(self.js("return document.querySelector(arguments[0]).textContent", css)).strip()

    def js(self, code: str, *given: Any) -> Any:
        return self.driver.execute_script(code, *given)

    def click(self, css: str | Any) -> None:
        element = self.one(css) if isinstance(css, str) else css
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        element.click()

    def type(self, css: str, words: str) -> None:
        self.js("const box = arguments[0]; box.value = ''; box.focus()", self.one(css))
        self.one(css).send_keys(words)

    def choose(self, css: str, value: str) -> None:
        self.js(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))",
            self.one(css),
            value,
        )

    def files(self, slot: str, *paths: Path) -> None:
        self.one(f"[data-slot={slot}] input[type=file]").send_keys("\n".join(map(str, paths)))

    def open(self, site: Running, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{site.url}/{fragment}")
        until(lambda: self.text("#engine") == "Ready", 10)
        self.js("sessionStorage.clear()")
        self.click("#start-over")

    def size(self, width: int, height: int = 844) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def prefer(self, **features: str) -> None:
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})

    def made(self, site: Running) -> dict[str, Any]:
        """Press the button; the job that the page then shows."""
        before = {job["id"] for job in jobs(site)}
        self.click("#send")
        until(
            lambda: {job["id"] for job in jobs(site)} - before or self.all(".invalid") or self.text("#form-error"), 10
        )
        new = [job for job in jobs(site) if job["id"] not in before]
        assert new, self.text("#form-error") or [place.text for place in self.all(".error") if place.text]
        return new[-1]


def jobs(site: Running) -> list[dict[str, Any]]:
    return list(call(f"{site.url}/v1/videos?limit=100")[1]["data"])


def colour_of(site: Running, url: str) -> str:
    """The strongest colour of a medium of a request."""
    data = call(f"{site.url}{url}")[1]
    path = Path(site.service.folder) / "looked-at.png"
    path.write_bytes(data)
    red, green, blue = Image.open(path).convert("RGB").resize((1, 1)).getpixel((0, 0))
    return max((red, "red"), (green, "green"), (blue, "blue"))[1]


def button(window: Window, words: str) -> Any:
    return until(lambda: [item for item in window.all("#viewer button") if item.text == words])[0]


def names(window: Window) -> list[tuple[str, str]]:
    rows = window.all("#references li")
    return [
        (row.find_element("css selector", ".label").text, row.find_element("css selector", ".name").text)
        for row in rows
    ]


def drop(window: Window, css: str, *paths: Path) -> None:
    window.js(DROP, window.one(css), [[path.name, base64.b64encode(path.read_bytes()).decode()] for path in paths])


def write_sound(path: Path) -> None:
    with wave.open(str(path), "wb") as sound:
        sound.setparams((1, 2, 32000, 0, "NONE", ""))
        sound.writeframes(bytes(64000 * 2))


def settled(window: Window, code: str) -> Any:
    """What `code` finds wrong; colours and sizes get a moment to arrive, so that what stays wrong is wrong."""
    found: Any = window.js(code)
    for _ in range(10):
        if not found:
            return found
        time.sleep(0.1)
        found = window.js(code)
    return found


def look_over(window: Window) -> None:
    """Nothing sticks out of a phone, all text can be read, everything that can be used has a name."""
    for width in (320, 390, 1280):
        window.size(width)
        assert not settled(window, OUTSIDE), f"at {width} the page can be pushed sideways: {window.js(OUTSIDE)}"
        if width == 320:
            continue
        for scheme in ("light", "dark"):
            window.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
            assert not settled(window, FAINT), (width, scheme)
    tree = window.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    for node in tree:
        if not node.get("ignored") and node.get("role", {}).get("value") in NAMED:
            assert node.get("name", {}).get("value"), node
