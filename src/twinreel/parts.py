"""The model's parts: built on the meta device, filled from their `Weights` when first needed, resident by stage, or
two layers at a time."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .conditioning import Cache, Forgetful
from .config import MODES, Choices, Mode
from .layout import PackedLayout
from .memory.choose import NEAR, Asked, Choice, admit, choose, free_memory, partitions_kept, refusals, usual
from .memory.estimate import Setting
from .models.audio_decoder import AudioDecoder
from .models.audio_encoder import AudioEncoder
from .models.dit import DiT, Kind
from .models.modulation import LiveModulation
from .models.modulation_tables import PrecomputedModulation
from .models.quantized import Stepwise, quantized_kind
from .models.streamed import Hosted, Shelf, Source, Staged, Streamed, take_turns
from .models.text_encoder import TextEncoder
from .models.video_decoder import VideoDecoder
from .models.video_encoder import VideoEncoder
from .ops import frames, vit
from .parallel import Parallel
from .parallel.team import Team
from .plan import Plan
from .watch import Stages
from .weights.keymap import LAYERS
from .weights.stored import Weights


class Parts:
    """Everything a request needs that outlives it. `parts[name]` is a loaded module."""

    def __init__(
        self, weights: Weights, choices: Choices, residency: str, cache: Cache | None = None,
        *, parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.weights, self.spec, self.choices = weights, weights.spec, choices
        self.cache: Cache = Forgetful() if cache is None else cache
        self.parallel = parallel or Parallel.single()
        self.team = Team(self.parallel.control)
        ranks = self.parallel.control.size
        refused = refusals(choices.fp8, self.spec, ranks)
        self._asked = Asked(residency, choices.adaln, choices.row_chunk, ranks, refused)
        cards = [free for free in self.parallel.control.tell_all(free_device(choices)) if free is not None]
        self._free = free_memory(choices.host_memory, min(cards, default=None))
        self._choice = self._choose(*usual(self.spec))
        self._modules: dict[str, Any] = {}
        # These outlive every stage: their tables are what reading the projections again would cost.
        self._tables: dict[str, PrecomputedModulation] = {}
        # Likewise the layers in host memory, the most recently used last.
        self._hosted: OrderedDict[str, Hosted] = OrderedDict()
        self._fetched: dict[str, dict[str, int]] = {}
        self._tokenizer: Any = None
        self.versions: dict[str, str] = {}  # what the condition cache knows weights and choices of an encoder by

    @property
    def residency(self) -> str:
        """The residency of the running request, before the first that of a usual one."""
        return self._choice.residency

    @property
    def adaln(self) -> str:
        """`live` or `precompute`, likewise."""
        return self._choice.adaln

    @property
    def row_chunk(self) -> int:
        """Packed rows at a time, 0 for all, likewise."""
        return self._choice.row_chunk

    @property
    def why(self) -> dict[str, str]:
        """The reasons of these three."""
        return dict(self._choice.why)

    @property
    def mode(self) -> Mode:
        """What the residency means."""
        return MODES[self.residency]

    def arrange(self, plan: Plan, layout: PackedLayout) -> None:
        """Choose anew for a request; parts that would then be kept otherwise leave. Raises ConfigError."""
        rows = dict.fromkeys(("text", "video", "audio"), 0)
        for segment in layout.segments:
            rows[segment.kind] += segment.rows
        before, self._choice = self._choice, self._choose(plan, rows, admitted=True)
        self._fetched = {}
        self._make_room(plan.partition)
        kept = partitions_kept(self.residency, plan.partition, self.spec)

        def stays(name: str) -> bool:
            kind, _, partition = name.partition(":")
            alike = before.residency == self.residency and (kind != "modulation" or before.adaln == self.adaln)
            return alike and (not partition or partition in kept)

        staying = [name for name in self._modules if stays(name)]
        if len(staying) < len(self._modules):
            self.keep_only(*staying)

    def _make_room(self, partition: str) -> None:
        """Let layers go that the residency does not use, and tables that the choice has no room for."""
        mode, (device, host) = self.mode, self._choice.spare
        for name in [name for name in self._hosted if mode.mapped or not mode.streams(name)]:
            del self._hosted[name]
        running = f"modulation:{partition}"
        for name in sorted(self._tables, key=lambda name: name != running):  # the others get what is left
            own = self._choice.tables if name == running else 0
            there, everywhere = self._tables[name].make_room(device, host, own)
            device, host = device - there, host - everywhere

    def memory(self) -> dict[str, Any]:
        """For the report: what was chosen and why, and the layers that were brought to the device, by part."""
        choice = self._choice
        need = {"device": choice.device_bytes, "host": choice.host_bytes}
        return {
            "residency": choice.residency, "adaln": choice.adaln, "row_chunk": choice.row_chunk, "why": self.why,
            "predicted_bytes": need, "fetched": self._fetched,
        }  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        """Every part this checkpoint can load."""
        dits = [f"{kind}:{partition.name}" for partition in self.spec.partitions for kind in ("dit", "modulation")]
        return ("text_encoder", "video_encoder", "audio_encoder", *dits, "video_decoder", "audio_decoder")

    @property
    def tokenizer(self) -> Any:
        """The conditioner's tokenizer, read when first needed."""
        if self._tokenizer is None:
            self._tokenizer = self.weights.tokenizer()
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
        """Have `names` loaded inside the block; afterwards those go that the residency does not keep. Raises
        CheckpointError."""
        try:
            self._bring(stages, [name for name in names if name not in self._modules])
            yield
        finally:
            for name in names:
                self._count(name)
            leaving = [name for name in names if not self.mode.keeps(name)]
            if leaving:
                self.keep_only(*(name for name in self._modules if name not in leaving))

    def _bring(self, stages: Stages, missing: Sequence[str]) -> None:
        if not missing:
            return
        with stages.stage("load", len(missing)):
            for i, name in enumerate(missing):
                stages.tell(i, len(missing), name)
                self._modules[name] = self.team.together(partial(self._load, name))
                stages.tell(i + 1, len(missing), name)
                stages.gate()

    def check_files(self, *names: str) -> None:
        """Look at the headers of all files that `names` lie in, unless they are loaded: a damaged download is known before
        anything is computed from the rest. Raises CheckpointError."""
        self.weights.check([name for name in names if name not in self._modules])

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
        if self.mode.streams(name):
            return self._streamed(name, module)
        device, fp8 = self.choices.device, self.choices.fp8
        if isinstance(module, DiT) and fp8 is not None and fp8.steps:
            with torch.device("meta"):
                wide = DiT(self.spec.dit, self.choices.ops, self.parallel, self.choices.dtype)
            self.weights.load(wide, name, device)
            both = Stepwise(module, wide, fp8.steps)
            self.weights.load(module, name, device, both.shared)
            return both
        return self._stored(self.weights.load(module, name, device))

    def _stored(self, module: nn.Module) -> Any:
        """The conditioner with its weights spread over ranks, where they are to be."""
        stored = self.parallel.stored
        if not isinstance(module, TextEncoder) or stored.size == 1:
            return module
        from .parallel.fully_sharded import Gathered

        return Gathered(module, module.gathered_parts(), stored, self.choices.device)

    def _kinds(self) -> dict[int, Kind]:
        fp8, layers = self.choices.fp8, self.spec.dit.layers
        if fp8 is None:
            return {}
        return dict.fromkeys(range(fp8.blocks, layers - fp8.blocks), quantized_kind(self.choices.fp8_ops))

    def _build(self, name: str) -> nn.Module:
        spec, dtype = self.spec, self.choices.dtype
        kind = name.partition(":")[0]
        if kind == "dit":
            return DiT(spec.dit, self.choices.ops, self.parallel, dtype, self._kinds())
        if kind == "modulation":
            return LiveModulation(spec.dit, dtype)
        if kind == "text_encoder":
            return TextEncoder(spec.text, dtype, self.parallel.text)
        if kind == "video_encoder":
            choices, channels = self.choices, spec.video.channels
            between = frames.choose(choices.ops.name, choices.vae_encode, channels, choices.device)
            return VideoEncoder(spec.video, self.parallel.every, choices.encode_compute, between)
        if kind == "video_decoder":
            passes = vit.choose(self.choices.ops.name, self.choices.device)
            return VideoDecoder(spec.video, self.choices.vae_compute, self.parallel.every, passes)
        return AudioEncoder(spec.audio) if kind == "audio_encoder" else AudioDecoder(spec.audio)

    def _tabulate(self, name: str) -> PrecomputedModulation:
        dit, choices, weights = self.spec.dit, self.choices, self.weights
        source = partial(weights.stream, name, device=choices.device, dtype=choices.dtype)
        version = partial(weights.version, name)
        return PrecomputedModulation(dit, choices.dtype, choices.device, source, version, parallel=self.parallel)

    def _choose(self, plan: Plan, rows: Mapping[str, int], admitted: bool = False) -> Choice:
        choices, parallel = self.choices, self.parallel
        setting = Setting(
            choices.device.type, choices.dtype.itemsize, choices.vae_compute.itemsize, choices.tile_batch, "all",
            ops=choices.ops.name, sp=parallel.sp.size, tp=parallel.tp.size, text=parallel.text.size,
            stored=parallel.stored.size, fp8=choices.fp8, encode=choices.vae_encode,
        )  # fmt: skip

        def chosen() -> Choice:
            choice = choose(self._asked, plan, rows, self.spec, setting, self._free)
            return admit(choice, self._asked, self._free) if admitted else choice

        # every rank has memory of its own, and all must choose alike
        return self.team.first(chosen)

    def _streamed(self, name: str, module: nn.Module) -> nn.Module:
        """`module`, a part on the meta device, loaded but for its layers, which come when they are asked for."""
        device, prefix = self.choices.device, LAYERS[name.partition(":")[0]]
        take_turns(module, prefix, partial(self._source, name), device)
        return self.weights.load(module, name, device, prefix)

    def _source(self, name: str, shelves: Sequence[Shelf]) -> Source:
        """Where the layers of a part come from: host memory, where those of other parts make room, or the files."""
        if name not in self._hosted:
            read = self.weights.layers(name)
            if self.mode.mapped:
                return Staged(shelves, read, self.choices.device)
            for other in [other for other in self._hosted if other not in self._modules]:
                idle = sum(hosted.nbytes for part, hosted in self._hosted.items() if part not in self._modules)
                idle += sum(tables.nbytes for tables in self._tables.values())
                if self._free.host is not None and (self._choice.host_with[name] + idle) * NEAR > self._free.host:
                    del self._hosted[other]
            self._hosted[name] = Hosted(shelves, read, self.choices.device)
        self._hosted.move_to_end(name)
        return self._hosted[name]

    def _count(self, name: str) -> None:
        """Add what a part has fetched to the request's account."""
        module = self._modules.get(name)
        for layers in module.modules() if isinstance(module, nn.Module) else ():
            if not isinstance(layers, Streamed):
                continue
            account = self._fetched.setdefault(name, {"layers": 0, "bytes": 0})
            account["layers"] += layers.fetched
            account["bytes"] += layers.fetched_bytes


def free_device(choices: Choices) -> int | None:
    """Bytes of the device that this process may have: what is free, and what it holds already. None for a CPU."""
    if choices.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(choices.device)
    share = torch.cuda.memory.get_per_process_memory_fraction(choices.device)
    return min(free + torch.cuda.memory_reserved(choices.device), int(total * share))
