"""`Engine`: built once, runs many requests of every task its weights declare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import ops
from .conditioning import Cache
from .config import EngineConfig, check_config, resolve
from .decoding import decode
from .demo import model_folder
from .errors import Cancelled, RequestError
from .finish import Ending, check_unused, finish, has_picture
from .launch import Seat, seat
from .limits import shown
from .media.addresses import files_of
from .noise import Rows
from .output import OutputOptions, absolute_path, check_output, check_space
from .output.latents import Latents, load_latents
from .output.report import hash_frames, hash_waveform, versions
from .output.write import Media
from .parallel.team import agreed
from .parts import Parts
from .pipeline import sample
from .plan import Plan
from .precision import check_weights
from .ranks import Ranks
from .request import Request, check_request
from .request_json import request_to_json
from .topology import check_alike, choose_mesh, choose_variant, describe_mesh, num_ranks, settle_variant, sizes_of
from .watch import Boundary, Event, Stages, Watch, ignore, pass_by
from .weights import locate
from .weights.stored import StoredWeights, Weights


class Engine:
    """One model on one device, or on several, each with a process of its own. Not re-entrant: a second `generate` waits
    for the first.

    Raises ConfigError or CheckpointError when it cannot be built; no weight is read before the first request. Under a
    launcher (torchrun) every process makes an engine and calls the same methods; rank 0 writes and returns the report,
    the others return an empty one. `weights` stand in place of the files that `config` names, in this process alone.
    """

    def __init__(
        self, config: EngineConfig | None = None, cache: Cache | None = None, place: Seat | None = None,
        *, weights: Weights | None = None,
    ) -> None:  # fmt: skip
        self.config = EngineConfig() if config is None else config
        check_config(self.config)
        if weights is None:
            weights = StoredWeights(locate(model_folder(self.config), self.config.components))
        self.weights, self.spec = weights, weights.spec
        check_weights(self.config.precision, self.spec.dit)
        self._turn = Turn()
        self._cancel = threading.Event()
        self._ranks: Ranks | None = None
        self.kept: Callable[[str], object] = lambda told: None  # see `Ending`
        place = place or seat()
        count = num_ranks(self.config, place)
        mesh, why = choose_mesh(self.config, count, sizes_of(self.spec, self.config))
        if place is None and count > 1:
            self._ranks = Ranks((self.config, cache), count)
            return
        choices = resolve(self.config, self.spec.dit.head_dim, place)
        variant = choose_variant(self.config, mesh, choices, self.spec.dit)
        parallel = None
        if place is not None:
            backend = "nccl" if choices.device.type == "cuda" else "gloo"
            parallel = place.join(mesh, backend)
            check_alike(parallel, choices, variant)
            parallel, variant = settle_variant(variant, parallel, choices, place)
        self.parts = Parts(weights, choices, self.config.residency, cache, parallel=parallel)
        self.team = self.parts.team
        self._topology = describe_mesh(mesh, variant.name) | {"why": why | {"attend": variant.why}}

    def generate(self, request: Request, watch: Watch = ignore, boundary: Boundary | None = None) -> Media:
        """Run `request` to frames and sound in memory; `boundary` gets the values between stages.

        Raises RequestError, Cancelled, FloatingPointError; RuntimeError when called by the watch of a run of its own.
        """
        with self._turn.of(watch, boundary):
            if self._ranks is not None:
                media: Media = self._ranks.run(("generate", request), watch, boundary)
                return media
            stages = self._stages(watch, boundary)
            latents = sample(request, self.parts, stages, self._vote)
            with closing(decode(latents, self.parts, stages)) as decoded:
                waveform = next(decoded)
                video = np.concatenate(list(decoded))
            report = {**self._origin(request), **latents.facts, "stages": stages.records}
            report["sha256"] = {"frames": hash_frames(video), "waveform": hash_waveform(waveform)}
            return Media(video, waveform, report)

    def render(
        self,
        request: Request,
        path: str | Path,
        output: OutputOptions | None = None,
        watch: Watch = ignore,
        boundary: Boundary | None = None,
    ) -> dict[str, Any]:
        """Run `request` into the file `path`, clip by clip, with its report beside it; returns the report.

        The latents are kept in a file until the finished one has been read back; an error after sampling carries a
        note that names them. Raises what `generate` raises, OSError, and RequestError for a path that cannot be
        written.
        """
        output = OutputOptions() if output is None else output
        with self._turn.of(watch, boundary):
            if self._ranks is not None:
                report: dict[str, Any] = self._ranks.run(("render", request, path, output), watch, boundary)
                return report
            stages = self._stages(watch, boundary)
            target = self.team.first(partial(self._check_both, request, path, output))
            latents = sample(request, self.parts, stages, self._vote, planned=partial(_check_room, target, output))
            return self._finish(
                latents, stages, Ending(target, output, self.config, self._origin(request), kept=self.kept)
            )

    def decode(
        self, latents: str | Path, path: str | Path, output: OutputOptions | None = None, watch: Watch = ignore
    ) -> dict[str, Any]:
        """Finish an interrupted run from its `latents` file, as `render` would have; returns the report.

        Raises RequestError for a file that holds no latents, CheckpointError for those of another model.
        """
        output, source = OutputOptions() if output is None else output, absolute_path("latents", latents)
        with self._turn.of(watch):
            if self._ranks is not None:
                result: dict[str, Any] = self._ranks.run(("decode", source, path, output), watch, None)
                return result
            stages = self._stages(watch)
            target = self.team.first(partial(check_output, path, output, source))
            self.team.first(partial(check_unused, source))
            kept = self.team.first(partial(load_latents, source, self.spec))
            self.team.first(partial(_check_room, target, output, kept.latents.plan))
            self.team.first(partial(self.parts.check_files, "video_decoder", "audio_decoder"))
            report = {**kept.report, "decoded_by": {"engine": self.describe(), "versions": versions()}}
            return self._finish(kept.latents, stages, Ending(target, output, self.config, report, source, self.kept))

    def cancel(self) -> None:
        """End the running request at its next step or clip; `generate` then raises Cancelled. Without one, no effect."""
        self._cancel.set()
        if self._ranks is not None:
            self._ranks.cancel()

    def close(self) -> None:
        """End the processes of an engine with several ranks, which without a call end with this process. A closed engine
        refuses to run, whatever it has: RuntimeError."""
        self._turn.end()
        if self._ranks is not None:
            self._ranks.end()

    def describe(self) -> dict[str, Any]:
        """What this engine chose on this machine, and why."""
        if self._ranks is not None:
            return self._ranks.facts
        parts, choices = self.parts, self.parts.choices
        return {
            "model": str(parts.weights.path),
            "layout": parts.weights.layout,
            "notes": list(parts.weights.notes),
            "tasks": list(parts.spec.tasks),
            "device": _device_name(choices.device),
            "dtypes": {
                "dit": str(choices.dtype).removeprefix("torch."),
                "conditioner": str(choices.dtype).removeprefix("torch."),
                "fp32_islands": "float32",
                "video_vae_encode": choices.vae_encode,
                "video_vae_decode": str(choices.vae_compute).removeprefix("torch."),
                "audio_vae": "float32",
            },
            "fp8": describe_fp8(parts),
            "vae_tile_batch": choices.tile_batch,
            "residency": parts.residency,
            "ops": ops.describe(choices.ops),
            "adaln": parts.adaln,
            "row_chunk": parts.row_chunk,
            "threads": choices.threads,
            "topology": self._topology,
            "why": dict(choices.why) | parts.why,
        }

    def _check_both(self, request: Request, path: str | Path, output: OutputOptions) -> Path:
        """The absolute path of the output, which may be nothing that the request reads."""
        check_request(request, self.spec, allow_remote=self.config.allow_remote)
        return check_output(path, output, needed=files_of(request))

    def _stages(self, watch: Watch, boundary: Boundary | None = None) -> Stages:
        """The stages of a new request; a cancel is heard at every event of theirs."""
        self._cancel.clear()
        self.parts.lap()  # what an earlier one that was ended has left there, and the time since

        def told(event: Event) -> None:
            watch(event)
            if self.team.control.size == 1:
                self._gate()

        every, recorded = self.parts.parallel.every, boundary if self.team.leads else pass_by

        def followed(name: str, values: Mapping[str, Any], part: int = 0, parts: int = 1) -> None:
            assert recorded is not None
            recorded(name, values, part, parts)  # rank 0's to do, but every rank takes part in gathering the values
            every.meet()  # however long it takes

        return Stages(told, self.parts.choices.device, boundary and followed, self._gate)

    def _finish(self, latents: Latents, stages: Stages, ending: Ending) -> dict[str, Any]:
        """`finish` on rank 0; the other ranks decode with it and write nothing."""
        if self.team.leads:
            return finish(latents, self.parts, stages, ending)
        with closing(decode(latents, self.parts, stages, picture=has_picture(ending.target))) as decoded:
            for _ in decoded:
                pass
        return {}

    def _vote(self, step: int, velocity: Rows) -> None:
        for modality in self._agree(velocity):
            raise agreed(
                FloatingPointError(
                    f"step {step}: the {modality} velocity holds values that are not finite; the weights, the "
                    "precision or a kernel is at fault: run `twinreel verify`, then try precision fp32 and ops reference"
                )
            )

    def _gate(self) -> None:
        self.parts.parallel.every.meet()
        self._agree(None)

    def _agree(self, velocity: Rows | None) -> list[str]:
        """Raise Cancelled if any rank heard it; the modalities of which any rank has a value that is not finite."""
        rows = vars(velocity) if velocity else {}
        ballots = [torch.tensor(self._cancel.is_set()), *(~torch.isfinite(x).all() for x in rows.values())]
        every = self.parts.parallel.every
        device = self.parts.choices.device if rows or every.size > 1 else torch.device("cpu")
        ballot = torch.stack([each.to(device, torch.int32) for each in ballots])
        cancelled, *broken = every.vote(ballot).tolist()
        if cancelled:
            raise agreed(Cancelled("the request was cancelled"))
        return [name for name, bad in zip(rows, broken, strict=True) if bad]

    def _origin(self, request: Request) -> dict[str, Any]:
        return {"request": request_to_json(request), "engine": self.describe(), "versions": versions()}


class Turn:
    """One run at a time: others wait, and whoever would wait for itself is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._ended = False

    def end(self) -> None:
        """Nobody has a turn after this."""
        self._ended = True

    @contextmanager
    def of(self, watch: Watch, boundary: Boundary | None = None) -> Iterator[None]:
        """The turn of a run that these two follow. Raises RequestError when one of them cannot be called."""
        for name, value in (("watch", watch), ("boundary", boundary or pass_by)):
            if not callable(value):
                raise RequestError(name, f"got {shown(value)}; a function is needed, see twinreel.watch")
        if self._holder == threading.get_ident():
            raise RuntimeError("this engine is in the middle of a run that called here; start the next one after it")
        with self._lock:
            if self._ended:
                raise RuntimeError("this engine is closed; make another")
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None


def describe_fp8(parts: Parts) -> dict[str, Any] | None:
    """Which products run in e4m3, None where none do; the reasons are in `why`, under `fp8` and `fp8_attention`."""
    fp8, layers = parts.choices.fp8, parts.spec.dit.layers
    if fp8 is None:
        return None
    return {
        "products": "emulated" if parts.choices.device.type == "cpu" else "e4m3, fast accumulation",
        "attention": parts.choices.why["fp8_attention"].partition(":")[0],
        "blocks": f"{fp8.blocks} to {layers - fp8.blocks - 1} of {layers}",
        "steps": f"all but the first and last {fp8.steps}" if fp8.steps else "all",
        "weights": "quantized by twinreel quantize" if parts.spec.dit.fp8_edge is not None else "quantized when loaded",
    }


def _check_room(target: Path, output: OutputOptions, plan: Plan) -> None:
    check_space(target, output, (plan.width, plan.height), plan.frames, plan.samples)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
