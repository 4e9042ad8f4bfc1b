"""The model's parts: built on the meta device, streamed from the checkpoint when first needed, resident by stage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .conditioning import Cache, Forgetful
from .config import RESIDENT_SHARE, Choices
from .models.audio_decoder import AudioDecoder
from .models.audio_encoder import AudioEncoder
from .models.dit import DiT
from .models.modulation import LiveModulation
from .models.modulation_tables import PrecomputedModulation
from .models.text_encoder import TextEncoder
from .models.video_decoder import VideoDecoder
from .models.video_encoder import VideoEncoder
from .parallel import Parallel
from .parallel.team import Team
from .presentation import load_tokenizer
from .spec import Spec
from .watch import Stages
from .weights import Checkpoint, load_into, stored_bytes, stream_part
from .weights.fingerprint import fingerprint


class Parts:
    """Everything a request needs that outlives it. `parts[name]` is a loaded module."""

    def __init__(
        self, checkpoint: Checkpoint, spec: Spec, choices: Choices, residency: str, cache: Cache | None = None,
        *, parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.spec, self.choices = checkpoint, spec, choices
        self.cache: Cache = Forgetful() if cache is None else cache
        self.parallel = parallel or Parallel.single()
        self.team = Team(self.parallel.control)
        self.residency, self.residency_why = self._choose(residency)
        self.adaln, self.adaln_why = self._choose_adaln(choices.adaln)
        self._modules: dict[str, Any] = {}
        # These outlive every stage: their tables are what reading the projections again would cost.
        self._tables: dict[str, PrecomputedModulation] = {}
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

    def lap(self) -> dict[str, Any]:
        """What this rank's collectives have cost since the last lap; nothing for a rank alone."""
        meter = self.parallel.every.meter
        return {} if meter is None else meter.lap()

    @contextmanager
    def resident(self, stages: Stages, *names: str) -> Iterator[None]:
        """Have `names` loaded inside the block; afterwards `stages` residency lets them go. Raises CheckpointError."""
        missing = [name for name in names if name not in self._modules]
        if missing:
            with stages.stage("load", len(missing)):
                for i, name in enumerate(missing):
                    stages.tell(i, len(missing), name)
                    self._modules[name] = self.team.together(partial(self._load, name))
                    stages.tell(i + 1, len(missing), name)
                    stages.gate()
        try:
            yield
        finally:
            if self.residency == "stages":
                self.keep_only(*(name for name in self._modules if name not in names))

    def keep_only(self, *names: str) -> None:
        """Let every other part go, and what the allocator has set aside."""
        for name in set(self._modules) - set(names):
            if isinstance(part := self._modules.pop(name), PrecomputedModulation):
                part.release()
            del part
        gc.collect()
        if self.choices.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, name: str) -> Any:
        if name.startswith("modulation:") and self.adaln == "precompute":
            return self._tables.setdefault(name, self._tabulate(name))
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
            return TextEncoder(spec.text, dtype, self.parallel.text)
        if kind == "video_encoder":
            return VideoEncoder(spec.video, self.parallel.every)
        if kind == "video_decoder":
            return VideoDecoder(spec.video, self.choices.vae_compute, self.parallel.every)
        return AudioEncoder(spec.audio) if kind == "audio_encoder" else AudioDecoder(spec.audio)

    def _tabulate(self, name: str) -> PrecomputedModulation:
        component = self.checkpoint.component("modulation", name.partition(":")[2])
        source = partial(
            stream_part, self.checkpoint, self.spec, name, device=self.choices.device, dtype=self.choices.dtype
        )
        version = partial(fingerprint, component)
        dit, choices = self.spec.dit, self.choices
        return PrecomputedModulation(dit, choices.dtype, choices.device, source, version, parallel=self.parallel)

    def _choose_adaln(self, adaln: str) -> tuple[str, str]:
        """`auto` spends memory on the projections only where everything stays loaded anyway."""
        if adaln != "auto":
            return adaln, "asked for"
        precompute = self.residency != "all" and self.choices.device.type == "cuda"
        return "precompute" if precompute else "live", f"auto: {self.residency} residency on {self.choices.device.type}"

    def _choose(self, residency: str) -> tuple[str, str]:
        """`auto` keeps everything where it fits with a fifth of the free device memory to spare, otherwise `stages`."""
        if residency != "auto":
            return residency, "asked for"
        if self.choices.device.type != "cuda":
            return "all", "auto on cpu"
        free, _ = torch.cuda.mem_get_info(self.choices.device)
        tables = self.choices.adaln == "precompute"
        names = [name for name in self.names if not (tables and name.startswith("modulation:"))]
        ranks = {"dit": self.parallel.tp.size, "text_encoder": self.parallel.text.size}
        need = sum(stored_bytes(self.spec, name) // ranks.get(name.partition(":")[0], 1) for name in names)
        fits = need <= free * RESIDENT_SHARE
        return ("all" if fits else "stages"), f"auto: {need / 2**30:.1f} GiB of weights, {free / 2**30:.1f} GiB free"
