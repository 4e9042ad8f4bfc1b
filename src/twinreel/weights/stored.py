"""Where the tensors of a model's parts come from: `Weights`, and its member for the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..spec import Spec
from .config import read_spec
from .fingerprint import fingerprint
from .layer_files import LayerFiles
from .locate import Checkpoint
from .recognise import Component
from .stream import Prefixes, load_into, stream_part
from .tensors import open_component
from .tokenizer import load_tokenizer

# Layer index and its tensors by name in the layer, to be written in place.
ReadLayer = Callable[[int, Mapping[str, Tensor]], None]


class Weights(Protocol):
    """What `Parts` asks for. Parts have the names of `Parts.names`; whatever reads raises CheckpointError."""

    spec: Spec
    path: Any
    layout: str
    notes: tuple[str, ...]  # what was taken from elsewhere, or by default

    def load(self, module: nn.Module, part: str, device: torch.device, apart: Prefixes = ()) -> nn.Module:
        """`load_into`: fill a module built on the meta device, but for the parameters that begin with `apart`."""
        ...

    def stream(self, part: str, prefix: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`stream_part`: whole parameters by name, one after the other, without a module."""
        ...

    def layers(self, part: str) -> ReadLayer:
        """How to read the layers of a part one at a time (`LayerFiles`)."""
        ...

    def version(self, part: str) -> str:
        """What tells the part's weights from others of the same sizes."""
        ...

    def check(self, parts: Sequence[str]) -> None:
        """Look at what can be looked at without reading the tensors of `parts`."""
        ...

    def tokenizer(self) -> Any:
        """The conditioner's tokenizer."""
        ...


class StoredWeights:
    """The files of a checkpoint. Raises CheckpointError where its config files cannot be read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec, self.path, self.layout = read_spec(checkpoint), checkpoint.path, checkpoint.layout
        self._checkpoint, self.notes = checkpoint, checkpoint.notes

    def load(self, module: nn.Module, part: str, device: torch.device, apart: Prefixes = ()) -> nn.Module:
        """See `Weights`."""
        return load_into(module, self._checkpoint, self.spec, part, device, apart=apart)

    def stream(self, part: str, prefix: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `Weights`."""
        return stream_part(self._checkpoint, self.spec, part, prefix, device=device, dtype=dtype)

    def layers(self, part: str) -> ReadLayer:
        """See `Weights`."""
        return LayerFiles(self._checkpoint, self.spec, part).read

    def version(self, part: str) -> str:
        """See `Weights`."""
        return fingerprint(self._component(part))

    def check(self, parts: Sequence[str]) -> None:
        """The headers of all files that `parts` lie in."""
        for component in dict.fromkeys(map(self._component, parts)):
            open_component(component, self.spec)

    def tokenizer(self) -> Any:
        """See `Weights`."""
        return load_tokenizer(self._checkpoint.folders["tokenizer"], self.spec.text)

    def _component(self, part: str) -> Component:
        name, _, partition = part.partition(":")
        return self._checkpoint.component(name, partition or None)
