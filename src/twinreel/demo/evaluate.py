"""The fixed evaluation: what the bundled model does with scenes that it never saw, read off pixels and sound.

`python -m twinreel.demo.train evaluate --model FOLDER --folder OUT --count 200` writes `OUT/evaluation.json`.
Requests go through the public `Engine`, as a person's would.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..media.landing import land
from ..media.pixels import normalise, quantise
from ..parts import Parts
from ..request import Keyframe, Reference, Request
from ..sources import Picture, Sound
from ..watch import Stages, ignore
from .captions import VARIANTS, Caption, caption
from .data import EVALUATION_SEED, REFERENCE_SECONDS
from .measure import listen, psnr, score, summarise
from .scenes import (
    RATE,
    Scene,
    render_audio,
    render_reference_image,
    render_reference_sound,
    render_video,
    sample_scene,
)

ScoreAll = Callable[[Sequence["Trial"]], Iterator[dict[str, Any]]]
FIRST_SEED = EVALUATION_SEED + 100_000  # apart from the scenes that training looks at now and then
TASKS = ("t2va", "first", "last", "image", "image+audio")


@dataclass(frozen=True)
class Trial:
    """One request and the scene that it asks for; `keyframe` is the picture it must show, uint8 [H, W, 3]."""

    task: str
    scene: Scene
    said: Caption
    request: Request
    keyframe: np.ndarray | None = None


def trials(task: str, count: int) -> Iterator[Trial]:
    """The fixed trials of a task, from unseen seeds; captions take turns."""
    for i in range(count):
        scene = sample_scene(FIRST_SEED + 10_000 * TASKS.index(task) + i, count=1 if "image" in task else None)
        yield make_trial(task, scene, i % VARIANTS, seed=i)


def make_trial(task: str, scene: Scene, variant: int, seed: int) -> Trial:
    """The request of a task for one scene."""
    said = caption(
        scene, variant, first=task == "first", last=task == "last",
        picture="image" in task, audio=task == "image+audio" and scene.things[0].sound != "none",
    )  # fmt: skip
    keyframe: np.ndarray | None = None
    frames: tuple[Keyframe, ...] = ()
    references: list[Reference] = []
    if task in ("first", "last"):
        index = 0 if task == "first" else scene.frames - 1
        keyframe = render_video([scene], "cpu", torch.tensor([index]))[0, 0].numpy()
        frames = (Keyframe(Picture(keyframe), 0 if task == "first" else -1),)
    if "image" in task:
        references.append(Reference("image", Picture(render_reference_image(scene.things[0]).numpy())))
    if task == "image+audio":
        alone = render_reference_sound(scene.things[0], seconds=REFERENCE_SECONDS).numpy()
        references.append(Reference("audio", Sound(alone, RATE)))
    seconds = (scene.frames - 4) / 24  # any length in the last clip gives the scene's own
    request = Request(
        said.text, keyframes=frames, references=tuple(references), duration=seconds, size=(scene.width, scene.height),
        seed=seed,
    )  # fmt: skip
    return Trial(task, scene, said, request, keyframe)


def judge(trial: Trial, frames: np.ndarray, waveform: np.ndarray) -> dict[str, Any]:
    """Scores of one result; with a keyframe its PSNR, with references what of them came through."""
    says = set(trial.said.says) | ({"color", "shape"} if "image" in trial.task else set())
    if trial.task == "image+audio":
        says |= {"pitch"}  # told by the referenced sound
    found = score(trial.scene, frames, waveform, says)
    if trial.keyframe is not None:
        found["keyframe_psnr"] = psnr(frames[0 if trial.task == "first" else -1], trial.keyframe)
    return found


def gather(scores: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`measure.summarise`, and the keyframes' PSNR."""
    found = summarise(scores)
    values = [one["keyframe_psnr"] for one in scores if "keyframe_psnr" in one]
    if values:
        found |= {
            "keyframe_psnr_median": float(np.median(values)),
            "keyframe_psnr_p10": float(np.quantile(values, 0.1)),
        }
    return found


# ---- the VAEs alone -------------------------------------------------------------------------------------------------


def ssim(one: np.ndarray, other: np.ndarray) -> float:
    """Mean structural similarity of uint8 frames [F, H, W, 3]: 7x7 windows, every channel alone."""
    a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).double() / 255.0 for x in (one, other))

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 7, 1)

    ma, mb = mean(a), mean(b)
    va, vb, cov = mean(a * a) - ma * ma, mean(b * b) - mb * mb, mean(a * b) - ma * mb
    c1, c2 = 0.01**2, 0.03**2
    return float(((2 * ma * mb + c1) * (2 * cov + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2))).mean())


