"""The model's parts: built on the meta device, streamed from the checkpoint when first needed, resident by stage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .config import Choices
from .models.audio_decoder import AudioDecoder
from .models.audio_encoder import AudioEncoder
from .models.dit import DiT
from .models.modulation import LiveModulation
from .models.text_encoder import TextEncoder
from .models.video_decoder import VideoDecoder
from .models.video_encoder import VideoEncoder
from .parallel import Parallel
from .presentation import load_tokenizer
from .spec import Spec
from .watch import Stages
from .weights import Checkpoint, load_into, stored_bytes


class Parts:
    """Everything a request needs that outlives it. `parts[name]` is a loaded module."""

    def __init__(self, checkpoint: Checkpoint, spec: Spec, choices: Choices, residency: str) -> None:
        self.checkpoint, self.spec, self.choices = checkpoint, spec, choices
        self.parallel = Parallel.single()
        self.residency, self.residency_why = self._choose(residency)
        self._modules: dict[str, nn.Module] = {}
        self._tokenizer: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every part this checkpoint can load."""
        dits = [f"{kind}:{partition.name}" for partition in self.spec.partitions for kind in ("dit", "modulation")]
        return ("text_encoder", "video_encoder", "audio_encoder", *dits, "video_decoder", "audio_decoder")

    @property
    def tokenizer(self) -> Any:
        """The conditioner's tokenizer, read when first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.checkpoint.folders["tokenizer"], self.spec.text)
        return self._tokenizer

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the parts in memory."""
        return tuple(self._modules)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    @contextmanager
    def resident(self, stages: Stages, *names: str) -> Iterator[None]:
        """Have `names` loaded inside the block; afterwards `stages` residency lets them go. Raises CheckpointError."""
        missing = [name for name in names if name not in self._modules]
        if missing:
            with stages.stage("load", len(missing)):
                for i, name in enumerate(missing):
                    self._modules[name] = self._load(name)
                    stages.tell(i + 1, len(missing), name)
        try:
            yield
        finally:
            if self.residency == "stages":
                for name in names:
                    self._modules.pop(name, None)
                gc.collect()
                if self.choices.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _load(self, name: str) -> nn.Module:
        with torch.device("meta"):
            module = self._build(name)
        return load_into(module, self.checkpoint, self.spec, name, self.choices.device)

    def _build(self, name: str) -> nn.Module:
        spec, dtype = self.spec, self.choices.dtype
        kind = name.partition(":")[0]
        if kind == "dit":
            return DiT(spec.dit, self.choices.ops, self.parallel, dtype)
        if kind == "modulation":
            return LiveModulation(spec.dit, dtype)
        if kind == "text_encoder":
            return TextEncoder(spec.text, dtype)
        if kind == "video_encoder":
            return VideoEncoder(spec.video)
        if kind == "video_decoder":
            return VideoDecoder(spec.video, self.choices.vae_compute)
        return AudioEncoder(spec.audio) if kind == "audio_encoder" else AudioDecoder(spec.audio)

    def _choose(self, residency: str) -> tuple[str, str]:
        """`auto` keeps everything where it fits with a fifth of the free device memory to spare, otherwise `stages`."""
        if residency != "auto":
            return residency, "asked for"
        if self.choices.device.type != "cuda":
            return "all", "auto on cpu"
        free, _ = torch.cuda.mem_get_info(self.choices.device)
        need = sum(stored_bytes(self.spec, name) for name in self.names)
        fits = need <= free * 0.8
        return ("all" if fits else "stages"), f"auto: {need / 2**30:.1f} GiB of weights, {free / 2**30:.1f} GiB free"
