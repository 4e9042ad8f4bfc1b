"""What an operator chooses, checked before a weight is loaded or a GPU touched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "bf16", "fp32")
VAE_ENCODES = ("fp32", "tf32")
RESIDENCIES = ("auto", "all", "stages")
ATTENDS = ("auto", "plain", "packed", "overlapped")
CONDITIONERS = ("auto", "split", "whole")
ADALNS = ("auto", "live", "precompute")
RESIDENT_SHARE = 0.8  # of the free device memory may be weights before `auto` drops parts between stages
COMPONENTS = ("transformer", "transformer_ref", "text_encoder", "tokenizer", "processor", "video_vae", "audio_vae")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. `auto` may pick, and says what it picked; a named choice works or raises ConfigError.

    Args:
        model: folder of the weights; None is the bundled miniature.
        components: folder by component name (`COMPONENTS`), over what `model` holds.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        precision: of the DiT and the conditioner: `auto` is bf16 on CUDA and fp32 on CPU. fp32 islands stay fp32.
        vae_encode: `fp32`, or `tf32` (CUDA only, faster, not exact).
        residency: `all` keeps every part loaded; `stages` drops a stage's parts after it; `auto` looks at free memory.
        ops: name of the ops table: `reference` (plain PyTorch), `triton`, or `auto`, which is `reference` until the
            kernels have run on a device.
        attention: `fa3`, `fa4`, `cudnn`, `flash`, `sdpa`, `math`, or `auto`: the fastest that works on this device.
        adaln: `live` keeps the projections that turn timesteps into modulation (two fifths of the DiT) loaded;
            `precompute` reads them once for each schedule and keeps tables, same bits; `auto` is `precompute` where
            parts leave the device between stages, otherwise `live`.
        threads: CPU threads; None keeps PyTorch's own count. More or fewer threads may change bits.
        gpus: ranks, one process a GPU (with `device="cpu"` that many processes on it); it must divide the DiT's heads.
            None is as many as the launcher (torchrun) started, without one 1.
        sp, tp: ranks over which the packed rows, and over which heads and feed-forward width are dealt out; their product
            is `gpus`. None: rows over all where the weights fit, tp for memory.
        attend: how rows and heads change places where sp > 1: `plain`, `packed` (one kernel normalises, turns and packs),
            `overlapped` (packed, half of the heads on their way while the other half is computed), or `auto`.
        conditioner: `split` over ranks by heads, `whole` on each, or `auto`: split as far as its heads go.
        allow_remote: fetch media from http(s) addresses. Whoever sends requests can then make this machine ask any
            address that it can reach.
    """

    model: str | None = None
    components: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    precision: str = "auto"
    vae_encode: str = "fp32"
    residency: str = "auto"
    ops: str = "auto"
    attention: str = "auto"
    adaln: str = "auto"
    threads: int | None = None
    gpus: int | None = None
    sp: int | None = None
    tp: int | None = None
    attend: str = "auto"
    conditioner: str = "auto"
    allow_remote: bool = False


@dataclass(frozen=True)
class Choices:
    """An `EngineConfig` with every `auto` resolved on this machine.

    `tile_batch` is how many tiles of the video VAE's decoder share a call: a constant of the machine kind, since another
    number rounds differently.
    """

    device: torch.device
    dtype: torch.dtype
    vae_compute: torch.dtype
    tile_batch: int
    tf32_encode: bool
    ops: Any
    adaln: str
    threads: int
    why: Mapping[str, str]
    allow_remote: bool = False


