"""A small byte-level BPE tokenizer folder in the released format, for the miniature.

Every byte is a token, a few merges make common words shorter, then come Qwen's special tokens (in
`added_tokens_decoder`) and the seven project tokens (only in `additional_special_tokens`, as released). The special ids
differ from Qwen's on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..spec import PROJECT_TOKENS

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "o n", "r e", "e r", "Ġt he", "s e", "c on", "Ġ s", "se con", "secon d", "i c")
VOCAB = 320  # embeddings of a tiny text encoder; the ids end below


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte value, in the order in which Qwen's vocab.json numbers them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return [chr(value) for value in printable] + [chr(256 + index) for index in range(len(others))]


def token_ids() -> dict[str, int]:
    """Every token's id."""
    tokens = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL, *ADDED, *PROJECT_TOKENS]
    assert len(tokens) == len(set(tokens)) <= VOCAB
    return {token: number for number, token in enumerate(tokens)}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write vocab.json, merges.txt and tokenizer_config.json into `folder`; returns every token's id."""
    return write_files(folder, token_ids(), MERGES)


def write_files(folder: Path, ids: dict[str, int], merges: Iterable[str]) -> dict[str, int]:
    """`write_tokenizer` for any vocabulary that ends with the released special tokens; returns `ids`."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    extra = {*SPECIAL, *ADDED, *PROJECT_TOKENS}
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
    words = {token: number for token, number in ids.items() if token not in extra}
    (folder / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return ids
