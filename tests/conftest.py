"""Shared fixtures: pinned threads, the released configs and index files, and the tiny checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

RELEASE = Path(__file__).resolve().parents[1].parent / "shared" / "release"

# Without a GPU the Triton kernels run in Triton's interpreter, on CPU tensors. It must be asked for before they are
# imported; tests that need it absent start a process of their own.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that puts a job into the background has Ctrl-C ignored, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread count for every test: a product's summation order, and with it the last bit, may depend on it.
torch.set_num_threads(2)


@pytest.fixture(scope="session")
def release() -> Path:
    """The released config, tokenizer and index files (no weights): `../shared/release` beside the repository."""
    if not RELEASE.is_dir():
        pytest.skip(f"the released config files are not at {RELEASE}")
    return RELEASE


@pytest.fixture(scope="session")
def tiny_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny `FL2VA/` and `Ref2VA/` partitions in the original layout. Read only: copy before changing."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "original", layout="original")


@pytest.fixture(scope="session")
def tiny_narrow(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_original` as `twinreel quantize` writes it, every block in e4m3. Read only: copy before changing."""
    from twinreel.weights.quantize import quantize

    target = tmp_path_factory.mktemp("tiny") / "narrow"
    quantize(tiny_original, target, 0, print)
    return target


@pytest.fixture(scope="session")
def tiny_diffusers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The values of `tiny_original` as a diffusers root. Read only: copy before changing."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "diffusers", layout="diffusers")


@pytest.fixture(scope="session")
def tiny_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny partition folder (original layout) that declares all three tasks. Read only: copy before changing."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "all", layout="single")


@pytest.fixture(scope="module")
def engine(tiny_all: Path):  # noqa: ANN201
    """An engine on `tiny_all`, which a module's tests share."""
    from twinreel import Engine, EngineConfig

    return Engine(EngineConfig(model=str(tiny_all), device="cpu", threads=2))


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory: pytest.TempPathFactory) -> bytes:  # noqa: ANN001
    """The file of a run of `interrupted.T2VA` that nothing disturbed."""
    from interrupted import T2VA

    path = tmp_path_factory.mktemp("whole") / "a.mp4"
    engine.render(T2VA, path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.json", "a.mp4"]
    return path.read_bytes()


@pytest.fixture
def some(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to stand in: `a.mp4`, `b.mp4` and their reports, from `a` and `same` in the module's `files`."""
    for name in ("a", "same"):
        for ending in (".mp4", ".json"):
            shutil.copy(files / f"{name}{ending}", tmp_path / f"{name.replace('same', 'b')}{ending}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def original(tiny_original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(tiny_original, tmp_path / "original")


@pytest.fixture
def diffusers(tiny_diffusers: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(tiny_diffusers, tmp_path / "diffusers")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Chromium for the tests of the server's page: a `page_window.Window`."""
    from page_window import Window, browser, missing_browser

    absent = missing_browser()
    if absent:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the page cannot be tested: {absent}")
        pytest.skip(f"the page is not tested: {absent}")
    driver = browser(tmp_path_factory.mktemp("profile"))
    driver.execute_cdp_cmd("Page.enable", {})
    yield Window(driver)
    driver.quit()
