"""Words of a command line that would be lost: refused by name, with the code of a wrong request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinreel import cli
from twinreel.errors import RequestError
from twinreel.flag_words import BESIDE, INSTEAD, check_words, flags_of
from twinreel.flags import Generate
from twinreel.tool_flags import Validate

LONG = "x" * 5000


@pytest.mark.parametrize(
    ("words", "field", "reason"),
    [
        ("plan hi --seed 1 --seed 2", "seed", "given twice"),
        ("plan hi --seed=1 --seed 1", "seed", "given twice"),
        ("plan hi --short_edge 64 --short-edge 64", "short_edge", "given twice"),
        ("generate hi -o a.mp4 --output b.mp4", "output", "given twice"),
        ("generate hi -oa.mp4 -ob.mp4", "output", "given twice"),
        ("doctor --quiet -q", "quiet", "given twice"),
        ("validate --steps 2 --only a --only b --steps 3", "steps", "given twice"),
        ("serve --port 1 --names a --names b --port 2", "port", "given twice"),
        ("decode a.latents.safetensors --crf 1 --crf 1", "crf", "given twice"),
        ("plan hi --model ''", "model", "is empty"),
        ("plan --request=", "request", "is empty"),
        ("plan hi --ref ''", "ref", "is empty"),
        ("generate hi -o ''", "output", "is empty"),
        ("generate hi --trace ''", "trace", "is empty"),
        ("doctor --device ''", "device", "is empty"),
        ("verify ''", "verify", "is empty"),
        ("verify --json ''", "verify", "is empty"),
        ("compare a ''", "compare", "is empty"),
        ("decode ''", "decode", "is empty"),
        ("serve --data ''", "data", "is empty"),
        ("generate hi --trace-every-step", "trace_every_step", "means nothing without --trace"),
        ("generate hi --server-key-file k", "server_key_file", "means nothing without --server"),
        ("validate --against diffusers --test policy=reuse", "test", "means nothing beside --against"),
        ("validate --pareto a.svg --matrix", "matrix", "means nothing beside --pareto"),
        (f"verify {LONG}", "path", "longer than any name"),
        (f"compare a {LONG}", "b", "longer than any name"),
        (f"compare a b --page {LONG}", "page", "longer than any name"),
        (f"plan --request {LONG}", "request", "longer than any name"),
        (f"generate hi --trace {LONG}", "trace", "longer than any name"),
        (f"decode {LONG}", "latents", "longer than any name"),
        (f"validate --pareto {LONG}", "pareto", "longer than any name"),
        (f"serve --data {LONG}", "data", "longer than any name"),
        (f"plan hi --size {'9' * 5000}x32", "size", "write WIDTHxHEIGHT"),
    ],
)
def test_what_would_be_lost_is_refused(words: str, field: str, reason: str):
    given = [word.strip("'") for word in words.split()]
    command = cli.understand(given)
    with pytest.raises(RequestError, match=reason) as caught:
        check_words(given, command)
        command.request.build()
    assert caught.value.field == field and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "hi", "--ref", "image:a", "--ref", "image:b", "--component", "a=b", "--component", "c=d"],
        ["generate", "--prompt", "a --seed 5 b --seed 6 -o c", "--seed", "5"],
        ["generate", "--seed", "5", "--", "--seed"],
        ["generate", "hi", "--trace", "t", "--trace-every-step"],
        ["validate", "--only", "a", "--only", "b", "--json"],
        ["compare", "a", "a", "--no-ssim", "-o", "c.json"],
    ],
    ids=" ".join,
)
def test_what_says_what_it_means_passes(words: list[str]):
    check_words(words, cli.understand(words))


def test_every_flag_that_stands_beside_another_exists():
    known = {item.name for command in (Generate(), Validate()) for item, _ in flags_of(command)}
    assert BESIDE.keys() | set(BESIDE.values()) | INSTEAD.keys() | set(sum(INSTEAD.values(), ())) <= known


@pytest.mark.parametrize("words", [["plan", "hi", "--seed", "1", "--seed", "2"], ["verify", ""]], ids=" ".join)
def test_the_refusal_is_three_lines_and_one_of_json(words: list[str], capsys):
    assert cli.main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["exit"] == 2 and len(err.splitlines()) == 3


def test_a_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (
        ["plan", "hi"],
        ["generate", "hi", "-o", "a.mp4"],
        ["verify", "w"],
        ["doctor"],
        ["compare", "a", "b"],
    ):
        assert cli.main(words) == 3
        assert "the current folder is gone" in capsys.readouterr().err
