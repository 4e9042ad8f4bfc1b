"""What an operator may choose: every value that is unsafe or cannot work is refused before a port is opened."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from twinreel import ConfigError
from twinreel.cli import main
from twinreel.serve.options import NUMBERS, ServeOptions, check_options, is_host
from twinreel.serve.warm import check_warm, warm_request
from twinreel.spec import Spec
from twinreel.weights import locate, read_spec


def test_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-key-file"):
        check_options(ServeOptions(host="0.0.0.0"))
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(ConfigError, match="16 or more .*; make one with: python -c .*token_urlsafe"):
        check_options(ServeOptions(api_key_file=tmp_path / "short"))
    with pytest.raises(ConfigError, match="cannot read"):
        check_options(ServeOptions(api_key_file=tmp_path / "none"))
    (tmp_path / "key").write_text("a good key of some length\nmore\n")
    assert check_options(ServeOptions(host="0.0.0.0", api_key_file=tmp_path / "key")) == "a good key of some length"
    assert check_options(ServeOptions()) is None


def test_every_number_has_a_range() -> None:
    numbers = {item.name for item in fields(ServeOptions) if type(item.default) in (int, float)}
    assert set(NUMBERS) == numbers
    for name, (low, high) in NUMBERS.items():
        kind = {type(getattr(ServeOptions(), name)), type(low)}
        assert kind == {type(low)} and low <= getattr(ServeOptions(), name) <= high, name


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    low, high = NUMBERS[name]
    wrong: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.5, high + 1, 10**400, "5", None, True, 10**5000]
    wrong += [2.5] if isinstance(low, int) else []
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: got .*; give .* from"):
            check_options(ServeOptions(**{name: value}))
    for value in (low, high):
        check_options(ServeOptions(**{name: value}))


@pytest.mark.parametrize(
    "name", ["a b", "*", "*.example.org", "", " ", "http://x", "x:80", "a/b", "é.org", "-a", "a..b"]
)
def test_host_names(name: str) -> None:
    for field in ("names", "remote_hosts"):
        with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')}: got"):
            check_options(ServeOptions(**{field: (name,)}))


def test_host_names_that_are_taken() -> None:
    good = ("video.example.org", "localhost", "gpu_1", "10.0.0.5", "::1", "[::1]", "xn--bcher-kva.example", "a.org.")
    assert all(map(is_host, good))
    check_options(ServeOptions(names=good, remote_hosts=("example.org", ".example.org")))


@pytest.mark.parametrize(
    ("text", "words"),
    [("x", "TASK@"), ("t2va@96x64", "TASK@"), ("t2va@96x64x1e3", "TASK@"), ("t2va@\u0661x64x1", "TASK@"),
     ("t2va@" + "9" * 300, "TASK@"), ("t2va@100x64x1", "multiple"), ("ref2va@0x0x1", "size"), ("fl2va@96x64x99", "limit"),
     ("t2va@99999x99999x1", "size")],
)  # fmt: skip
def test_warm_ups_that_no_engine_could_run(text: str, words: str, tiny_original: Path) -> None:
    spec = read_spec(locate(tiny_original))
    with pytest.raises(ConfigError, match="^--warm: ") as caught:
        check_warm((text,), spec)
    assert words in str(caught.value)


def test_warm_ups() -> None:
    texts = ("t2va@1344x768x5", "fl2va@768x768x4.5", "ref2va@1344x768x15")
    check_warm(texts, Spec())
    assert [warm_request(text).resolved_task for text in texts] == ["t2va", "fl2va", "ref2va"]
    assert warm_request(texts[1]).keyframes and warm_request(texts[1]).duration == 4.5


@pytest.mark.parametrize(
    "flags",
    [("--warm", "x"), ("--megapixels", "nan"), ("--idle-seconds", "inf"), ("--keep-days", "-1"), ("--names", "a b"),
     ("--remote-hosts", "*"), ("--cache-mib", "-1"), ("--retries", "-1"), ("--port", "70000")],
)  # fmt: skip
def test_the_command_line_says_no(flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 at once, and no data folder."""
    assert main(["serve", "--data", str(tmp_path / "d"), *flags]) == 3
    assert flags[0] in capsys.readouterr().err and not (tmp_path / "d").exists()
