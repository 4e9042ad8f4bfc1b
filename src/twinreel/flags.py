"""The command line's flags as dataclasses, and what they become: a `Request`, an `EngineConfig`, output options.

Flags that describe a request default to None ("not given"), so that `--request file.json` together with any of them
can be refused by name; the defaults that then apply are those of `Request` and `EngineConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from .config import EngineConfig
from .errors import ConfigError, RequestError
from .output import OutputOptions
from .request import REFERENCE_KINDS, Keyframe, Reference, Request
from .request_json import parse_json

T = TypeVar("T")
Optional = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]  # None is "not given"; the text says what follows

# Which flags set which field; tests/test_flags.py holds both sides complete.
REQUEST_FLAGS = {
    "prompt": ("text", "prompt"),
    "task": ("task",),
    "keyframes": ("first", "last"),
    "references": ("ref",),
    "duration": ("duration",),
    "aspect": ("aspect",),
    "size": ("size",),
    "short_edge": ("short_edge",),
    "steps": ("steps",),
    "seed": ("seed",),
    "shifts": ("shifts",),
    "noise": ("noise",),
}


@dataclass(frozen=True)
class RequestFlags:
    """What to make."""

    text: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="")] = None
    """The prompt, used verbatim."""
    prompt: Optional[str] = None
    """The same as a flag."""
    task: Optional[Literal["auto", "t2va", "fl2va", "ref2va"]] = None
    """auto (default) follows from what is given: references, keyframes, or neither."""
    first: Optional[str] = None
    """Picture the video begins with: a path, a file: or a data: address."""
    last: Optional[str] = None
    """Picture the video ends with."""
    ref: tuple[str, ...] = ()
    """Reference, repeatable, order kept: image:x.png, video:y.mp4@1.0-4.5 (seconds), audio:z.mp3, video_audio:y.mp4."""
    duration: Optional[float] = None
    """Seconds. Default: the length of a request's only sound, otherwise 5."""
    aspect: Optional[str] = None
    """auto (default), 21:9, 16:9, 4:3, 1:1, 3:4, 9:16 or W:H from 1:4 to 4:1."""
    size: Annotated[str | None, tyro.conf.arg(metavar="WxH", help_behavior_hint="")] = None
    """Exact size instead of --aspect, such as 1344x768."""
    short_edge: Optional[int] = None
    """Pixels of the shorter side before the area cap. Default: the checkpoint's own."""
    steps: Optional[int] = None
    """Points of the sigma grid; N steps are N-1 model calls. Default: 50, which is 49 calls."""
    seed: Optional[int] = None
    """Seed of every random draw. Default: 42."""
    shifts: Optional[tuple[float, float]] = None
    """Sigma shifts, video then audio. Default: the checkpoint's own (12 3)."""
    noise: Optional[Literal["official", "sequential"]] = None
    """Order of random draws: official (default) or sequential."""
    request: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """The whole request as JSON; cannot be combined with the flags above."""

    def given(self) -> list[str]:
        """The flags that describe a request and were set, as a person wrote them."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        return [
            "the prompt" if name == "text" else f"--{name.replace('_', '-')}" for name in changed if name != "request"
        ]

    def build(self) -> Request:
        """The `Request`; reads the JSON file if one is named. Raises RequestError."""
        if self.request is not None:
            return self._from_file(self.request)
        if self.text is not None and self.prompt is not None:
            raise RequestError("prompt", "was given twice, by position and by --prompt; keep one")
        prompt = self.text if self.text is not None else self.prompt
        if prompt is None:
            raise RequestError("prompt", 'is missing; give one, as in: twinreel generate "A cat plays piano."')
        pairs = ((self.first, 0), (self.last, -1))
        values: dict[str, Any] = {
            "keyframes": tuple(Keyframe(image, index) for image, index in pairs if image is not None),
            "references": tuple(parse_reference(text, i) for i, text in enumerate(self.ref)),
            "size": None if self.size is None else parse_size(self.size),
        }
        for name in ("task", "duration", "aspect", "short_edge", "steps", "seed", "shifts", "noise"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        return Request(prompt=prompt, **values)

    def _from_file(self, path: Path) -> Request:
        if self.given():
            names = ", ".join(self.given())
            raise RequestError("request", f"{path} says everything already; leave out {names}, or write it there")
        try:
            return parse_json(path.read_bytes())
        except OSError as error:
            raise RequestError("request", f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True)
class EngineFlags:
    """What to make it with."""

    model: Optional[str] = None
    """Folder of the weights, either released layout or one partition. Default: a random miniature that makes noise."""
    component: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=PATH")] = ()
    """Folder for one component, repeatable, such as transformer=PATH."""
    device: str = EngineConfig.device
    """auto, cpu, cuda or cuda:N."""
    precision: str = EngineConfig.precision
    """Precision of DiT and conditioner: auto (bf16 on CUDA, fp32 on CPU), bf16 or fp32."""
    vae_encode: str = EngineConfig.vae_encode
    """Video VAE encode: fp32, or tf32 (faster on CUDA, other bits)."""
    residency: str = EngineConfig.residency
    """auto, all (every part stays loaded) or stages (parts leave the device between stages)."""
    ops: str = EngineConfig.ops
    """Table of kernels: auto or a name that doctor lists."""
    threads: Optional[int] = EngineConfig.threads
    """CPU threads; the count can change the last bits of CPU results."""

    def build(self) -> EngineConfig:
        """The `EngineConfig`. Raises ConfigError."""
        components = {}
        for text in self.component:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ConfigError(f"--component {text}: write NAME=PATH, such as transformer=weights/transformer")
            if name in components:
                raise ConfigError(f"--component {name} was given twice; keep one")
            components[name] = path
        same = ("device", "precision", "vae_encode", "residency", "ops", "threads")
        return EngineConfig(
            model=self.model,
            components=components,
            **{name: getattr(self, name) for name in same},
        )


@dataclass(frozen=True)
class ReportFlags:
    """How to speak."""

    json: bool = False
    """One JSON line on stdout, result or error; progress goes to stderr."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress."""
    traceback: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class Generate:
    """Make one MP4 with picture and sound, and a JSON report beside it."""

    request: RequestFlags = field(default_factory=RequestFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("out.mp4")
    """File to write; an existing one is replaced."""
    crf: int = OutputOptions.crf
    """H.264 quality, 0 (lossless) to 51."""
    preset: str = OutputOptions.preset
    """H.264 speed preset, ultrafast to veryslow."""


@dataclass(frozen=True)
class Verify:
    """Check a folder of weights: names, shapes, dtypes, byte totals, finite values, and hashes against a manifest."""

    path: tyro.conf.Positional[Path]
    """Folder of the weights."""
    write_manifest: bool = False
    """Write the hashes of this folder into a manifest beside the weights."""
    report: ReportFlags = field(default_factory=ReportFlags)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine would use for every choice, and why."""

    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def parse(words: Sequence[str] | None) -> Generate | Verify | Doctor:
    """The command of `words` (None: the process's own). A bad flag prints its reason and ends the process with 2."""
    return tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="twinreel",
        args=words,
        description="Video and its stereo sound from MiniMax H3 weights.",
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.DisallowNone,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.UseAppendAction,
        ),
    )


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of `1344x768`. Raises RequestError."""
    found = re.fullmatch(r"(\d+)[xX×](\d+)", text)
    if not found:
        raise RequestError("size", f"got {text!r}; write WIDTHxHEIGHT, such as 1344x768")
    return int(found[1]), int(found[2])


def parse_reference(text: str, number: int) -> Reference:
    """`KIND:SOURCE[@START-END]` as a `Reference`; either end may be left out. Raises RequestError."""
    kind, colon, source = text.partition(":")
    if not colon or kind not in REFERENCE_KINDS or not source:
        example = "image:x.png or video:y.mp4@1.0-4.5"
        raise RequestError(f"references[{number}]", f"got {text!r}; write KIND:SOURCE, such as {example}")
    seconds = r"(\d+(?:\.\d*)?|\.\d+)?"
    cut = re.fullmatch(rf"(.+)@{seconds}-{seconds}", source, re.DOTALL)
    if not cut or cut[2] is None and cut[3] is None:
        return Reference(kind, source)
    start, end = (None if value is None else float(value) for value in cut.groups()[1:])
    return Reference(kind, cut[1], start, end)