@torch.inference_mode()
def reconstruct(scene: Scene, parts: Parts) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """A scene through both VAEs: frames, waveform and their distance to what went in."""
    device = parts.choices.device
    true, sound = render_video([scene], "cpu")[0].numpy(), render_audio([scene], "cpu")[0]
    names = ("video_encoder", "audio_encoder", "video_decoder", "audio_decoder")
    with parts.resident(Stages(ignore, device), *names):
        mean, _ = parts["video_encoder"].encode(normalise(true, device))
        clips = land((quantise(clip, "nearest"),) for clip in parts["video_decoder"].clips(mean))
        frames = np.concatenate([pixels for (pixels,) in clips]).reshape(true.shape)
        heard = parts["audio_decoder"].decode(parts["audio_encoder"].encode(sound.to(device))).cpu()
    facts = {"psnr": psnr(frames, true), "ssim": ssim(frames, true)}
    if scene.things[0].sound != "none":
        power, error = sound.square().sum(), (heard - sound).square().sum()
        ratio = listen(heard).hertz / scene.things[0].hertz
        facts |= {"audio_snr": float(10 * torch.log10(power / error)), "log_spectral_db": log_spectral(heard, sound)}
        facts |= {"pitch_error": abs(ratio - 1)}
    return frames, heard.numpy(), facts


def log_spectral(one: Tensor, other: Tensor) -> float:
    """Root mean square distance in dB of magnitude spectra (1024, hop 256) where either is above -60 dB of the peak."""
    a, b = (torch.stft(x, 1024, 256, window=torch.hann_window(1024), return_complex=True).abs() for x in (one, other))
    floor = 1e-3 * b.max()
    loud = (a > floor) | (b > floor)
    apart = 20 * (torch.log10(a.clamp(min=floor)) - torch.log10(b.clamp(min=floor)))
    return float(apart[loud].square().mean().sqrt())


def check_vaes(parts: Parts, count: int) -> dict[str, Any]:
    """Figures of `count` unseen scenes through the VAEs, and what the measures say of them: the ceiling of the DiT."""
    facts, scores = [], []
    for i in range(count):
        scene = sample_scene(FIRST_SEED + 90_000 + i)
        frames, waveform, found = reconstruct(scene, parts)
        facts.append(found)
        scores.append(score(scene, frames, waveform))
    names = dict.fromkeys(name for found in facts for name in found)
    values = {name: [found[name] for found in facts if name in found] for name in names}
    result: dict[str, Any] = {f"{name}_mean": float(np.mean(v)) for name, v in values.items()}
    result |= {f"{name}_p10": float(np.quantile(v, 0.1)) for name, v in values.items()}
    result["pitch_within_1_percent"] = float(np.mean([v < 0.01 for v in values.get("pitch_error", [0.0])]))
    return result | {"measured": summarise(scores)}


# ---- everything -----------------------------------------------------------------------------------------------------


def _shortened(trial: Trial, steps: int | None) -> Trial:
    return trial if steps is None else replace(trial, request=replace(trial.request, steps=steps))


class Judge:
    """One process's engine: makes and judges one trial after another."""

    def __init__(self, model: Path, devices: Sequence[str], turns: Any = None) -> None:
        # The public door, as a user of the package: evaluation is no part of what generates.
        from twinreel import Engine, EngineConfig

        device = devices[0] if turns is None else devices[turns.get() % len(devices)]
        self.engine = Engine(EngineConfig(model=str(model), device=device, ops="reference"))

    def __call__(self, trial: Trial) -> dict[str, Any]:
        media = self.engine.generate(trial.request)
        return judge(trial, media.video, media.audio)


_judge: list[Judge] = []  # a worker's own


def _begin(*arguments: Any) -> None:
    torch.set_num_threads(1)
    _judge.append(Judge(*arguments))


def _score(trial: Trial) -> dict[str, Any]:
    return _judge[0](trial)


def evaluate(
    score_all: ScoreAll, asked_for: dict[str, list[Trial]], path: Path, result: dict[str, Any]
) -> dict[str, Any]:
    """Run all trials (by task), writing `path` anew after each so that nothing is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for task, asked in asked_for.items():
        scores: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        begin = time.monotonic()
        for trial, found in zip(asked, score_all(asked), strict=True):
            scores.append(found)
            wrong = [name for name, value in found.items() if value is False or value is np.False_]
            if wrong:
                failures.append({"prompt": trial.said.text, "seed": trial.request.seed, "wrong": wrong})
            seconds = (time.monotonic() - begin) / len(scores)
            result[task] = {**gather(scores), "seconds_each": seconds, "failures": failures}
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{task}: {len(scores)} of {len(asked)}, {seconds:.1f} s each", flush=True)
    return result


def main(
    model: Path, path: Path, count: int, devices: Sequence[str], workers: int = 1, steps: int | None = None
) -> None:
    """`count` prompts of text to video, an eighth of that of every other task and for the VAEs; `workers` processes
    take turns on the devices. `steps` in place of the default, for a quick look."""
    here = Judge(model, devices)
    counts = dict.fromkeys(TASKS, -(-count // 8)) | {"t2va": count}
    asked_for = {task: [_shortened(trial, steps) for trial in trials(task, each)] for task, each in counts.items()}
    result = {"vae": check_vaes(here.engine.parts, -(-count // 8))}
    if workers == 1:
        found = evaluate(lambda asked: map(here, asked), asked_for, path, result)
    else:
        context = multiprocessing.get_context("spawn")
        turns = context.Manager().Queue()
        for turn in range(workers):
            turns.put(turn)
        with ProcessPoolExecutor(workers, context, _begin, (model, devices, turns)) as pool:
            found = evaluate(lambda asked: pool.map(_score, asked), asked_for, path, result)
    print(json.dumps(found, indent=1))
