"""`python -m twinreel.tools.bench ops|dit|vae|memory|scaling`: figures of one machine; the last line is one JSON object.

It needs no weights, and neither PyAV nor the command line's libraries: weights and inputs are random.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..ops import quantized, select
from ..precision import check_weights, parse_precision
from ..spec import Spec
from .bench_dit import Setting, Sizes, Way, bench_dit, plan_of
from .bench_memory import bench_memory
from .bench_ops import bench_ops
from .bench_vae import bench_vae
from .timing import card

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m twinreel.tools.bench", description=__doc__)
    flags.add_argument("what", choices=("ops", "dit", "vae", "memory"))
    flags.add_argument("--shape", choices=("released", "bundled"), default="released", help="sizes of the model")
    flags.add_argument("--layers", type=int, help="blocks of the DiT, instead of the shape's")
    flags.add_argument("--frames", type=int, default=124)
    flags.add_argument("--size", help="WxH; default 1344x768, or the bundled model's own")
    flags.add_argument("--text", type=int, default=300, help="prompt rows")
    flags.add_argument("--rows", type=int, help="ops: packed rows, instead of those of --frames and --size")
    flags.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    flags.add_argument(
        "--precision",
        nargs="+",
        default=["bf16"],
        help="bf16, fp32, fp8 (as in the engine); dit: one or more, compared",
    )
    flags.add_argument("--ops", nargs="+", default=["auto"], help="dit: one or more tables, compared with the first")
    flags.add_argument("--attention", default="auto")
    flags.add_argument("--adaln", choices=("live", "precompute", "both"), default="precompute")
    flags.add_argument("--tile-batch", type=int, nargs="+", default=[1, 4], help="vae: tiles a call when decoding")
    flags.add_argument("--encode-frames", type=int, default=22, help="vae: frames to encode")
    flags.add_argument("--seconds", type=float, default=1.0, help="how long each figure is measured")
    flags.add_argument("--caps", type=float, nargs="+", default=[80, 48, 24], help="memory: GiB of the device to use")
    flags.add_argument("--profile", action="store_true", help="dit: the kernels of a call by time")
    return flags


def main(words: Sequence[str] | None = None) -> int:
    """Run one bench. Exit code 0, or 2 for a table or an attention that cannot run here."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["scaling"]:
        from . import bench_scaling

        return bench_scaling.main(words[1:])
    flags = parser().parse_args(words)
    try:
        result = run(flags)
    except (ValueError, ConfigError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"bench": flags.what, "shape": flags.shape, "torch": torch.__version__, **result}))
    return 0


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """The figures that `flags` ask for, as plain values. Raises ValueError."""
    spec, device = _spec(flags), torch.device(flags.device)
    width, _, height = (flags.size or "1344x768").partition("x")
    size = (int(width), int(height)) if flags.size or flags.shape == "released" else None
    sizes = Sizes(flags.frames, size, flags.text)
    _set_flags()
    if flags.what == "ops":
        rows = flags.rows or plan_of(sizes, spec)[1].tags_S.shape[0]
        return bench_ops(spec.dit, rows, device, _dtype(flags.precision), flags.seconds)
    if flags.what == "vae":
        return bench_vae(
            spec, sizes, device, flags.tile_batch, encode_frames=flags.encode_frames, seconds=flags.seconds
        )
    dtype = _dtype(flags.precision)
    ways = [_way(word, name, spec, device, flags.attention) for word in flags.precision for name in flags.ops]
    print(f"{card(device)['device']}: {', '.join(f'{way.precision}, {way.ops.name}, {way.why}' for way in ways)}")
    setting = Setting(device, dtype, flags.adaln, flags.seconds, flags.profile)
    if flags.what == "memory":
        if flags.adaln == "both" or ways[0].fp8 is not None:
            raise ValueError("memory takes --adaln live or precompute, and --precision bf16 or fp32")
        return bench_memory(spec, sizes, ways[0].ops, setting, flags.caps)
    return bench_dit(spec, sizes, ways, setting)


def _dtype(precisions: Sequence[str]) -> torch.dtype:
    found = {DTYPES.get(parse_precision(word)[0]) for word in precisions}
    dtype = found.pop()
    if found or dtype is None:
        raise ValueError(f"precision: got {' '.join(precisions)}; use fp32 alone, or bf16 and fp8 with its fields")
    return dtype


def _way(precision: str, ops: str, spec: Spec, device: torch.device, attention: str) -> Way:
    check_weights(precision, spec.dit)
    _, fp8 = parse_precision(precision)
    table = select(ops, device, attention, dtype=_dtype([precision]), head_dim=spec.dit.head_dim)
    narrow = None if fp8 is None else quantized(table, device, fp8.attention, head_dim=spec.dit.head_dim)
    return Way(precision, table, fp8, narrow)


def _spec(flags: argparse.Namespace) -> Spec:
    from dataclasses import replace

    if flags.shape == "released":
        spec = Spec()
    else:
        from ..demo.tiny import tiny_spec

        spec = tiny_spec()
    return spec if flags.layers is None else replace(spec, dit=replace(spec.dit, layers=flags.layers))


def _set_flags() -> None:
    """What `config.set_flags` sets for the denoising and decoding stages."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


if __name__ == "__main__":
    sys.exit(main())
