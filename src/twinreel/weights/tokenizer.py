"""The conditioner's tokenizer: its files looked at before transformers reads them, its tokens held against the config.

transformers takes much that is damaged for something else (no merges: every byte a token), and its Rust part answers
the rest with bare exceptions; so the files must be whole first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..spec import PROJECT_TOKENS, TextSpec
from .fields import Fields
from .files import ending, read_json, read_text, reading, shown, there
from .recognise import TOKENIZER_FILES

BYTES = 256  # tokens of one byte each, which no merge makes


@dataclass(frozen=True)
class Tokenizer:
    """transformers' tokenizer of a checkpoint and the ids of the seven project tokens in it."""

    backend: Any
    project: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """Ids of one text piece; of all special tokens only the project's are recognised in it (SPEC 3.1)."""
        ids: list[int] = []
        # Cut at the project tokens by hand: the backend either recognises all special tokens or none, and a person's
        # "<|vision_start|>" must not open a vision block. The backend cuts at added tokens before anything else too.
        for piece in re.split(f"({'|'.join(map(re.escape, PROJECT_TOKENS))})", text):
            if piece in self.project:
                ids.append(self.project[piece])
            elif piece:
                ids += self.backend(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


def load_tokenizer(folder: Path | str, text: TextSpec | None = None) -> Tokenizer:
    """Read a tokenizer folder (vocab.json, merges.txt, tokenizer_config.json; or tokenizer.json).

    With `text` the ids of the vision tokens are checked against the checkpoint's config. Raises CheckpointError when
    the folder is not a tokenizer, is damaged, lacks a project token or disagrees with the config.
    """
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    folder = Path(folder)
    with reading(folder):
        added = _check_files(folder)
        try:
            # the length is a warning of transformers' about another model: a prompt's limit is the request's
            backend = Qwen2Tokenizer.from_pretrained(str(folder), local_files_only=True, model_max_length=2**40)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be read ({error})") from error
    vocabulary = backend.get_vocab()
    for token, number in added.items():
        if vocabulary.get(token) != number:
            raise CheckpointError(
                f"{folder}: {token} is {vocabulary.get(token)} in the vocabulary and {number} in added_tokens_decoder of "
                "its tokenizer_config.json; take all files from the same release"
            )
    if missing := [token for token in PROJECT_TOKENS if token not in vocabulary]:
        raise CheckpointError(
            f"{folder}: the tokenizer lacks {', '.join(missing)}; additional_special_tokens in its "
            "tokenizer_config.json must list the seven project tokens"
        )
    if text is not None:
        _check_vision_tokens(folder, vocabulary, text)
    return Tokenizer(backend, {token: vocabulary[token] for token in PROJECT_TOKENS})


def _check_files(folder: Path) -> dict[str, int]:
    """Refuse damaged files; the ids that the config gives to tokens outside the vocabulary file."""
    for path in folder.iterdir():
        if not path.is_dir():
            there(path)  # transformers would wait for a pipe
    if not any(there(folder / name) for name in TOKENIZER_FILES):
        raise CheckpointError(f"{folder}: no vocab.json and no tokenizer.json; this is not a tokenizer folder")
    found = {path.name: read_json(path) for path in ending(folder, ".json")}
    added = _check_config(Fields(folder / "tokenizer_config.json", found.get("tokenizer_config.json", {})))
    if "vocab.json" in found:
        merges = folder / "merges.txt"
        lines = [line for line in read_text(merges).split("\n") if line.strip()]
        lines = lines[1:] if lines[:1] and lines[0].startswith("#version") else lines
        _check_pairs(merges, Fields(folder / "vocab.json", {"vocab": found["vocab.json"]}), lines)
    if "tokenizer.json" in found:
        path = folder / "tokenizer.json"
        model = Fields(path, found["tokenizer.json"]).block("model")
        model.fixed(type="BPE")
        _check_pairs(path, model, model.data.get("merges"))
    return added


def _check_config(config: Fields) -> dict[str, int]:
    """What of `tokenizer_config.json` changes the ids of a prompt; the ids of its added tokens."""
    config.fixed(add_prefix_space=(False, None))
    for name in ("vocab", "merges", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object"):
        config.need(name not in config.data, name, "is read from its own file; remove it here")
    tokens = config.data.get("additional_special_tokens", [])
    config.need(
        isinstance(tokens, list) and all(isinstance(token, str | dict) for token in tokens),
        "additional_special_tokens",
        f"a list of tokens is needed, got {shown(tokens)}",
    )
    added = config.block("added_tokens_decoder")
    for number in added.data:
        token = added.block(number)
        added.need(number.isdecimal() and len(number) < 10, number, "is no id")
        token.need(isinstance(token.data.get("content"), str), "content", f"a text is needed, got {shown(token.data)}")
        for flag in ("lstrip", "rstrip", "normalized", "single_word", "special"):
            token.truth(flag, False)
    return {token["content"]: int(number) for number, token in added.data.items()}


def _check_pairs(path: Path, fields: Fields, merges: Any) -> None:
    """Byte-pair encoding: each token but the 256 bytes is what one merge of two others makes."""
    vocab = fields.block("vocab").data
    ids = {number for number in vocab.values() if type(number) is int and number >= 0}
    fields.need(len(ids) == len(vocab) > BYTES, "vocab", "a number of its own for each token, and each byte, is needed")
    if not isinstance(merges, list):
        raise CheckpointError(f"{path}: merges: a list is needed, got {shown(merges)}")
    made = set()
    for line in merges:
        pair = line.split(" ") if isinstance(line, str) else line
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(half, str) for half in pair):
            raise CheckpointError(f"{path}: merges: two tokens are needed, got {shown(line)}; download it again")
        if not {*pair, "".join(pair)} <= vocab.keys():
            raise CheckpointError(f"{path}: merges: {shown(line)} is no pair of known tokens; download it again")
        made.add("".join(pair))
    if len(made) != len(vocab) - BYTES:
        raise CheckpointError(
            f"{path}: {len(made)} merges for {len(vocab) - BYTES} tokens of more than one byte; download it again"
        )


def _check_vision_tokens(folder: Path, vocabulary: Mapping[str, int], text: TextSpec) -> None:
    expected = {
        "<|vision_start|>": text.vision_start_token,
        "<|vision_end|>": text.vision_end_token,
        "<|image_pad|>": text.image_token,
        "<|video_pad|>": text.video_token,
    }
    for token, id_ in expected.items():
        if vocabulary.get(token) != id_:
            raise CheckpointError(
                f"{folder}: {token} is {vocabulary.get(token)} in the tokenizer and {id_} in the text encoder's "
                "config; the two belong to different checkpoints"
            )
    if (largest := max(vocabulary.values())) >= text.vocab:
        raise CheckpointError(f"{folder}: token id {largest} lies outside the text encoder's {text.vocab} embeddings")
