"""Makes processor.json: what transformers' and diffusers' own code says of pictures, videos and a whole presentation.

It needs torchvision, which locks torch to one version and is therefore no dependency of ours; run it in an environment
of its own (made with torch 2.14.1, torchvision 0.29.1, diffusers 0.42.1, transformers 5.24.0):

    PYTHONPATH=src:tests python tests/golden/make_processor_golden.py ../shared/release

tests/test_presentation.py imports the cases below, runs ours over them and compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("processor.json")
BUDGETS = {  # (image least, image most, video least, video most) in pixels
    "released": (65_536, 16_777_216, 4_096, 25_165_824),
    "small": (16_384, 65_536, 8_192, 262_144),
}
IMAGES = (  # (budget, height, width)
    ("released", 256, 256), ("released", 512, 896), ("released", 96, 160), ("released", 200, 333),
    ("small", 320, 512), ("small", 500, 300), ("small", 32, 64), ("small", 250, 1000),
)  # fmt: skip
VIDEOS = (  # (budget, sampled frames, height, width)
    ("released", 2, 96, 128), ("released", 5, 256, 160), ("released", 31, 768, 1344),
    ("small", 7, 160, 288), ("small", 3, 32, 64), ("small", 25, 128, 96), ("small", 6, 500, 333), ("small", 2, 16, 40),
)  # fmt: skip
# One request with every kind of reference: (kind, frames at 24 fps, height, width, carries sound).
REFERENCES = (
    ("image", 1, 256, 288, False),
    ("audio", 0, 0, 0, True),
    ("video", 61, 128, 160, True),
    ("image", 1, 96, 128, False),
    ("video", 22, 96, 96, False),
)
PROMPT = (
    "The woman of <Picture 1> says <d>Grüß Gott, it's 12:30!</d>\n<|lyrics_start|>la la<|lyrics_end|>  second  verse"
)


def picture(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Pixels from integer arithmetic alone, uint8 [n, H, W, 3]: ramps with hash noise, moving from frame to frame."""
    y, x, c = np.ogrid[0:height, 0:width, 0:3]
    scramble = (y * 73_856_093) ^ (x * 19_349_663) ^ ((c + 3 * seed) * 83_492_791)
    noise = (scramble * 2_654_435_761 >> 17) % 97
    base = ((x * (3 + c) + y * (5 - c)) // 4 + noise).astype(np.uint8)
    return np.stack([np.roll(base, 5 * frame, axis=1) + np.uint8(3 * frame) for frame in range(frames)])


def facts(pixels: Any, grid: Any) -> dict[str, Any]:
    """What is kept of a patch tensor: grid, hash of its float32 bytes, and figures to look at when the hash moves."""
    array = np.ascontiguousarray(pixels, dtype=np.float32)
    return {
        "grid": np.asarray(grid).tolist(),
        "sha256": hashlib.sha256(memoryview(array).cast("B")).hexdigest(),
        "sum": float(array.sum(dtype=np.float64)),
        "abs_sum": float(np.abs(array).sum(dtype=np.float64)),
    }


def runs(values: Any) -> list[list[int]]:
    """[value, length] pairs."""
    return [[int(value), sum(1 for _ in members)] for value, members in groupby(np.asarray(values).tolist())]


def processors(budget: str) -> Any:
    """transformers' image and video processors with one set of pixel budgets, in the shape diffusers expects."""
    from types import SimpleNamespace

    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    image_least, image_most, video_least, video_most = BUDGETS[budget]
    common = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3
    }  # fmt: skip
    image = Qwen2VLImageProcessor(size={"shortest_edge": image_least, "longest_edge": image_most}, **common)
    video = Qwen3VLVideoProcessor(
        size={"shortest_edge": video_least, "longest_edge": video_most}, cap_pixels_per_frame=False, **common
    )
    return SimpleNamespace(image_processor=image, video_processor=video)


def presentation(tokenizer_folder: Path) -> dict[str, Any]:
    """The Ref2VA text encoder step of diffusers up to its model call."""
    import torch
    from diffusers.modular_pipelines.minimax_h3 import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
    )
    from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep
    from PIL import Image
    from transformers import Qwen2TokenizerFast

    references: list[Any] = []
    for seed, (kind, frames, height, width, sounding) in enumerate(REFERENCES):
        sound = {"audio": torch.zeros(2, 32_000), "sample_rate": 32_000} if sounding else {}
        if kind == "image":
            references.append(MiniMaxH3ImageReference(image=Image.fromarray(picture(1, height, width, seed)[0])))
        elif kind == "video":
            references.append(MiniMaxH3VideoReference(frames=picture(frames, height, width, seed), fps=24.0, **sound))
        else:
            references.append(MiniMaxH3AudioReference(**sound))
    step = MiniMaxH3Ref2VATextEncoderStep()
    tokenizer = Qwen2TokenizerFast.from_pretrained(str(tokenizer_folder), local_files_only=True)
    inputs, images, videos, times = step._gather_vision_features(processors("released"), references, 24)
    ids, tags = step._build_presentation(tokenizer, PROMPT, references, images, videos, times)
    return {
        "ids": runs(ids),
        "tags": runs(tags),
        "timestamps": times,
        "images": facts(inputs["pixel_values"], inputs["image_grid_thw"]),
        "videos": facts(inputs["pixel_values_videos"], inputs["video_grid_thw"]),
    }


def main() -> None:
    import torch
    import torchvision
    import transformers

    from tiny_tokenizer import write_tokenizer

    images, videos = [], []
    for budget, height, width in IMAGES:
        out = processors(budget).image_processor(images=[picture(1, height, width)[0]], return_tensors="pt")
        images.append(facts(out["pixel_values"], out["image_grid_thw"][0]))
    for budget, frames, height, width in VIDEOS:
        out = processors(budget).video_processor(
            videos=[picture(frames, height, width)], do_sample_frames=False, return_tensors="pt"
        )
        videos.append(facts(out["pixel_values_videos"], out["video_grid_thw"][0]))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tiny = presentation(Path(folder))
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, transformers)}
    released = presentation(Path(sys.argv[1]) / "tokenizer")
    record = {"made_with": versions, "images": images, "videos": videos, "tiny": tiny, "released": released}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    FILE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
