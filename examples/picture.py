"""Draw the picture of the second `make demo` example: a sun over the sea.

Provenance: every pixel is computed below; no photograph and no other person's work is in it. The PNG says so in its
own text fields, and the drawing is in the public domain (CC0).

    python examples/picture.py out/sea.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WIDTH, HEIGHT, HORIZON = 896, 512, 300
SUN_X, SUN_Y, SUN_RADIUS = 600, 210, 52


def draw() -> np.ndarray:
    """The scene as uint8 RGB [HEIGHT, WIDTH, 3]."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float64)
    down = np.clip(y / HORIZON, 0, 1)[..., None]
    picture = (1 - down) * (44, 66, 130) + down * (250, 176, 110)  # sky, dusk above and warm at the horizon

    from_sun = np.hypot(x - SUN_X, y - SUN_Y)
    glow = np.exp(-np.maximum(from_sun - SUN_RADIUS, 0) / 60)[..., None]
    picture += glow * ((255, 236, 190) - picture)

    depth = np.clip((y - HORIZON) / (HEIGHT - HORIZON), 0, 1)
    sea = (1 - depth)[..., None] * (196, 128, 104) + depth[..., None] * (18, 40, 74)
    waves = np.sin(y * 0.9 / (0.35 + depth) + 6 * np.sin(x / 90 + y / 23)) * (6 + 10 * depth)
    path = np.exp(-(((x - SUN_X) / (40 + 130 * depth)) ** 2)) * (0.35 + 0.3 * np.sin(y * 1.3 + np.sin(x / 11) * 2))
    sea += waves[..., None] + np.clip(path, 0, 1)[..., None] * ((255, 224, 170) - sea)
    picture = np.where((y >= HORIZON)[..., None], sea, picture)

    hill = HORIZON - 70 * np.exp(-(((x - 170) / 130) ** 2)) - 34 * np.exp(-(((x - 330) / 90) ** 2))
    picture = np.where(((y >= hill) & (y < HORIZON))[..., None], (58, 46, 72), picture)
    return np.clip(picture, 0, 255).astype(np.uint8)


def main(target: Path) -> None:
    """Write the drawing and its provenance to `target`."""
    note = PngInfo()
    note.add_text("Source", "computed by examples/picture.py of twinreel; no photograph")
    note.add_text("Copyright", "CC0 1.0, public domain")
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw()).save(target, pnginfo=note)
    print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/sea.png"))
