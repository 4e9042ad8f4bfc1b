"""`Engine`: built once, runs many requests of every task its weights declare."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import ops
from .config import EngineConfig, resolve
from .errors import Cancelled
from .media_out import Media, encoder_settings, write_video
from .noise import Rows
from .output import OutputOptions, check_output
from .parts import Parts
from .pipeline import Latents, decode, sample
from .report import hash_frames, hash_waveform, versions, write_report
from .request import Request
from .request_json import request_to_json
from .watch import Stages, Watch, ignore
from .weights import locate, read_spec


@dataclass(frozen=True)
class _Run:
    latents: Latents
    stages: Stages


class Engine:
    """One model on one device. Not re-entrant: a second `generate` waits for the first.

    Raises ConfigError or CheckpointError when it cannot be built; no weight is read before the first request.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        choices = resolve(self.config)
        checkpoint = locate(_model_path(self.config), self.config.components)
        self.parts = Parts(checkpoint, read_spec(checkpoint), choices, self.config.residency)
        self._turn = threading.Lock()
        self._cancel = threading.Event()

    def generate(self, request: Request, watch: Watch = ignore) -> Media:
        """Run `request` to frames and sound in memory. Raises RequestError, Cancelled, FloatingPointError."""
        with self._turn:
            run = self._sample(request, watch)
            with closing(self._decoded(run)) as parts:
                waveform = next(parts)
                clips = list(parts)
            video = np.concatenate(clips)
            report = self._report(request, run)
            report["sha256"] = {"frames": hash_frames(video), "waveform": hash_waveform(waveform)}
            return Media(video, waveform, report)

    def render(
        self, request: Request, path: str | Path, output: OutputOptions | None = None, watch: Watch = ignore
    ) -> dict[str, Any]:
        """Run `request` into the MP4 `path`, clip by clip, with its report beside it; returns the report.

        Raises what `generate` raises, and RequestError for a path that cannot be written.
        """
        output = output or OutputOptions()
        target = check_output(path, output)
        with self._turn:
            run = self._sample(request, watch)
            with closing(self._decoded(run)) as parts:
                waveform = next(parts)
                written = write_video(target, parts, waveform, crf=output.crf, preset=output.preset)
            report = self._report(request, run)
            report["encoder"] = encoder_settings(output.crf, output.preset)
            report["sha256"] = written.sha256
            report["path"] = str(target)
            write_report(target, report)
            return report

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
            "residency": parts.residency,
            "ops": ops.describe(choices.ops),
            "threads": choices.threads,
            "why": dict(choices.why) | {"residency": parts.residency_why},
        }

    def _sample(self, request: Request, watch: Watch) -> _Run:
        self._cancel.clear()
        stages = Stages(watch, self.parts.choices.device)
        return _Run(sample(request, self.parts, stages, self._vote), stages)

    def _decoded(self, run: _Run) -> Generator[np.ndarray, None, None]:
        with closing(decode(run.latents, self.parts, run.stages)) as parts:
            for part in parts:
                self._check_cancel()
                yield part

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

    def _report(self, request: Request, run: _Run) -> dict[str, Any]:
        return {
            "request": request_to_json(request),
            **run.latents.facts,
            "engine": self.describe(),
            "versions": versions(),
            "stages": run.stages.records,
        }


def _model_path(config: EngineConfig) -> Path | None:
    if config.model is not None:
        return Path(config.model)
    if config.components:
        return None
    from .demo.tiny import bundled_model

    return bundled_model()


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
