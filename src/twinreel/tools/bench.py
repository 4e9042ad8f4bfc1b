"""`twinreel bench ops|dit|vae|encoder|e2e|memory|scaling`: figures of one machine; the last line is one JSON object.

It needs no weights, and neither PyAV nor the command line's libraries: weights and inputs are random.
`python -m twinreel.tools.bench` is the same program.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from ..complaint import explain
from ..config import VAE_ENCODES, EngineConfig, resolve, set_flags
from ..errors import ConfigError, RequestError, TwinreelError
from ..flag_words import as_flags, check_idle, check_positive, each_once, parse_size
from ..launch import stand_alone
from ..limits import PROMPT_CHARACTERS, shown
from ..precision import check_weights, parse_precision
from ..stopping import stoppable

if TYPE_CHECKING:
    import torch

    from ..spec import Spec
    from .bench_dit import Setting, Sizes, Way

TEXTS = {
    "ops": "every op of the kernel table beside a copy",
    "dit": "whole model calls beside their floor",
    "vae": "decode and encode of a clip",
    "encoder": "prompts through the conditioner",
    "e2e": "whole requests through an engine",
    "memory": "a call under caps of device memory",
}
MOST = {"layers": 1000, "fewest": 1000}  # modules and marks, which take host memory before anything is measured
PASSES = ("auto", "triton", "reference")
CAPS = (80.0, 48.0, 24.0)  # GiB
POSITIVE = (
    "seconds", "frames", "text", "rows", "layers", "fewest", "encode_frames", "tile_batch", "tokens", "caps", "cap",
)  # fmt: skip
# What of a bench grows with it, as far as it has such a flag.
SIZING = ("rows", "frames", "encode_frames", "size", "text", "tokens", "tile_batch", "layers")
BESIDE = {"compile": "against"}
INSTEAD = {
    "only decode": ("encode", "encode_frames"),
    "only encode": ("frames", "tile_batch"),
    "rows": ("frames", "size", "text"),
}


class Defaults(argparse.HelpFormatter):
    """What a flag is without being given stands behind its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        value, text = action.default, action.help or ""
        if value in (None, False, [], argparse.SUPPRESS):
            return text
        return f"{text} (default {' '.join(map(str, value)) if isinstance(value, list) else value})"


