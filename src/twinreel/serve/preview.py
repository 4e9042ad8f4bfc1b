"""A cheap look at the forming video: a linear map from latents to RGB, fitted once per model (`preview.json`).

After every step the clean video that the step's velocity points at is `x + sigma * v`; the map turns each of its
latents into one pixel. Models without a fitted map have no preview.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..output.placing import replacing
from ..small_files import why

if TYPE_CHECKING:
    from ..engine import Engine

MAP, PICTURE = "preview.json", "preview.webp"
SHARE = 0.1  # of a run's time that previews may take: one at every step, and fewer where steps are that short
MILLISECONDS = 140  # a latent frame stands for 17/5 frames at 24 a second
NONE_YET = "no latent-to-RGB map has been fitted for these weights, so there is no preview"


def load_map(folder: Path) -> NDArray[np.float32] | None:
    """The map of the weights in `folder`: float32 `[C + 1, 3]`, the last row added; None where none was fitted."""
    try:
        rows = np.asarray(json.loads((folder / MAP).read_text(encoding="utf-8"))["rows"], np.float32)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if rows.ndim == 2 and rows.shape[1] == 3 else None


def fit_map(latents: NDArray[np.float32], colours: NDArray[np.float32]) -> NDArray[np.float32]:
    """Least squares from latents `[n, C]` to RGB `[n, 3]` in [0, 1]: float32 `[C + 1, 3]` for `preview.json`."""
    ones = np.ones((len(latents), 1), np.float32)
    found = np.linalg.lstsq(np.concatenate([latents, ones], axis=1), colours, rcond=None)[0]
    return found.astype(np.float32)


def paint(latents: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Latents `[C, T, h, w]` to uint8 `[T, h, w, 3]`."""
    colours = np.moveaxis(latents, 0, -1) @ rows[:-1] + rows[-1]
    return (np.clip(colours, 0.0, 1.0) * 255).astype(np.uint8)


class Previewer:
    """Follows one run at its boundaries and writes `preview.webp`, then calls `made`; without a map it does nothing.

    `sizes`: latent frames, width and height of the target in pixels.
    """

    def __init__(self, engine: Engine, folder: Path, sizes: tuple[int, int, int], made: Callable[[str], None]) -> None:
        spec = engine.spec
        frames, width, height = sizes
        self._rows, self._patch = load_map(Path(engine.weights.path)), spec.dit.patch
        self._shape = frames, height // spec.video.space, width // spec.video.space
        self._made, self._folder = made, folder
        self._x: Any = None
        self._sigmas: list[float] = []
        self._last = self._took = 0.0
        self._told = False

    @property
    def active(self) -> bool:
        """Whether there is a map."""
        return self._rows is not None

    def boundary(self, name: str, values: Mapping[str, Any], part: int) -> None:
        """Follow the video rows through the steps."""
        if self._rows is None:
            return
        if name == "sigmas":
            self._sigmas = values["video"].tolist()
        elif name == "noise":
            self._x = values["video"]
        elif name == "velocity" and self._x is not None:
            self._step(values["video"], part)

    def _step(self, velocity: Any, step: int) -> None:
        self._x = self._x.to(velocity.device)
        sigma, after = self._sigmas[step], self._sigmas[step + 1]
        begun = time.monotonic()
        if begun - self._last >= self._took / SHARE or step + 2 == len(self._sigmas):
            self._show(self._x + sigma * velocity)
            self._last, self._took = begun, time.monotonic() - begun
        self._x = self._x + (sigma - after) * velocity

    def _show(self, clean: Any) -> None:
        """Write a preview and tell of it. One that cannot be written is left out: it must not cost the job its steps."""
        from ..layout import unpatchify

        count = math.prod(size // cut for size, cut in zip(self._shape, self._patch, strict=True))
        # condition rows stand in front
        latents = unpatchify(clean[-count:].float().cpu(), self._shape, self._patch)[0].numpy()
        try:
            self._write(latents)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:  # the disk's, and all that WebP raises
            if not self._told:
                print(f"previews are left out: {type(error).__name__}: {why(error)}", file=sys.stderr)
            self._told = True
        else:
            self._made(PICTURE)

    def _write(self, latents: NDArray[np.float32]) -> None:
        from PIL import Image

        assert self._rows is not None
        pictures = [Image.fromarray(frame) for frame in paint(latents, self._rows)]
        with replacing(self._folder / PICTURE) as temporary:
            first, rest = pictures[0], pictures[1:]
            first.save(temporary, "WEBP", save_all=True, append_images=rest, duration=MILLISECONDS, loop=0)
