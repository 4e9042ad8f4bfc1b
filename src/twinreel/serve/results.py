"""What a finished job leaves in its folder, besides the MP4: sound, latents, a report without paths, the outcome."""

from __future__ import annotations

import json
import os
import sys
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, RequestError
from ..output import OutputOptions, latents_path
from ..output.latents import load_latents
from ..output.placing import replacing
from ..output.report import sidecar_path, warnings_of
from ..spec import SAMPLE_RATE, Spec
from .runner import outcome_file

VIDEO, SOUND, KEPT = "video.mp4", "sound.wav", "latents.safetensors"
FULL_SCALE = 32767
TYPES = {
    "video": ("video.mp4", "video/mp4"),
    "audio": (SOUND, "audio/wav"),
    "latents": (KEPT, "application/octet-stream"),
    "report": ("video.json", "application/json"),
    "frames": ("frames.zip", "application/zip"),
}


class Results:
    """Collects one job's files in `folder`; `options`: `keep_latents`."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.target = folder / VIDEO
        # whatever an earlier attempt left under these names is ours to replace
        self.output = OutputOptions(overwrite=True)

    def boundary(self, name: str, values: Mapping[str, Any]) -> None:
        """Write the waveform as it passes."""
        if name == "waveform":
            write_wav(self.folder / SOUND, np.asarray(values["samples"]))

    def keep_latents(self) -> None:
        """Give the latents that the engine has just saved a second name, which outlives the engine's own."""
        saved, kept = latents_path(self.target), self.folder / KEPT
        if saved.exists() and not kept.exists():
            os.link(saved, kept)

    def finish(self, report: Mapping[str, Any], resumed: bool) -> dict[str, Any]:
        """Write the outcome, the last file of all, and return it."""
        self._clean_report()
        if not (self.folder / SOUND).exists():
            extract_sound(self.target, self.folder / SOUND)
        dropped = () if self.options["keep_latents"] else (KEPT,)
        names = {kind: name for kind, (name, _) in TYPES.items() if name not in dropped}
        present = {kind: name for kind, name in names.items() if (self.folder / name).exists()}
        plan, stages = report["plan"], report["stages"]
        policy = report.get("policy", {})
        outcome = {
            "files": present,
            "sizes": {name: (self.folder / name).stat().st_size for name in present.values()},
            "sha256": report["sha256"],
            "steps": plan["steps"],
            "calls": policy.get("calls", plan["calls"]),
            "stages": {name: record["seconds"] for name, record in stages.items()},
            "peaks": {name: record["peak_bytes"] for name, record in stages.items()},
            "cache": report.get("conditioning", {}),
            "warnings": [*warnings_of(report), *report.get("faults", ())],
            "resumed": resumed,
        }
        target = outcome_file(self.folder)
        with replacing(target) as temporary:
            temporary.write_text(json.dumps(outcome), encoding="utf-8")
        for name in dropped:  # not before: without an outcome they are all that is left of the sampling
            (self.folder / name).unlink(missing_ok=True)
        return outcome

    def _clean_report(self) -> None:
        """Names of files in place of the server's paths."""
        path = sidecar_path(self.target)
        text = path.read_text(encoding="utf-8")
        for form in {str(self.folder), json.dumps(str(self.folder))[1:-1]}:
            text = text.replace(f"{form}{os.sep}", "")
        report = json.loads(text)
        engine = report.get("engine", {})
        engine["model"] = Path(engine.get("model", "")).name
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def saved_latents(folder: Path, spec: Spec) -> Path | None:
    """Latents that an earlier attempt left, under the engine's own name; what `spec` cannot decode is removed."""
    own, kept = latents_path(folder / VIDEO), folder / KEPT
    if kept.exists() and not own.exists():  # a decode removes the name that it was given
        os.link(kept, own)
    if not own.exists():
        return None
    try:
        load_latents(own, spec)
    except (RequestError, CheckpointError) as error:
        if isinstance(error.__context__, OSError):  # of the disk or the system, which says nothing of the file
            raise
        print(f"saved latents are not used: {error}", file=sys.stderr)
        for path in (own, kept):
            path.unlink(missing_ok=True)
        return None
    return own


def write_wav(path: Path, samples: np.ndarray) -> None:
    """float32 `[2, n]` at 32 kHz as a 16-bit WAV, whole or not at all."""
    whole = np.clip(np.rint(samples.T * FULL_SCALE), -FULL_SCALE, FULL_SCALE).astype("<i2")
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(whole.tobytes())


def extract_sound(video: Path, path: Path) -> None:
    """The soundtrack of a finished file as WAV: what is left of the waveform after a resumed decode."""
    import av

    with av.open(str(video)) as container:
        parts = [frame.to_ndarray() for frame in container.decode(audio=0)]
    write_wav(path, np.concatenate(parts, axis=1).astype(np.float32))
