"""Draw the picture of the second `make demo` example: the first frame of a scene of the bundled model's world.

Provenance: every pixel is computed by `twinreel.demo.scenes`; no photograph and no other person's work is in it. The
PNG says so in its own text fields, and the drawing is in the public domain (CC0).

    python examples/picture.py out/still.png [SEED]
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from twinreel.demo.scenes import caption, render_video, sample_scene


def main(target: Path, seed: int = 4) -> None:
    """Write the drawing of `seed` and its provenance to `target`; print the sentence that goes on from it."""
    scene = sample_scene(seed, motion="slide", sound="hum", count=1)
    note = PngInfo()
    note.add_text("Source", "computed by examples/picture.py of twinreel; no photograph")
    note.add_text("Copyright", "CC0 1.0, public domain")
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(render_video([scene], "cpu", frames=1)[0, 0].numpy()).save(target, pnginfo=note)
    print(caption(scene, 0, first=True).text)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/still.png"), *map(int, sys.argv[2:3]))
