"""The bundled model's tokenizer: bytes, the world's words whole, then the released special tokens.

A word is built letter by letter from its first mark (a space, an underscore, `<`), so that no merge can begin inside
another word: every word of the captions is one token, and any other text falls back to pieces and bytes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ..spec import PROJECT_TOKENS
from .captions import SECTIONS, WORDS
from .tiny_tokenizer import ADDED, SPECIAL, byte_letters, write_files

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
    return write_files(folder, token_ids(), (" ".join(pair) for pair in merges()))
