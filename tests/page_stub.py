"""For the tests of the page: a runner that makes a short real MP4 and previews without a model.

python tests/page_stub.py FOLDER MODEL     # serve it until Ctrl-C, to try the page by hand
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serve_stub import StubRunner, running
from twinreel.output.placing import replacing
from twinreel.serve.runner import Work, outcome_file

STEPS, FRAMES, WIDTH, HEIGHT = 6, 22, 112, 64


class PageRunner(StubRunner):
    """A prompt with `hold` waits at the third step for `go`; `fail` fails; `blind` has no previews."""

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__(seconds)
        self.go = threading.Event()

    def stop(self) -> None:
        self.go.set()
        super().stop()

    def run(self, work: Work) -> Iterator[dict[str, Any]]:
        self.ran.append(work.id)
        prompt, folder = work.body["prompt"], Path(work.folder)
        for step in range(STEPS):
            eta = (STEPS - step) * self.seconds
            yield {"event": "progress", "stage": "denoise", "done": step, "total": STEPS, "eta": eta, "note": ""}
            if "blind" not in prompt:
                draw_preview(folder / "preview.webp", step)
                yield {"event": "preview", "file": "preview.webp"}
            while step == 3 and "hold" in prompt and not self.go.wait(0.02):
                if work.id in self._cancelled:
                    break
            time.sleep(self.seconds)
            if work.id in self._cancelled:
                yield {"event": "cancelled"}
                return
        if "fail" in prompt:
            yield {"event": "failed", "kind": "FloatingPointError", "field": None, "message": "step 3: not finite"}
            return
        yield {"event": "progress", "stage": "decode", "done": FRAMES, "total": FRAMES, "eta": 0.0, "note": ""}
        yield {"event": "done", "outcome": write_outcome(folder, work.body["seed"])}


def scene(frame: int, seed: int) -> np.ndarray:
    """One frame uint8 `[64, 112, 3]`: a disc that rolls to the right; the last one is wholly blue."""
    if frame == FRAMES - 1:
        return np.full((HEIGHT, WIDTH, 3), (30, 30, 220), np.uint8)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    picture = np.stack([x * 2, y * 3, np.full_like(x, 40 + seed % 40)], -1).clip(0, 255).astype(np.uint8)
    picture[(x - 10 - 4 * frame) ** 2 + (y - 40) ** 2 < 144] = (240, 200, 60)
    return picture


def draw_preview(path: Path, step: int) -> None:
    """An animated WebP of one pixel a latent, as the server's own."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (3, 8, 14, 3))
    share = step / STEPS
    small = [scene(i * 6, 0)[::8, ::8] * share + noise[i] * (1 - share) for i in range(3)]
    pictures = [Image.fromarray(frame.astype(np.uint8)) for frame in small]
    with replacing(path) as temporary:
        pictures[0].save(temporary, "WEBP", save_all=True, append_images=pictures[1:], duration=140, loop=0)


def write_outcome(folder: Path, seed: int) -> dict[str, Any]:
    """The files of a finished job, and its outcome."""
    import av

    with av.open(str(folder / "video.mp4"), "w") as container:
        stream = container.add_stream("libx264", 24)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for frame in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(scene(frame, seed), "rgb24")))
        container.mux(stream.encode())
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((2, 2, 32000, 0, "NONE", ""))
        sound.writeframes(bytes(4 * 3200))
    (folder / "video.json").write_text(json.dumps({"seed": seed, "stages": {"denoise": {"seconds": 1.25}}}))
    files = {"video": "video.mp4", "audio": "sound.wav", "report": "video.json"}
    outcome = {
        "files": files,
        "sizes": {name: (folder / name).stat().st_size for name in files.values()},
        "sha256": {"file": "0" * 64},
        "steps": 50,
        "calls": 49,
        "stages": {"denoise": 1.25},
        "peaks": {"denoise": 1000},
        "cache": {},
        "warnings": [],
    }
    outcome_file(folder).write_text(json.dumps(outcome))
    return outcome


def main() -> None:
    """Serve the page with the stub."""
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    runner = PageRunner(1.0)
    with running(folder, model, runner) as server:
        print(server.url, flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()
