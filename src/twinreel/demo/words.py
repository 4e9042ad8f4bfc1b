"""The bundled model's tokenizer: bytes, the world's words whole, then the released special tokens.

A word is built letter by letter from its first mark (a space, an underscore, `<`), so that no merge can begin inside
another word: every word of the captions is one token, and any other text falls back to pieces and bytes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from ..spec import PROJECT_TOKENS
from .captions import SECTIONS, WORDS
from .tiny_tokenizer import ADDED, SPECIAL, byte_letters

SPACE = "Ġ"  # how byte-level vocabularies spell a leading space
PLAIN = ("an", "the", "from", "starting", "ending", "nothing")  # words that open a caption


def _pieces() -> list[str]:
    """What is to become one token, in the order in which merges may be applied."""
    parts = [part for section in SECTIONS for part in section.split("_")]
    marked = [f"_{part}" for part in parts[1:]] + ["<Picture", "<Audio", "<Video", ">:"] + ["Picture", "Audio", "Video"]
    spaced = [f"{SPACE}{word}" for word in WORDS if word.isalpha() and "_" not in word] + [f"{SPACE}<", f"{SPACE}N"]
    opening = [section.partition("_")[0] for section in SECTIONS]
    return [*marked, *spaced, *opening, *PLAIN]


@lru_cache
def merges() -> tuple[tuple[str, str], ...]:
    """Byte-pair merges in order of rank."""
    found: dict[tuple[str, str], None] = {}
    for piece in _pieces():
        for end in range(1, len(piece)):
            found.setdefault((piece[:end], piece[end]))
    return tuple(found)


@lru_cache
def token_ids() -> dict[str, int]:
    """Every token's id: bytes, merged pieces, Qwen's special tokens, the project's."""
    tokens = [*byte_letters(), *dict.fromkeys(a + b for a, b in merges()), *SPECIAL, *ADDED, *PROJECT_TOKENS]
    assert len(tokens) == len(set(tokens))
    return {token: number for number, token in enumerate(tokens)}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write vocab.json, merges.txt and tokenizer_config.json into `folder`; returns every token's id."""
    ids = token_ids()
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[token]): {"content": token, **marks, "special": token in SPECIAL} for token in SPECIAL + ADDED
        },
        "additional_special_tokens": [*SPECIAL[1:], *PROJECT_TOKENS],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    special = {*SPECIAL, *ADDED, *PROJECT_TOKENS}
    words = {token: number for token, number in ids.items() if token not in special}
    (folder / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges()) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return ids