def check_config(config: EngineConfig) -> None:
    """Refuse what no machine could run. Raises ConfigError; imports no torch."""
    if config.precision in ("fp16", "float16", "half"):
        raise ConfigError(
            "precision: fp16 is refused: the DiT's residual passes 65,504, fp16's largest; use bf16 or fp32"
        )
    for name, allowed in (
        ("precision", PRECISIONS), ("vae_encode", VAE_ENCODES), ("residency", RESIDENCIES), ("adaln", ADALNS),
        ("attend", ATTENDS), ("conditioner", CONDITIONERS),
    ):  # fmt: skip
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(f"{name}: got {value!r}; use {', '.join(allowed)}")
    if not isinstance(config.allow_remote, bool):
        raise ConfigError(f"allow_remote: got {config.allow_remote!r}; use True or False")
    _check_types(config)
    for name, folder in config.components.items():
        if name not in COMPONENTS:
            raise ConfigError(f"components: got {name!r}; use {', '.join(COMPONENTS)}")
        _check_folder(f"components[{name!r}]", folder)
    for name in ("gpus", "sp", "tp"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024):
            raise ConfigError(f"{name}: got {value!r}; a whole number from 1, or leave it out")
    if (config.gpus or 1) > 1 and config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {config.device!r} for {config.gpus} ranks; use auto, cuda or cpu")
    threads = config.threads
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
        raise ConfigError(f"threads: got {config.threads!r}; from 1 to 1024, or leave it out")


def _check_types(config: EngineConfig) -> None:
    if config.model is not None:
        _check_folder("model", config.model)
    if not isinstance(config.components, Mapping):
        raise ConfigError(
            f"components: got {config.components!r}; use folders by name, as in {{'transformer': 'path'}}"
        )
    for name in ("device", "ops", "attention"):
        if not isinstance(getattr(config, name), str):
            raise ConfigError(f"{name}: got {getattr(config, name)!r}; use a name such as auto")


def _check_folder(name: str, folder: object) -> None:
    if not isinstance(folder, str | os.PathLike) or not folder:
        raise ConfigError(f"{name}: got {folder!r}; use the path of a folder")


def resolve(config: EngineConfig, head_dim: int = 128) -> Choices:
    """Settle every `auto` for this machine. Raises ConfigError for what it cannot do; loads no weight.

    `head_dim` is the DiT's: not every attention kernel takes every size.
    """
    import torch

    from . import ops

    check_config(config)
    device = _device(config.device)
    cuda = device.type == "cuda"
    if config.vae_encode == "tf32" and not cuda:
        raise ConfigError(f"vae_encode: tf32 needs a CUDA device, this run is on {device}; use fp32")
    names = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = names.get(config.precision) or (torch.bfloat16 if cuda else torch.float32)
    try:
        table = ops.select(config.ops, device, config.attention, dtype=dtype, head_dim=head_dim)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    why = {
        "device": "asked for" if config.device != "auto" else f"CUDA is {'' if cuda else 'not '}available",
        "precision": "asked for" if config.precision != "auto" else f"auto on {device.type}",
        **table.why,
        "vae_decode": "the released recipe: fp16 products over fp32 weights" if cuda else "fp32 on CPU",
        "threads": "asked for" if config.threads is not None else "PyTorch's own count",
    }
    return Choices(
        device=device,
        dtype=dtype,
        vae_compute=torch.float16 if cuda else torch.float32,
        tile_batch=4 if cuda else 1,
        tf32_encode=config.vae_encode == "tf32",
        ops=table,
        adaln=config.adaln,
        threads=config.threads or torch.get_num_threads(),
        why=why,
        allow_remote=config.allow_remote,
    )


def _device(name: str) -> torch.device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: got {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: got {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device: got {name!r}, and this machine shows {count} CUDA devices; use auto or cpu")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def set_flags(stage: str, choices: Choices) -> dict[str, Any]:
    """Set every backend flag that changes bits for `stage` (`encode`, `denoise`, `decode`) and return what was set.

    The only place that touches them. Reduced-precision reductions are off so that a split sum stays fp32.
    """
    import torch

    tf32_convolutions = stage == "encode" and choices.tf32_encode
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = tf32_convolutions
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(choices.threads)
    return {
        "matmul_tf32": False,
        "convolution_tf32": tf32_convolutions,
        "reduced_precision_reductions": False,
        "cudnn_benchmark": False,
        "cudnn_deterministic": True,
        "threads": choices.threads,
    }
