"""Record the hashes of this machine kind into hashes.json: `python tests/golden/make_hashes.py [device]`.

A key is ops table, processor kind and torch version; a value is what the tiny checkpoint makes of three requests. A
hash that changes under an old key is a changed bit: say why in the commit that records it.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from twinreel import Clip, Engine, EngineConfig, Keyframe, Picture, Reference, Request, Sound  # noqa: E402
from twinreel.demo.tiny import write_tiny  # noqa: E402

FILE = Path(__file__).with_name("hashes.json")
THREADS = 2


def requests() -> dict[str, Request]:
    """The three requests, their media from a fixed generator."""
    rng = np.random.default_rng(2)
    picture = Picture(rng.integers(0, 256, (70, 100, 3), dtype=np.uint8))
    sound = Sound((0.1 * rng.standard_normal((2, 32_000))).astype(np.float32), 32_000)
    clip = Clip(rng.integers(0, 256, (24, 64, 64, 3), dtype=np.uint8), 24.0, sound)
    references = (Reference("image", picture), Reference("video", clip), Reference("audio", sound))
    return {
        "t2va": Request("A cat plays piano.", steps=4, duration=0.9),
        "fl2va": Request("Sea.", keyframes=(Keyframe(picture), Keyframe(picture, -1)), steps=4, duration=0.9),
        "ref2va": Request("<Picture 1>.", references=references, steps=4, duration=0.9),
    }


def processor(device: str) -> str:
    """What decides a CPU's or GPU's choice of kernels: its name, or for a CPU its vendor and vector width."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    vendor = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.machine())
    return f"cpu {vendor} {torch.backends.cpu.get_cpu_capability()}, {THREADS} threads"


def measure(device: str) -> tuple[str, dict[str, dict[str, str]]]:
    """This machine's key and the hashes of raw frames and waveform by request."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=str(write_tiny(folder)), device=device, threads=THREADS, attention="sdpa")
        engine = Engine(config)
        found = {name: engine.generate(request).report["sha256"] for name, request in requests().items()}
        key = f"{engine.parts.choices.ops.name} / {processor(device)} / torch {torch.__version__.split('+')[0]}"
    return key, found


if __name__ == "__main__":
    key, found = measure(*(sys.argv[1:] or ["cpu"]))
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    print(key, "is new" if key not in known else "is as recorded" if known[key] == found else "HAS CHANGED")
    FILE.write_text(json.dumps(dict(sorted((known | {key: found}).items())), indent=2) + "\n")
