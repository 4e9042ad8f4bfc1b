"""What a finished job leaves in its folder, besides the MP4: sound, latents, a report without paths, the outcome."""

from __future__ import annotations

import json
import os
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..output import OutputOptions, latents_path
from ..output.placing import replacing
from ..output.report import sidecar_path, warnings_of
from ..spec import SAMPLE_RATE
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
        if not self.options["keep_latents"]:
            (self.folder / KEPT).unlink(missing_ok=True)
        present = {kind: name for kind, (name, _) in TYPES.items() if (self.folder / name).exists()}
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


def resumable(folder: Path) -> Path | None:
    """Latents that an earlier attempt left, or None."""
    # the engine's own first: the other name may be the same file, which a decode would not read and replace at once
    return next((path for path in (latents_path(folder / VIDEO), folder / KEPT) if path.exists()), None)


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
