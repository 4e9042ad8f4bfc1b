"""The flags of `compare`, `validate` and `quantize`, which `tools.commands` runs, and of `bench`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from .flag_words import as_flags
from .flags import Optional, ReportFlags
from .precision import Fp8

SETUP = (
    "key=value words, such as 'model=weights precision=bf16 policy=forecast:fast', or a .toml or .json file of them: "
    "fields of EngineConfig, policy, steps."
)


@dataclass(frozen=True)
class Compare:
    """Compare two videos, raw results (.npz), latents (.safetensors), traces (folders) or reports (.json)."""

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """The first."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """The second, compared with the first."""
    page: Optional[Path] = None
    """HTML page to write: both videos side by side, the worst frame, curves."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], help_behavior_hint="")] = None
    """JSON file to write, every figure in it."""
    overwrite: bool = False
    """Replace --output and --page where they exist, but nothing that is read, nor its report."""
    no_ssim: bool = False
    """Leave SSIM out; it takes longest."""
    report: ReportFlags = field(default_factory=ReportFlags)

    def written(self) -> dict[str, str]:
        """What a person wrote for the fields that are no flags."""
        return {"a": "A, the first file", "b": "B, the second file", "compare": "A and B"}


@dataclass(frozen=True)
class Validate:
    """Run the same requests under two setups and say exact, close or apart (exit code 1)."""

    base: Annotated[str, tyro.conf.arg(help=f"The setup that is right. {SETUP}", metavar="SETUP")] = ""
    test: Annotated[str, tyro.conf.arg(help="What differs from the base; the same words.", metavar="SETUP")] = ""
    requests: str = "frozen"
    """frozen, or a JSON file with a list of requests."""
    only: tuple[str, ...] = ()
    """Name of a request to keep, repeatable. Default: all."""
    more_seeds: int = 0
    """Further text requests with other seeds."""
    steps: Optional[int] = None
    """Steps of every request, for a quick look."""
    duration: Optional[float] = None
    """Seconds of every request, for a quick look."""
    bounds: str = "strict"
    """What close means: strict (40 dB video, 30 dB audio SNR, every request) or published (means of 35.86 dB, SSIM
    0.9646, cosine 0.989, 18.8 dB)."""
    matrix: bool = False
    """Also run the test's features and the test's policy alone."""
    against: Optional[str] = None
    """diffusers: one setup against the public implementation, boundary by boundary, instead of --test."""
    model: Optional[str] = None
    """Folder of the weights, the same as model= in --base."""
    pareto: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg", help_behavior_hint="")] = None
    """SVG to draw instead of a verdict: policies, fewer steps and fp8 against the base. A table goes to stdout."""
    workers: int = 1
    """With --pareto: processes that divide the requests."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], help_behavior_hint="")] = None
    """JSON file to write."""
    overwrite: bool = False
    """Replace --output and --pareto where they exist, but nothing that the runs themselves read."""
    report: ReportFlags = field(default_factory=ReportFlags)


@dataclass(frozen=True)
class Quantize:
    """Write weights whose DiT is in e4m3, for --precision fp8: half to read and keep. Not exact."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """Folder of the weights, either released layout or one partition."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """New folder to write, in the original layout; other tensors are linked where the file system can."""
    blocks: int = Fp8.blocks
    """Blocks at either end of the trunk that stay in bf16."""
    report: ReportFlags = field(default_factory=ReportFlags)

    def written(self) -> dict[str, str]:
        """What a person wrote for the fields that are no flags."""
        return {"source": "SRC, the first folder", "target": "DST, the second folder"}


@dataclass(frozen=True)
class Bench:
    """Time this machine on random weights: ops, dit, vae, encoder, e2e, memory or scaling."""

    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="WHAT ...")] = ()
    """What to time, and its flags; `twinreel bench WHAT --help` lists them. The last line is one JSON object."""
    report: ReportFlags = field(default_factory=ReportFlags)

    def written(self) -> dict[str, str]:
        """What a person wrote for the fields of a bench."""
        return as_flags(self.words)


COMMANDS = (
    Annotated[Compare, tyro.conf.subcommand("compare")],
    Annotated[Validate, tyro.conf.subcommand("validate")],
    Annotated[Quantize, tyro.conf.subcommand("quantize")],
    Annotated[Bench, tyro.conf.subcommand("bench")],
)
