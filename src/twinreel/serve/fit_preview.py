"""`python -m twinreel.serve.fit_preview [--model FOLDER] [CLIP ...]`: fit `preview.json`, the latent-to-RGB map of a model.

Clips are what the model's videos look like; without any, scenes of the bundled model's world are drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..complaint import explain
from ..demo import bundled_model
from ..engine import Engine, EngineConfig
from ..errors import TwinreelError
from ..media.read import read_source
from ..output import write_probe
from ..output.placing import replacing
from ..pipeline import encode_pixels
from ..request import Reference
from ..sources import Clip
from ..watch import Stages, ignore
from .preview import MAP, fit_map, paint

FRAMES = 22  # two clips of the video VAE, 7 latents: what each sample costs
SCENES = 24


def main(words: list[str] | None = None) -> int:
    """Fit, write the map beside the weights, and print its error. Exit codes are those of `twinreel`; what refuses it is
    said in three lines."""
    parser = argparse.ArgumentParser(prog="python -m twinreel.serve.fit_preview", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the weights; default: the bundled miniature")
    parser.add_argument("clips", nargs="*", type=Path, help="video files")
    given = parser.parse_args(words)
    try:
        fit(given.model or bundled_model(), given.clips)
    except (TwinreelError, OSError) as error:
        print(explain(error, command="fit_preview"), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def fit(folder: Path, clips: list[Path]) -> None:
    """Make the map of the model in `folder`. Raises RequestError for a clip, CheckpointError for the model, OSError."""
    engine = Engine(EngineConfig(model=str(folder)))
    write_probe(folder / MAP)
    latents, colours = samples(engine, clips)
    rows = fit_map(latents, colours)
    painted = paint(np.ascontiguousarray(latents.T)[:, None, None], rows)[0, 0] / 255
    error = float(np.sqrt(np.mean((painted - colours) ** 2)))
    with replacing(folder / MAP) as temporary:
        temporary.write_text(json.dumps({"rows": [[round(float(v), 6) for v in row] for row in rows]}) + "\n")
    print(f"{folder / MAP}: {len(latents)} latents, root mean square error {error:.3f} of full scale")


def samples(engine: Engine, clips: list[Path]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Latents [n, C] and the mean RGB in [0, 1] of the pixels behind each, [n, 3]."""
    parts, spec = engine.parts, engine.spec.video
    latents, colours = [], []
    with parts.resident(Stages(ignore, parts.choices.device), "video_encoder"):
        for frames in windows(engine, clips):
            encoded = encode_pixels(frames, parts)[0].flatten(1).T
            latents.append(encoded.numpy())
            colours.append(behind(frames, spec.space, spec.time).reshape(-1, 3))
    return np.concatenate(latents), np.concatenate(colours)


def windows(engine: Engine, clips: list[Path]) -> Iterator[NDArray[np.uint8]]:
    """Runs of `FRAMES` frames, uint8 [22, H, W, 3]: two of each clip, or one of each scene."""
    if clips:
        for number, clip in enumerate(clips):
            read = read_source(Reference("video", str(clip)), engine.spec, 10 * FRAMES, f"clips[{number}]")
            assert isinstance(read, Clip)
            for start in {0, max(0, len(read.frames) - FRAMES)}:
                yield read.frames[start : start + FRAMES]
        return
    from ..demo.scenes import render_video, sample_scene

    for seed in range(SCENES):
        first = seed % 5 * 20
        yield render_video([sample_scene(seed)], "cpu", frames=list(range(first, first + FRAMES)))[0].numpy()


def behind(frames: NDArray[np.uint8], space: int, time: int) -> NDArray[np.float32]:
    """Mean RGB of the pixels behind each latent, [7, h, w, 3]: 1, 4, 4, 4, 4, 1, 4 frames of 16 x 16."""
    means = []
    start, index = 0, 0
    while start < len(frames):
        count = 1 if index % 5 == 0 else time
        part = frames[start : start + count].astype(np.float32) / 255
        n, height, width, _ = part.shape
        cells = part.reshape(n, height // space, space, width // space, space, 3)
        means.append(cells.mean(axis=(0, 2, 4)))
        start, index = start + count, index + 1
    return np.stack(means)


if __name__ == "__main__":
    sys.exit(main())
