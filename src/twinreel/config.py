"""What an operator chooses, checked before a weight is loaded or a GPU touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .plain import make_plain, plain
from .precision import Fp8, parse_precision

if TYPE_CHECKING:
    import torch

    from .launch import Seat

VAE_ENCODES = ("fp32", "tf32", "fp16")
ATTENDS = ("auto", "plain", "packed", "overlapped")
CONDITIONERS = ("auto", "split", "fsdp", "whole")
ADALNS = ("auto", "live", "precompute")
DEVICE = re.compile(r"auto|cpu|cuda(?::(\d{1,4}))?")
MOST = 1024  # threads, ranks
ROW_UNIT = 8192  # rows that `row_chunk` counts in
MOST_ROWS = 1 << 20  # no request of the released limits has as many
COMPONENTS = ("transformer", "transformer_ref", "text_encoder", "tokenizer", "processor", "video_vae", "audio_vae")


@dataclass(frozen=True)
class Mode:
    """A residency: whether parts stay loaded between stages, which kinds of part run layer by layer, and whether these
    layers lie in files and not in host memory."""

    keep: bool
    streamed: tuple[str, ...] = ()
    mapped: bool = False

    def keeps(self, part: str) -> bool:
        """Whether `part` (`dit:ref2va`, ...) stays on the device after its stage."""
        return self.keep and not self.streams(part)

    def streams(self, part: str) -> bool:
        """Whether `part` runs layer by layer."""
        return part.partition(":")[0] in self.streamed


LAYERED = ("text_encoder", "dit", "modulation")
# From what needs the most memory of the device to what needs the least.
MODES: Mapping[str, Mode] = {
    "all": Mode(keep=True),
    "conditioner": Mode(keep=True, streamed=("text_encoder",)),
    "stages": Mode(keep=False),
    "layers": Mode(keep=False, streamed=LAYERED),
    "mapped": Mode(keep=False, streamed=LAYERED, mapped=True),
}
RESIDENCIES = ("auto", *MODES)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. `auto` may pick, and says what it picked; a named choice works or raises ConfigError.

    Args:
        model: folder of the weights; None is the bundled miniature.
        components: folder by component name (`COMPONENTS`), over what `model` holds.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        precision: of the DiT and the conditioner: `auto` is bf16 on CUDA and fp32 on CPU. fp32 islands stay fp32. `fp8`
            (bf16, but for products in the DiT's blocks; not exact) has fields: see `precision.Fp8`.
        vae_encode: `fp32` (with `ops="triton"` by Winograd's products: other sums, all of them fp32), or `tf32`
            or `fp16` (CUDA only, faster, not exact).
        residency: `all` keeps every part loaded; `conditioner` all but the conditioner, which runs layer by layer;
            `stages` drops a stage's parts after it; `layers` also runs DiT and conditioner layer by layer from
            page-locked host memory, `mapped` from the files; `auto` is the first of these that free memory and the
            request's estimate allow, on a CPU without `host_memory` always `all`. Same bits in all of them.
        host_memory: GiB of host memory that each process may use, on a CPU all its memory; a request that is predicted
            to need more is refused. None is what is free, and on a CPU no bound.
        row_chunk: packed rows that go through the row-wise parts of a block at a time, a multiple of 8,192 up to
            1,048,576, or 0 for all at once, as a request of no more rows than that goes anyway; None is 0 unless only
            chunks fit. On a GPU another value may change bits.
        ops: name of the ops table: `reference` (plain PyTorch), `triton`, or `auto`: `triton` where it can run.
        attention: `fa3`, `fa4`, `cudnn`, `flash`, `sdpa`, `math`, or `auto`: the fastest that works on this device.
        adaln: `live` keeps the projections that turn timesteps into modulation (two fifths of the DiT) loaded;
            `precompute` reads them once for each schedule and keeps tables, same bits; `auto` is `live` where nothing
            bounds memory (a CPU without `host_memory`) and where residency `all` fits so, otherwise `precompute`.
        threads: CPU threads; None keeps PyTorch's own count. More or fewer threads may change bits.
        gpus: ranks, one process a GPU (with `device="cpu"` that many processes on it); it must divide the DiT's heads.
            None is as many as the launcher (torchrun) started, without one 1.
        sp, tp: ranks over which the packed rows, and over which heads and feed-forward width are dealt out; their product
            is `gpus`. None: rows over all where the weights fit, tp for memory.
        attend: how rows and heads change places where sp > 1: `plain`, `packed` (one kernel normalises, turns and packs),
            `overlapped` (packed, half of the heads on their way while the other half is computed), or `auto`.
        conditioner: `split` over ranks by heads, `fsdp` (its weights spread over all ranks, each layer gathered when it is
            used: one rank's bits), `whole` on each, or `auto`: split as far as its heads go.
        allow_remote: fetch media from http(s) addresses. Whoever sends requests can then make this machine ask any
            address that it can reach.
    """

    model: str | None = None
    components: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    precision: str = "auto"
    vae_encode: str = "fp32"
    residency: str = "auto"
    host_memory: float | None = None
    row_chunk: int | None = None
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

    def __post_init__(self) -> None:
        make_plain(self, "model", "host_memory", "row_chunk", "threads", "gpus", "sp", "tp")
        if isinstance(self.components, Mapping):
            folders = {name: plain(folder) for name, folder in self.components.items()}
            object.__setattr__(self, "components", folders)


