"""What a prompt says that this request cannot mean: warnings, never refusals, because the prompt is used verbatim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .spec import PROJECT_TOKENS

_LABEL = re.compile(r"<\s*(picture|video|audio)\s*(\d{1,4})\s*>", re.IGNORECASE)
_NAMED = re.compile(r"\b(picture|video|audio)\s*(\d{1,4})\b", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|\w{1,40}\|>")
# The project tokens that come in pairs: opening -> closing.
PAIRS = {
    "<d>": "</d>",
    "<|lyrics_start|>": "<|lyrics_end|>",
    "<|caption_start|>": "<|caption_end|>",
}

Named = tuple[str, tuple[str, ...]]


def prompt_warnings(prompt: str, given: Sequence[Named], *, must_be_named: bool) -> tuple[str, ...]:
    """What looks wrong in `prompt`, a line each.

    `given` is every medium's place in the request and its labels, as `("references[1]", ("Audio 1", "Video 1"))`.
    `must_be_named`: a medium that the prompt never names is worth a warning (references are, keyframes are not).
    """
    found = [*_label_warnings(prompt, given), *_pair_warnings(prompt), *_token_warnings(prompt)]
    if must_be_named:
        named = {f"{kind.capitalize()} {int(number)}" for kind, number in _NAMED.findall(prompt)}
        for field, labels in given:
            if not named & set(labels):
                wanted = " or ".join(f"<{label}>" for label in labels)
                found.append(f"{field}: the prompt never names it; write {wanted} where it belongs")
    return tuple(dict.fromkeys(found))


def _label_warnings(prompt: str, given: Sequence[Named]) -> Iterator[str]:
    labels = {label for _, own in given for label in own}
    for match in _LABEL.finditer(prompt):
        kind, number = match[1].capitalize(), int(match[2])
        if f"{kind} {number}" not in labels:
            count = sum(label.startswith(kind) for label in labels)
            yield f"prompt: {match[0]} names nothing: the request has {count} of kind {kind}"
        elif match[0] != f"<{kind} {number}>":
            yield f"prompt: {match[0]} is not how the model knows it; write <{kind} {number}>"


def _pair_warnings(prompt: str) -> Iterator[str]:
    closing = {end: start for start, end in PAIRS.items()}
    opened: list[str] = []
    for token in re.findall("|".join(map(re.escape, [*PAIRS, *closing])), prompt):
        if token in PAIRS:
            if token in opened:
                yield f"prompt: {token} is opened again before {PAIRS[token]}; these tags are not nested"
            opened.append(token)
        elif closing[token] not in opened:
            yield f"prompt: {token} closes nothing; put {closing[token]} before it"
        else:
            if opened[-1] != closing[token]:
                yield f"prompt: {token} crosses {opened[-1]}, which is still open"
            opened.reverse()
            opened.remove(closing[token])
            opened.reverse()
    for token in opened:
        yield f"prompt: {token} is never closed; put {PAIRS[token]} after it"


def _token_warnings(prompt: str) -> Iterator[str]:
    for token in _SPECIAL.findall(prompt):
        if token not in PROJECT_TOKENS:
            yield f"prompt: {token} stays plain text; the model's own tokens are {', '.join(PROJECT_TOKENS)}"
