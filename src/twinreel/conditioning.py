"""What the encoders make of a request, and a cache of it across requests.

A value is found again only by everything that reached its encoder: the bytes of ids, pixels or samples, the processor's
constants, the weights' fingerprint, and whatever of the engine's choices may change a bit. A hit gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .parts import Parts


@dataclass(frozen=True)
class Wanted:
    """One value that a request needs of an encoder: the `part`, everything that reaches it, and how it is made."""

    part: str
    reaching: tuple[Any, ...]
    make: Callable[[], Tensor]
    note: str


class Cache(Protocol):
    """Values of earlier requests. On several ranks each has its own, and all decide alike: keys and sizes are equal."""

    def recall(self, wanted: Sequence[Wanted], parts: Parts) -> list[Tensor | None]:
        """What is known, in order; None for what must be made."""
        ...

    def keep(self, wanted: Sequence[Wanted], values: Sequence[Tensor], parts: Parts) -> None:
        """Remember the values of a request."""
        ...


class Forgetful:
    """The cache that keeps nothing."""

    def recall(self, wanted: Sequence[Wanted], parts: Parts) -> list[Tensor | None]:
        """Nothing is known."""
        return [None] * len(wanted)

    def keep(self, wanted: Sequence[Wanted], values: Sequence[Tensor], parts: Parts) -> None:
        """Nothing is kept."""


class ConditionCache:
    """Keeps at most `limit` bytes in host memory, the least recently used value goes first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._values: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def recall(self, wanted: Sequence[Wanted], parts: Parts) -> list[Tensor | None]:
        """What is known, on the device that its encoder left it on."""
        found: list[Tensor | None] = []
        for item in wanted:
            key = self._key(item, parts)
            if (value := self._values.get(key)) is not None:
                self._values.move_to_end(key)
                value = value.to(parts.choices.device if item.part == "text_encoder" else "cpu", copy=True)
            found.append(value)
        return found

    def keep(self, wanted: Sequence[Wanted], values: Sequence[Tensor], parts: Parts) -> None:
        """Remember values, each as a copy that nobody else can change."""
        for item, value in zip(wanted, values, strict=True):
            key, size = self._key(item, parts), value.numel() * value.element_size()
            if key in self._values or size > self.limit:
                continue
            self._values[key] = value.detach().to("cpu", copy=True)
            self.size += size
            while self.size > self.limit:
                _, old = self._values.popitem(last=False)
                self.size -= old.numel() * old.element_size()

    def _key(self, item: Wanted, parts: Parts) -> str:
        sha = hashlib.sha256(f"{item.part} {self._version(item.part, parts)}".encode())
        absorb(sha, item.reaching)
        return sha.hexdigest()

    def _version(self, part: str, parts: Parts) -> str:
        if part not in parts.versions:  # weights are sampled once, and each engine has its own
            choices = parts.choices
            bits = (str(choices.device), choices.dtype, choices.vae_encode, choices.ops.name, choices.threads)
            parts.versions[part] = f"{parts.weights.version(part)} {bits} {torch.__version__}"
        return parts.versions[part]


def absorb(sha: Any, value: Any) -> None:
    """Feed a value into a hash: arrays by type, shape and bytes, collections item by item, the rest by its text."""
    if isinstance(value, Tensor):
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray):
        sha.update(f"{value.dtype} {value.shape}:".encode())
        sha.update(np.ascontiguousarray(value).data)
    elif isinstance(value, tuple | list):
        sha.update(f"{len(value)}(".encode())
        for item in value:
            absorb(sha, item)
    elif is_dataclass(value) and not isinstance(value, type):
        absorb(sha, (type(value).__name__, *vars(value).items()))
    else:
        sha.update(f"{type(value).__name__} {value!r};".encode())