@dataclass(frozen=True)
class Choices:
    """An `EngineConfig` with every `auto` resolved on this machine.

    `tile_batch` is how many tiles of the video VAE's decoder share a call: a constant of the machine kind, since another
    number rounds differently. `fp8` is what of the DiT's blocks runs in e4m3, `fp8_ops` the table that these have.
    """

    device: torch.device
    dtype: torch.dtype
    vae_compute: torch.dtype
    tile_batch: int
    vae_encode: str
    ops: Any
    adaln: str
    threads: int
    why: Mapping[str, str]
    allow_remote: bool = False
    host_memory: float | None = None
    row_chunk: int | None = None
    fp8: Fp8 | None = None
    fp8_ops: Any = None

    @property
    def encode_compute(self) -> torch.dtype:
        """The dtype of the video VAE's encoder."""
        import torch

        return torch.float16 if self.vae_encode == "fp16" else torch.float32


def check_config(config: EngineConfig) -> None:
    """Refuse what no machine could run. Raises ConfigError; imports no torch."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config: got {config!r:.80}; give an EngineConfig, as in Engine(EngineConfig(model='path'))")
    parse_precision(config.precision)
    for name, allowed in (
        ("vae_encode", VAE_ENCODES), ("residency", RESIDENCIES), ("adaln", ADALNS),
        ("attend", ATTENDS), ("conditioner", CONDITIONERS),
    ):  # fmt: skip
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(f"{name}: got {value!r}; use {', '.join(allowed)}")
    if not isinstance(config.allow_remote, bool):
        raise ConfigError(f"allow_remote: got {config.allow_remote!r}; use True or False")
    _check_types(config)
    if not DEVICE.fullmatch(config.device):
        raise ConfigError(f"device: got {config.device[:80]!r}; use auto, cpu, cuda or cuda:N")
    for name, folder in config.components.items():
        if name not in COMPONENTS:
            raise ConfigError(f"components: got {name!r}; use {', '.join(COMPONENTS)}")
        _check_folder(f"components[{name!r}]", folder)
    for name in ("gpus", "sp", "tp", "threads"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST):
            raise ConfigError(f"{name}: got {value!r}; a whole number from 1 to {MOST}, or leave it out")
    _check_memory(config)
    check_one_device(config, config.gpus or 1)


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


def _check_memory(config: EngineConfig) -> None:
    room, chunk = config.host_memory, config.row_chunk
    if room is not None and (isinstance(room, bool) or not isinstance(room, int | float) or not 0 < room <= 1 << 20):
        raise ConfigError(f"host_memory: got {room!r:.80}; use GiB above 0, at most {1 << 20:,}, or leave it out")
    if chunk is not None and (type(chunk) is not int or not 0 <= chunk <= MOST_ROWS or chunk % ROW_UNIT):
        allowed = f"use a multiple of {ROW_UNIT:,} rows up to {MOST_ROWS:,}, 0 for all at once"
        raise ConfigError(f"row_chunk: got {chunk!r:.80}; {allowed}")


def check_one_device(config: EngineConfig, ranks: int) -> None:
    """Refuse what only an engine of one rank can do. Raises ConfigError."""
    if ranks > 1 and config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {config.device!r} for {ranks} ranks; use auto, cuda or cpu")
    mode = MODES.get(config.residency)
    if ranks > 1 and mode is not None and mode.streamed:
        raise ConfigError(f"residency: {config.residency} is for one GPU, and these are {ranks}; use all or stages")
    if ranks > 1 and config.row_chunk:
        raise ConfigError(f"row_chunk: is for one GPU, and these are {ranks}, each with fewer rows; leave it out")


def _check_folder(name: str, folder: object) -> None:
    if not isinstance(folder, str | os.PathLike) or not folder:
        raise ConfigError(f"{name}: got {folder!r}; use the path of a folder")
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass  # `weights.locate` says what is needed there
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name}: {str(folder)[:100]!r} cannot be looked at ({why}); use another path") from None


def resolve(config: EngineConfig, head_dim: int = 128, place: Seat | None = None) -> Choices:
    """Settle every `auto` for this machine. Raises ConfigError for what it cannot do; loads no weight.

    `head_dim` is the DiT's: not every attention kernel takes every size. `place`: of several ranks the one that it is
    for, which has a device of its own and its share of the threads.
    """
    import torch

    from . import ops

    check_config(config)
    shown = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number, threads = cuda_number(config.device, shown), torch.get_num_threads()
    if place is not None:
        threads = max(1, threads // place.local_world)
        if number is not None and (number := place.local_rank) >= shown:
            raise ConfigError(
                f"gpus: {place.local_world} ranks need a CUDA device each, and this machine shows {shown}; "
                f"take fewer, or device cpu"
            )
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    cuda = device.type == "cuda"
    if config.vae_encode != "fp32" and not cuda:
        raise ConfigError(f"vae_encode: {config.vae_encode} needs a CUDA device, this run is on {device}; use fp32")
    name, fp8 = parse_precision(config.precision)
    names = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
    dtype = names.get(name) or (torch.bfloat16 if cuda else torch.float32)
    try:
        table = ops.select(config.ops, device, config.attention, dtype=dtype, head_dim=head_dim)
        fp8_table = fp8 and ops.quantized(table, device, fp8.attention, head_dim=head_dim)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    why = {
        "device": "asked for" if config.device != "auto" else f"CUDA is {'' if cuda else 'not '}available",
        "precision": "asked for" if config.precision != "auto" else f"auto on {device.type}",
        **(fp8_table or table).why,
        "vae_decode": "the released recipe: fp16 products over fp32 weights" if cuda else "fp32 on CPU",
        "threads": "asked for" if config.threads else f"PyTorch's own count{', shared by the ranks' if place else ''}",
    }
    return Choices(
        device=device,
        dtype=dtype,
        vae_compute=torch.float16 if cuda else torch.float32,
        tile_batch=7 if cuda else 1,
        vae_encode=config.vae_encode,
        ops=table,
        adaln=config.adaln,
        threads=config.threads or threads,
        why=why,
        allow_remote=config.allow_remote,
        host_memory=config.host_memory,
        row_chunk=config.row_chunk,
        fp8=fp8,
        fp8_ops=fp8_table,
    )


def cuda_number(device: str, count: int) -> int | None:
    """Which of `count` CUDA devices `device`, a checked name, means; None for the CPU. Raises ConfigError."""
    if device == "cpu" or (device == "auto" and not count):
        return None
    number = int(device.partition(":")[2] or 0)
    if number >= count:
        raise ConfigError(f"device: got {device!r}, and this machine shows {count} CUDA devices; use cpu")
    return number


def set_flags(stage: str, choices: Choices) -> dict[str, Any]:
    """Set every backend flag that changes bits for `stage` (`encode`, `denoise`, `decode`) and return what was set.

    The only place that touches them. Reduced-precision reductions are off so that a split sum stays fp32.
    """
    import torch

    tf32_convolutions = stage == "encode" and choices.vae_encode == "tf32"
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