class Flags(argparse.ArgumentParser):
    """The flags of a bench, whose faults are errors of ours."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Defaults, **more)

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        """What `words` say, and the fields whose flags stand there. Raises RequestError, for a flag given twice too."""
        flags, unknown = self.parse_known_args(words)
        if unknown:
            of = f" {what}" if (what := getattr(flags, "what", "")) else ""
            see = f"{self.prog}{of} --help lists its flags"
            raise RequestError(_field(unknown[0]), f"{shown(unknown[0])} means nothing to it; {see}")
        return flags, each_once(["bench", *words], vars(flags))

    def error(self, message: str) -> NoReturn:
        """What the parser found wrong: of one argument, or of those behind the colon, which are missing."""
        found = re.fullmatch("(?:argument )?(.*?): (.*)", message, re.DOTALL)
        field, why = (found[1], found[2]) if found else ("flags", message)
        if not message.startswith("argument "):
            field, why = why, "is missing"
        raise RequestError(_field(field), f"{why}; see {self.prog} --help")


def _field(flag: str) -> str:
    """The field of a flag or, printable, of a word that is none."""
    found = re.match(r"--([\w-]+)", flag)
    return found[1].replace("-", "_") if found else flag if flag.isprintable() and len(flag) < 80 else "flags"


def parser() -> Flags:
    """The flags."""
    whole = Flags(prog="twinreel bench", description=__doc__)
    kinds = whole.add_subparsers(dest="what", required=True, metavar="WHAT")
    made = {name: kinds.add_parser(name, help=text, description=text) for name, text in TEXTS.items()}
    kinds.add_parser("scaling", help="one host's GPUs, one topology after the other", add_help=False)
    for name, flags in made.items():
        _shared(flags, name)
        if name in ("dit", "e2e", "memory"):
            flags.add_argument("--attention", default="auto", help="as in the engine")
            choices = {"dit": ("live", "precompute", "both"), "e2e": ("auto", "live", "precompute")}
            kinds_of = choices.get(name, ("live", "precompute"))
            flags.add_argument("--adaln", choices=kinds_of, default="precompute", help="as in the engine")
            if name == "dit":
                flags.add_argument("--ops", nargs="+", default=["auto"], help="tables, compared with the first")
            else:
                flags.add_argument("--ops", default="auto", help="table of kernels")
        if name in ("dit", "memory"):
            flags.add_argument("--layers", type=int, help="blocks of the DiT, instead of the shape's")
    _own(made)
    return whole


def _shared(flags: argparse.ArgumentParser, name: str) -> None:
    flags.add_argument(
        "--shape", choices=("released", "bundled", "tiny"), default="released", help="sizes of the model"
    )
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    flags.add_argument("--json", action="store_true", help="one JSON line on stdout, everything else on stderr")
    if name != "e2e":
        flags.add_argument(
            "--seconds", type=float, default=1.0, help="how long each figure is measured, in at most 400 runs"
        )
    if name != "encoder":
        flags.add_argument("--frames", type=int, default=124, help="of the clip")
        flags.add_argument("--size", help="WxH; default 1344x768, or the smaller models' own")
    if name in ("ops", "dit", "e2e", "memory"):
        flags.add_argument("--text", type=int, default=300, help="prompt rows")
    if name != "vae":
        texts = {"dit": "bf16, fp32, fp8 with its fields, compared", "e2e": "as in the engine"}
        more: dict[str, Any] = {} if name in texts else {"choices": ("bf16", "fp32")}
        default: Any = ["bf16"] if name == "dit" else "bf16"
        text = f"{texts.get(name, 'of weights and inputs')}; the default on a CPU too, where the engine's is fp32"
        flags.add_argument("--precision", default=default, nargs="+" if name == "dit" else None, help=text, **more)


def _own(made: Mapping[str, argparse.ArgumentParser]) -> None:
    made["ops"].add_argument("--rows", type=int, help="packed rows, instead of those of --frames and --size")
    dit, vae, encoder, e2e = (made[name] for name in ("dit", "vae", "encoder", "e2e"))
    dit.add_argument("--profile", action="store_true", help="the kernels of a call by time")
    dit.add_argument("--against", choices=("diffusers",), help="also its class, on the same weights and inputs")
    dit.add_argument("--compile", action="store_true", help="--against: also with its blocks compiled")
    vae.add_argument("--only", choices=("decode", "encode"), help="leave the other half out")
    vae.add_argument(
        "--passes",
        nargs="+",
        choices=PASSES,
        default=["auto"],
        help="of the decoder, compared bit for bit, and of the encoder",
    )
    vae.add_argument("--tile-batch", type=int, nargs="+", default=[7], help="tiles a call when decoding")
    vae.add_argument("--encode", nargs="+", choices=VAE_ENCODES, help="default fp32 and tf32, on a CPU fp32")
    vae.add_argument(
        "--encode-frames", type=int, default=22, help="frames to encode; plain fp32 takes half a second each"
    )
    vae.add_argument("--fewest", type=int, default=3, help="runs that a figure has at least; 1: long ones run once")
    encoder.add_argument("--tokens", type=int, nargs="+", default=[300, 1500], help="of the prompts")
    encoder.add_argument("--stream", action="store_true", help="also layer by layer from page-locked host memory")
    e2e.add_argument("--steps", type=int, default=50, help="of a request; 50 are 49 calls")
    e2e.add_argument("--policy", nargs="+", default=[], help="also with each of these step policies")
    e2e.add_argument("--residency", default="auto", help="as in the engine")
    e2e.add_argument("--cap", type=float, help="GiB of the device to use; name a --residency that fits")
    caps = f"GiB of a CUDA device to use; default {' '.join(f'{cap:g}' for cap in CAPS)}; a CPU has none"
    made["memory"].add_argument("--caps", type=float, nargs="+", help=caps)


def main(words: Sequence[str] | None = None) -> int:
    """Run one bench, and explain what refuses or stops it in three lines. Exit codes are those of the command line."""
    given = sys.argv[1:] if words is None else words

    def ended(error: TwinreelError | KeyboardInterrupt) -> int:
        print(explain(error, as_flags(given), "bench"), file=sys.stderr)
        return error.exit_code if isinstance(error, TwinreelError) else 128 + getattr(error, "signal", signal.SIGINT)

    try:
        with stoppable(words is None, ended if words is None else None):
            return perform(given)
    except (TwinreelError, KeyboardInterrupt) as error:
        return ended(error)


def perform(words: Sequence[str]) -> int:
    """Run the bench that `words` ask for. Raises ConfigError for what this machine or these sizes cannot do, RequestError
    for a request that no model would run."""
    stand_alone("bench")
    if list(words[:1]) == ["scaling"]:
        from . import bench_scaling

        return bench_scaling.main(words[1:])
    flags, seen = parser().read(words)
    check_idle({*seen, f"only {getattr(flags, 'only', None)}"}, BESIDE, INSTEAD)
    with redirect_stdout(sys.stderr) if flags.json else nullcontext(), refusing(vars(flags), seen):
        result = run(flags)
    import torch

    print(json.dumps({"bench": flags.what, "shape": flags.shape, "torch": torch.__version__, **result}, default=str))
    return 0


@contextmanager
def refusing(flags: Mapping[str, Any], seen: Collection[str]) -> Iterator[None]:
    """Inside the block a ValueError becomes a ConfigError, and so does memory that ends: it names what of `flags` sizes the
    bench, those that were `seen` on the command line if there are any."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        from ..decoding import out_of_memory

        if not out_of_memory(error):
            raise
        names = [name for name in SIZING if flags.get(name) is not None]
        given = " ".join(
            f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for name in [name for name in names if name in seen] or names
            for value in [flags[name]]
        )
        given = f"--shape {flags['shape']} {given}"  # whose weights come first
        told = " ".join(str(error).split()).rpartition("DefaultCPUAllocator: ")[2][:200] or type(error).__name__
        raise ConfigError(f"{given}: memory has no room for this ({told}); give less, or a smaller --shape") from None


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """The figures that `flags` ask for, as plain values. Raises ValueError, ConfigError, RequestError."""
    from .random_weights import shape_spec

    check_positive(vars(flags), POSITIVE)
    for name, most in MOST.items():
        if (given := getattr(flags, name, None) or 0) > most:
            raise ConfigError(f"--{name}: got {given}; give 1 to {most}")
    # flags of a stage that convolves in fp32; what a bench runs on, it chooses itself
    choices = resolve(EngineConfig(device=flags.device, ops="reference", attention="sdpa"))
    set_flags("denoise", choices)
    return RUNS[flags.what](flags, shape_spec(flags.shape, getattr(flags, "layers", None)), choices.device)


