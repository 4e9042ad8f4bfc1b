"""`Engine`: built once, runs many requests of every task its weights declare."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import ops
from .conditioning import Cache
from .config import EngineConfig, check_config, resolve
from .decoding import decode
from .errors import Cancelled
from .finish import Ending, finish
from .latents import load_latents
from .media_out import Media
from .noise import Rows
from .output import OutputOptions, check_output, check_space
from .parts import Parts
from .pipeline import sample
from .plan import Plan
from .report import hash_frames, hash_waveform, versions
from .request import Request
from .request_json import request_to_json
from .watch import Boundary, Event, Stages, Watch, ignore
from .weights import locate, read_spec


class Engine:
    """One model on one device. Not re-entrant: a second `generate` waits for the first.

    Raises ConfigError or CheckpointError when it cannot be built; no weight is read before the first request.
    """

    def __init__(self, config: EngineConfig | None = None, cache: Cache | None = None) -> None:
        self.config = config or EngineConfig()
        check_config(self.config)
        checkpoint = locate(_model_path(self.config), self.config.components)
        spec = read_spec(checkpoint)
        choices = resolve(self.config, spec.dit.head_dim)
        self.parts = Parts(checkpoint, spec, choices, self.config.residency, cache)
        self._turn = threading.Lock()
        self._cancel = threading.Event()

    def generate(self, request: Request, watch: Watch = ignore, boundary: Boundary | None = None) -> Media:
        """Run `request` to frames and sound in memory; `boundary` gets the values between stages.

        Raises RequestError, Cancelled, FloatingPointError.
        """
        with self._turn:
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
        target = check_output(path, output)
        with self._turn:
            stages = self._stages(watch, boundary)
            latents = sample(request, self.parts, stages, self._vote, planned=partial(_check_room, target, output))
            return finish(latents, self.parts, stages, Ending(target, output, self.config, self._origin(request)))

    def decode(
        self, latents: str | Path, path: str | Path, output: OutputOptions | None = None, watch: Watch = ignore
    ) -> dict[str, Any]:
        """Finish an interrupted run from its `latents` file, as `render` would have; returns the report.

        Raises RequestError for a file that holds no latents, CheckpointError for those of another model.
        """
        output, source = output or OutputOptions(), Path(latents).absolute()
        target = check_output(path, output, source)
        with self._turn:
            stages = self._stages(watch)
            kept = load_latents(source, self.parts.spec)
            _check_room(target, output, kept.latents.plan)
            report = {**kept.report, "decoded_by": {"engine": self.describe(), "versions": versions()}}
            return finish(kept.latents, self.parts, stages, Ending(target, output, self.config, report, source))

    def cancel(self) -> None:
        """End the running request at its next step or clip; `generate` then raises Cancelled. Without one, no effect."""
        self._cancel.set()

    def describe(self) -> dict[str, Any]:
        """What this engine chose on this machine, and why."""
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
            "why": dict(choices.why) | {"residency": parts.residency_why, "adaln": parts.adaln_why},
        }

    def _stages(self, watch: Watch, boundary: Boundary | None = None) -> Stages:
        """The stages of a new request; a cancel is heard at every event of theirs."""
        self._cancel.clear()

        def told(event: Event) -> None:
            watch(event)
            self._check_cancel()

        return Stages(told, self.parts.choices.device, boundary)

    def _vote(self, step: int, velocity: Rows) -> None:
        self._check_cancel()
        for modality in ("video", "audio"):
            if not torch.isfinite(getattr(velocity, modality)).all():
                raise FloatingPointError(
                    f"step {step}: the {modality} velocity holds values that are not finite; the weights, the "
                    "precision or a kernel is at fault: run `twinreel verify`, then try precision fp32 and ops reference"
                )

    def _check_cancel(self) -> None:
        if self._cancel.is_set():
            raise Cancelled("the request was cancelled")

    def _origin(self, request: Request) -> dict[str, Any]:
        return {"request": request_to_json(request), "engine": self.describe(), "versions": versions()}


def _check_room(target: Path, output: OutputOptions, plan: Plan) -> None:
    check_space(target, output, (plan.width, plan.height), plan.frames, plan.samples)


def _model_path(config: EngineConfig) -> Path | None:
    if config.model is not None:
        return Path(config.model)
    if config.components:
        return None
    from .demo.tiny import bundled_model

    return bundled_model()


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
