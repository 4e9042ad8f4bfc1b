"""Tokenizer folders: what is damaged is refused by name, and never with another error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_spec
from tiny_tokenizer import write_tokenizer
from twinreel.errors import CheckpointError
from twinreel.weights.tokenizer import load_tokenizer

CONFIG = "tokenizer_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def vocab(**values: Any) -> Callable[[Path], object]:
    return lambda folder: merge(folder / "vocab.json", values)


def config(**values: Any) -> Callable[[Path], object]:
    return lambda folder: merge(folder / CONFIG, values)


def merge(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut_merges(folder: Path) -> None:
    path = folder / "merges.txt"
    path.write_text(path.read_text(encoding="utf-8")[:-7], encoding="utf-8")


def whole(**model: Any) -> Callable[[Path], object]:
    """A tokenizer.json beside the others, with `model` in place of what they say."""

    def write(folder: Path) -> None:
        words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[:-1]
        data = {"version": "1.0", "model": {"type": "BPE", "vocab": words, "merges": lines} | model}
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (text("vocab.json", "[]"), "vocab.json: holds list"),
        (text("vocab.json", "{}"), "vocab: a number of its own for each token"),
        (text("vocab.json", b"\xff"), "vocab.json: is not UTF-8 text"),
        (text("vocab.json", "[" * 100_000), "vocab.json: is nested too deeply"),
        *((vocab(a=bad), "vocab: a number of its own") for bad in (None, "5", -1, 1.5, [], 5, True)),
        (text("merges.txt", ""), "0 merges for 14 tokens of more than one byte"),
        (text("merges.txt", "{}"), r"merges: two tokens are needed, got '\{\}'"),
        (text("merges.txt", "x yy\n"), "merges: 'x yy' is no pair of known tokens"),
        (text("merges.txt", b"\xff\n"), "is not UTF-8 text"),
        (cut_merges, "merges.txt"),
        (lambda folder: (folder / "merges.txt").unlink(), "merges.txt: cannot be read"),
        (text(CONFIG, "[]"), "tokenizer_config.json: holds list"),
        (text(CONFIG, "{}"), "the tokenizer lacks <d>, </d>"),
        (text("added_tokens.json", "[]"), "added_tokens.json: holds list"),
        (text("special_tokens_map.json", "5"), "special_tokens_map.json: holds int"),
        *((config(additional_special_tokens=bad), "additional_special_tokens: a list") for bad in (None, 5, "x", [5])),
        *((config(added_tokens_decoder=bad), "added_tokens_decoder") for bad in ([], {"x": {}}, {"9": 5}, {"9": {}})),
        (config(added_tokens_decoder={"9": {"content": "x", "lstrip": 1}}), "lstrip: true or false is needed"),
        (config(added_tokens_decoder={"295": {"content": "a"}}), "a is 64 in the vocabulary and 295 in"),
        (config(add_prefix_space=True), "add_prefix_space: only False or None is supported, got True"),
        (config(vocab="elsewhere"), "vocab: is read from its own file"),
        (config(eos_token=5), "the tokenizer cannot be read"),
        (config(padding_side=5), "the tokenizer cannot be read"),
        (whole(merges=None), "merges: a list is needed, got None"),
        (whole(merges=[]), "0 merges for 14 tokens"),
        (whole(merges=[["a"]]), "merges: two tokens are needed"),
        (whole(vocab=[]), "model.vocab: an object is needed"),
        (whole(type="Unigram"), "model.type: only 'BPE' is supported"),
    ],
)
def test_damaged_files(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder, tiny_spec().text)


@pytest.mark.parametrize(
    "change", [config(model_max_length="x"), config(chat_template="{{ x }}"), config(errors="strict"), whole()]
)
def test_what_makes_no_difference(folder: Path, change: Callable[[Path], object]) -> None:
    prompt = "The second <d>é 中</d> <|im_end|>"
    before = load_tokenizer(folder, tiny_spec().text).encode(prompt)
    change(folder)
    assert load_tokenizer(folder, tiny_spec().text).encode(prompt) == before
