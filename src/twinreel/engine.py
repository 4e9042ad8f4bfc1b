"""`Engine`: built once, runs many requests of every task its weights declare."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import launch, ops
from .conditioning import Cache
from .config import EngineConfig, check_config, resolve
from .decoding import decode
from .errors import Cancelled
from .finish import Ending, finish, has_picture
from .machine import cuda_memory
from .noise import Rows
from .output import OutputOptions, check_output, check_space
from .output.latents import Latents, load_latents
from .output.report import hash_frames, hash_waveform, versions
from .output.write import Media
from .parallel.team import agreed
from .parts import Parts
from .pipeline import sample
from .plan import Plan
from .request import Request
from .request_json import request_to_json
from .spec import Spec
from .topology import Sizes, at_seat, choose_mesh, choose_strategy, describe_mesh, num_ranks
from .watch import Boundary, Event, Stages, Watch, ignore, pass_by
from .weights import locate, read_spec, stored_bytes


class Engine:
    """One model on one device, or on several, each with a process of its own. Not re-entrant: a second `generate` waits
    for the first.

    Raises ConfigError or CheckpointError when it cannot be built; no weight is read before the first request. Under a
    launcher (torchrun) every process makes an engine and calls the same methods; rank 0 writes and returns the report,
    the others return an empty one.
    """

    def __init__(
        self, config: EngineConfig | None = None, cache: Cache | None = None, place: launch.Seat | None = None
    ) -> None:
        self.config = config or EngineConfig()
        check_config(self.config)
        self.checkpoint = locate(_model_path(self.config), self.config.components)
        self.spec = read_spec(self.checkpoint)
        self._turn = threading.Lock()
        self._cancel = threading.Event()
        self._ranks: launch.Ranks | None = None
        place = place or launch.seat()
        count = num_ranks(self.config, place)
        mesh, why = choose_mesh(self.config, count, _sizes(self.spec, self.config))
        if place is None and count > 1:
            self._ranks = launch.Ranks((self.config, cache), count)
            return
        choices = resolve(at_seat(self.config, place), self.spec.dit.head_dim)
        strategy, attend, reason = choose_strategy(self.config, mesh, choices, self.spec.dit)
        backend = "nccl" if choices.device.type == "cuda" else "gloo"
        parallel = place.join(mesh, strategy, backend) if place else None
        self.parts = Parts(self.checkpoint, self.spec, choices, self.config.residency, cache, parallel=parallel)
        self.team = self.parts.team
        self._topology = describe_mesh(mesh, attend) | {"why": why | {"attend": reason}}

    def generate(self, request: Request, watch: Watch = ignore, boundary: Boundary | None = None) -> Media:
        """Run `request` to frames and sound in memory; `boundary` gets the values between stages.

        Raises RequestError, Cancelled, FloatingPointError.
        """
        with self._turn:
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
        output = output or OutputOptions()
        with self._turn:
            if self._ranks is not None:
                report: dict[str, Any] = self._ranks.run(("render", request, path, output), watch, boundary)
                return report
            stages = self._stages(watch, boundary)
            target = self.team.first(partial(check_output, path, output))
            latents = sample(request, self.parts, stages, self._vote, planned=partial(_check_room, target, output))
            return self._finish(latents, stages, Ending(target, output, self.config, self._origin(request)))

    def decode(
        self, latents: str | Path, path: str | Path, output: OutputOptions | None = None, watch: Watch = ignore
    ) -> dict[str, Any]:
        """Finish an interrupted run from its `latents` file, as `render` would have; returns the report.

        Raises RequestError for a file that holds no latents, CheckpointError for those of another model.
        """
        output, source = output or OutputOptions(), Path(latents).absolute()
        with self._turn:
            if self._ranks is not None:
                result: dict[str, Any] = self._ranks.run(("decode", source, path, output), watch, None)
                return result
            stages = self._stages(watch)
            target = self.team.first(partial(check_output, path, output, source))
            kept = self.team.first(partial(load_latents, source, self.spec))
            self.team.first(partial(_check_room, target, output, kept.latents.plan))
            report = {**kept.report, "decoded_by": {"engine": self.describe(), "versions": versions()}}
            return self._finish(kept.latents, stages, Ending(target, output, self.config, report, source))

    def cancel(self) -> None:
        """End the running request at its next step or clip; `generate` then raises Cancelled. Without one, no effect."""
        self._cancel.set()
        if self._ranks is not None:
            self._ranks.cancel()

    def close(self) -> None:
        """End the processes of an engine with several ranks; without a call they end with this process."""
        if self._ranks is not None:
            self._ranks.close()

    def describe(self) -> dict[str, Any]:
        """What this engine chose on this machine, and why."""
        if self._ranks is not None:
            return self._ranks.facts
        parts, choices = self.parts, self.parts.choices
        return {
            "model": str(parts.checkpoint.path),
            "layout": parts.checkpoint.layout,
            "tasks": list(parts.spec.tasks),
            "device": _device_name(choices.device),
            "dtypes": {
                "dit": str(choices.dtype).removeprefix("torch."),
                "conditioner": str(choices.dtype).removeprefix("torch."),
                "fp32_islands": "float32",
                "video_vae_encode": "tf32" if choices.tf32_encode else "float32",
                "video_vae_decode": str(choices.vae_compute).removeprefix("torch."),
                "audio_vae": "float32",
            },
            "vae_tile_batch": choices.tile_batch,
            "residency": parts.residency,
            "ops": ops.describe(choices.ops),
            "adaln": parts.adaln,
            "threads": choices.threads,
            "topology": self._topology,
            "why": dict(choices.why) | {"residency": parts.residency_why, "adaln": parts.adaln_why},
        }

    def _stages(self, watch: Watch, boundary: Boundary | None = None) -> Stages:
        """The stages of a new request; a cancel is heard at every event of theirs."""
        self._cancel.clear()

        def told(event: Event) -> None:
            watch(event)
            if self.team.control.size == 1:
                self._gate()

        if boundary is not None and not self.team.leads:
            boundary = pass_by  # the values are rank 0's to record, but every rank takes part in gathering them
        return Stages(told, self.parts.choices.device, boundary, self._gate)

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


def _check_room(target: Path, output: OutputOptions, plan: Plan) -> None:
    check_space(target, output, (plan.width, plan.height), plan.frames, plan.samples)


def _sizes(spec: Spec, config: EngineConfig) -> Sizes:
    dit = f"dit:{spec.partitions[0].name}"
    memory = min((each.total for each in cuda_memory()), default=None) if config.device != "cpu" else None
    return Sizes(spec.dit.heads, spec.text.kv_heads, stored_bytes(spec, dit), memory)


def _model_path(config: EngineConfig) -> Path | None:
    if config.model is not None:
        return Path(config.model)
    if config.components:
        return None
    from .demo import bundled_model

    return bundled_model()


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
