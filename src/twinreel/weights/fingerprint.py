"""A quick identity of one component's weights: enough to tell checkpoints apart, not a check of their integrity."""

from __future__ import annotations

import hashlib

from .files import open_weights, opened, reading
from .recognise import Component

SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint(component: Component) -> str:
    """SHA-256 of the component's safetensors files: sizes and, of each, its header and 64 evenly spread samples of 4 KiB.

    The header has names, shapes and dtypes. `twinreel verify` hashes every byte.
    Raises CheckpointError when the folder holds no weights.
    """
    sha = hashlib.sha256()
    for shard in sorted(open_weights(component.weights).shards):
        with reading(shard), opened(shard) as file:
            size = shard.stat().st_size
            sha.update(f"{shard.name} {size}\n".encode())
            sha.update(file.read(int.from_bytes(file.read(8), "little")))  # `open_weights` has looked at its length
            for i in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                sha.update(file.read(SAMPLE_BYTES))
    return sha.hexdigest()
