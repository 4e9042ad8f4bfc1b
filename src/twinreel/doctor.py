"""What this machine is, what an engine would choose on it, and what it lacks. No weight is loaded."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata, util
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .config import EngineConfig
from .machine import Card, cuda_memory

# Optional parts: what each is for, and what its absence costs.
PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "triton": (("triton",), "no --ops triton; plain PyTorch gives the same results with more passes over memory"),
    "fa3 (extra hopper)": (("fa3_fwd_interface",), "on H100 and H200 attention goes through cuDNN, which is slower"),
    "scikit-image (extra quality)": (
        ("skimage",),
        "compare and validate leave SSIM out, and no validate --bounds published",
    ),
    "server (extra serve)": (
        ("fastapi", "uvicorn", "prometheus_client", "python_multipart"),
        "no twinreel serve; generate --server works",
    ),
    "diffusers (extra parity)": (("diffusers",), "no validate --against diffusers, no tests of parity"),
    "rich": (("rich",), "no bars on a terminal"),
}
# What writes each kind of file: FFmpeg's encoders, as PyAV brings them.
ENCODERS: Mapping[str, tuple[str, str]] = {
    ".mp4": ("libx264", "aac"),
    ".mkv": ("libx264", "flac"),
    ".webm": ("libvpx-vp9", "libopus"),
}
# And what reads the media of most people.
DECODERS = ("h264", "hevc", "vp9", "av1", "mpeg4", "prores", "aac", "mp3", "opus", "vorbis", "flac", "pcm_s16le")


def examine(output: Path = Path("out.mp4")) -> dict[str, Any]:
    """What is here whatever is asked for: machine, library versions, what is missing, the free space beside `output`."""
    from .output.report import versions

    return {"machine": machine() | {"disk": disk(output)}, "versions": versions(), "parts": parts() | codecs()}


def choices(config: EngineConfig) -> dict[str, Any]:
    """`Engine.describe()` for `config`. Raises ConfigError or CheckpointError."""
    from contextlib import closing

    from .engine import Engine

    with closing(Engine(config)) as engine:
        return engine.describe()


def machine() -> dict[str, Any]:
    """Processor, memory and CUDA devices with their free memory; opens no context on these, so that ranks may."""
    import torch

    facts: dict[str, Any] = {"platform": platform.platform(), "cpus": os.cpu_count()}
    if sys.platform == "linux":
        facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    facts["cuda"] = torch.version.cuda or "this build of torch is for CPUs"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        facts["cuda"] += "; no CUDA device: everything runs on the CPU in fp32, for the miniature and small checks only"
    for number, card in zip_longest(range(count), cuda_memory()[:count]):
        facts[f"cuda:{number}"] = _told(card) if card and card.total else "the driver does not tell its memory"
    return facts


def _told(card: Card) -> str:
    free = f"{card.free / 2**30:.1f} of " if card.told else ""
    how = "free" if card.told else "in all; the driver does not tell what is free"
    return f"{card.name}, {free}{card.total / 2**30:.1f} GiB {how}"


def disk(output: Path) -> str:
    """Free space of the folder that `output` would lie in, and whether it may be written to."""
    folder = output.absolute().parent
    if not folder.is_dir():
        return f"{folder} does not exist"
    free = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free in {folder}"
    return free if os.access(folder, os.W_OK) else f"{free}, which may not be written to"


def parts(wanted: Mapping[str, tuple[tuple[str, ...], str]] = PARTS) -> dict[str, str]:
    """Each optional part: its version, or what is missing and what that costs. Imports none."""
    found = {}
    for name, (modules, cost) in wanted.items():
        absent = [module for module in modules if util.find_spec(module) is None]
        found[name] = f"absent ({', '.join(absent)}): {cost}" if absent else _version(modules[0])
    return found


def codecs() -> dict[str, str]:
    """The kinds of file that PyAV's FFmpeg can write here, and the codecs it can read."""
    try:
        import av
    except ImportError as error:
        return {"PyAV": f"absent ({error}): only pictures and WAV are read, only .wav, .npz and PNG frames are written"}
    known = av.codec.codecs_available
    found = {}
    for suffix, (picture, sound) in ENCODERS.items():
        absent = [name for name in (picture, sound) if not _writes(av, name)]
        lack = f"absent ({', '.join(absent)}): no {suffix} files"
        found[f"writes {suffix}"] = lack if absent else f"{picture} and {sound}"
    absent = [name for name in DECODERS if name not in known]
    found["reads"] = ", ".join(name for name in DECODERS if name in known)
    if absent:
        found["does not read"] = f"{', '.join(absent)}: convert such media first"
    return found


def _writes(av: Any, name: str) -> bool:
    try:
        av.codec.Codec(name, "w")
    except ValueError:  # av's UnknownCodecError
        return False
    return True


def _version(module: str) -> str:
    packages = metadata.packages_distributions().get(module.partition(".")[0], [])
    return f"{packages[0]} {metadata.version(packages[0])}" if packages else "present"