def _sizes(flags: argparse.Namespace, spec: Spec) -> Sizes:
    from .bench_dit import Sizes, check_sizes

    size = flags.size or ("1344x768" if flags.shape == "released" else None)
    sizes = Sizes(flags.frames, parse_size(size) if size else None, getattr(flags, "text", 1))
    check_sizes(sizes, spec)
    return sizes


def _setting(flags: argparse.Namespace, device: torch.device, dtype: torch.dtype, **more: bool) -> Setting:
    from .bench_dit import Setting

    return Setting(device, dtype, getattr(flags, "adaln", "live"), flags.seconds, **more)


def _ops(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from .bench_dit import plan_of
    from .bench_ops import bench_ops

    rows = flags.rows or plan_of(_sizes(flags, spec), spec)[1].tags_S.shape[0]
    return bench_ops(spec.dit, rows, device, _dtype([flags.precision]), flags.seconds)


def _dit(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from .bench_dit import bench_dit
    from .oracle import check_diffusers

    if flags.against:
        check_diffusers()
    sizes = _sizes(flags, spec)
    ways = [_way(word, name, spec, device, flags.attention) for word in flags.precision for name in flags.ops]
    print(f"{device}: {', '.join(f'{way.precision}, {way.ops.name}, {way.why}' for way in ways)}")
    more = {"profile": flags.profile, "against": bool(flags.against), "compiled": flags.compile}
    return bench_dit(spec, sizes, ways, _setting(flags, device, _dtype(flags.precision), **more))


def _vae(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from ..ops import select
    from .bench_vae import Asked, bench_vae

    def table(name: str) -> str:
        return select(name, device, "sdpa", dtype=_dtype(["fp32"]), head_dim=spec.dit.head_dim).name

    kinds = flags.encode or (["fp32", "tf32"] if device.type == "cuda" else ["fp32"])
    if device.type != "cuda" and kinds != ["fp32"]:
        raise ConfigError(f"encode: {' '.join(kinds)} needs a CUDA device, this run is on {device}; use fp32")
    passes = list(dict.fromkeys(map(table, flags.passes)))
    halves = [flags.only] if flags.only else ["decode", "encode"]
    asked = Asked(halves, passes, flags.tile_batch, kinds, flags.encode_frames, flags.fewest, flags.seconds)
    return bench_vae(spec, _sizes(flags, spec), device, asked)


def _encoder(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from .bench_encoder import bench_encoder

    if (most := max(flags.tokens)) not in PROMPT_CHARACTERS:
        raise RequestError("tokens", f"got {most}; a prompt has {PROMPT_CHARACTERS}, so ask for no more tokens")
    return bench_encoder(spec, flags.tokens, _setting(flags, device, _dtype([flags.precision])), flags.stream)


def _e2e(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from .bench_e2e import bench_e2e
    from .timing import capped

    same = {name: getattr(flags, name) for name in ("precision", "ops", "attention", "adaln", "residency")}
    _check_caps("cap", flags, device)
    config = EngineConfig(device=str(device), **same)
    with capped(device, flags.cap):
        return bench_e2e(spec, _sizes(flags, spec), config, flags.policy, flags.steps) | {"cap_gib": flags.cap}


def _check_caps(name: str, flags: argparse.Namespace, device: torch.device) -> None:
    if getattr(flags, name) is not None and device.type != "cuda":
        raise ConfigError(f"--{name}: is of a CUDA device's memory, this run is on {device}; leave it out")


def _memory(flags: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    from .bench_memory import bench_memory

    _check_caps("caps", flags, device)
    way = _way(flags.precision, flags.ops, spec, device, flags.attention)
    setting = _setting(flags, device, _dtype([flags.precision]))
    return bench_memory(spec, _sizes(flags, spec), way.ops, setting, flags.caps or CAPS)


RUNS = {"ops": _ops, "dit": _dit, "vae": _vae, "encoder": _encoder, "e2e": _e2e, "memory": _memory}


def _dtype(precisions: Sequence[str]) -> torch.dtype:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
    found = {dtypes.get(parse_precision(word)[0]) for word in precisions}
    dtype = found.pop()
    if found or dtype is None:
        raise ConfigError(f"precision: got {' '.join(precisions)}; use fp32 alone, or bf16 and fp8 with its fields")
    return dtype


def _way(precision: str, ops: str, spec: Spec, device: torch.device, attention: str) -> Way:
    from ..ops import quantized, select
    from .bench_dit import Way

    check_weights(precision, spec.dit)
    _, fp8 = parse_precision(precision)
    table = select(ops, device, attention, dtype=_dtype([precision]), head_dim=spec.dit.head_dim)
    narrow = None if fp8 is None else quantized(table, device, fp8.attention, head_dim=spec.dit.head_dim)
    return Way(precision, table, fp8, narrow)


if __name__ == "__main__":
    sys.exit(main())
