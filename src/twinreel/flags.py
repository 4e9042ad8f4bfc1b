"""The command line's flags as dataclasses, and what they become: a `Request`, an `EngineConfig`, output options.

Flags that describe a request default to None ("not given"), so that `--request file.json` together with any of them
can be refused by name; the defaults that then apply are those of `Request` and `EngineConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args

import tyro

from . import limits
from .complaint import unknown_command
from .config import EngineConfig
from .errors import ConfigError, RequestError
from .flag_words import parse_reference, parse_size
from .output import FORMATS, LATENTS_SUFFIX, OutputOptions
from .request import Keyframe, Request
from .request_json import parse_json
from .small_files import MOST_JSON, read_small, why
from .spec import World

T = TypeVar("T")
WORLD = World()  # help speaks of H3's limits; a small checkpoint's own are in its errors and in `plan`
Optional = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]  # None is "not given"; the text says what follows

REFERENCES = (
    "Reference, repeatable, order kept: image:x.png, video:y.mp4@1.0-4.5 (seconds), audio:z.mp3, video_audio:y.mp4. "
    "At most "
    + ", ".join(f"{most} of kind {kind}" for kind, most in limits.REFERENCES_OF_A_KIND.items())
    + f", {limits.REFERENCES_IN_ALL} in all; clips of {limits.clip_seconds(WORLD)}."
)


def told(text: str, metavar: str | None = None) -> Any:
    """The help of a flag that may be left out, where a docstring could not hold numbers of the table of limits."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


# Which flags set which field; tests/test_flags.py holds both sides complete.
REQUEST_FLAGS = {
    "prompt": ("text", "prompt"),
    "task": ("task",),
    "keyframes": ("first", "last", "fit"),
    "references": ("ref",),
    "duration": ("duration",),
    "aspect": ("aspect",),
    "size": ("size",),
    "short_edge": ("short_edge",),
    "steps": ("steps",),
    "seed": ("seed",),
    "shifts": ("shifts",),
    "noise": ("noise",),
    "policy": ("policy",),
}


POSITIONAL = {"text", "latents", "path", "shell"}


@dataclass(frozen=True)
class RequestFlags:
    """What to make."""

    text: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="")] = None
    """The prompt, used verbatim."""
    prompt: Annotated[str | None, told(f"The same as a flag: {limits.PROMPT_CHARACTERS}.")] = None
    task: Optional[Literal["auto", "t2va", "fl2va", "ref2va"]] = None
    """auto (default) follows from what is given: references, keyframes, or neither."""
    first: Optional[str] = None
    """Picture the video begins with: a path, a file: or a data: address."""
    last: Optional[str] = None
    """Picture the video ends with."""
    fit: Optional[Literal["auto", "stretch", "cover"]] = None
    """How --first and --last take a canvas of another shape. auto (default): the first is stretched, a second covers."""
    ref: Annotated[tuple[str, ...], tyro.conf.arg(help=REFERENCES)] = ()
    duration: Annotated[
        float | None,
        told(
            f"{limits.durations(WORLD)} (miniature: 4 to 6 s). Default: its only sound, else {limits.DEFAULT_SECONDS:g}."
        ),
    ] = None
    aspect: Annotated[str | None, told(f"Shape of the canvas: {limits.ASPECT_WORDS}. Default: auto.")] = None
    size: Annotated[str | None, told("Exact size in 32s instead of --aspect, such as 1344x768.", metavar="WxH")] = None
    short_edge: Optional[int] = None
    """Pixels of the shorter side before the area cap. Default: the checkpoint's own."""
    steps: Annotated[
        int | None,
        told(
            f"Points of the sigma grid, {limits.STEPS}; N steps are N-1 model calls. "
            f"Default: {Request.steps}, which is {Request.steps - 1} calls."
        ),
    ] = None
    seed: Annotated[int | None, told(f"Seed of every random draw, {limits.SEEDS}. Default: {Request.seed}.")] = None
    shifts: Annotated[
        tuple[float, float] | None,
        told("Sigma shifts, video then audio. Default: the checkpoint's own ({:g} {:g}).".format(*WORLD.shifts)),
    ] = None
    noise: Optional[Literal["official", "sequential"]] = None
    """Order of random draws: official (default) or sequential."""
    policy: Optional[str] = None
    """Which steps call the model: every-step (default), reuse (also velocity, conservative), forecast:gentle, :balanced
    or :fast, adaptive, calibrate; fields as in reuse:threshold=0.1."""
    example: Optional[Literal["t2va", "fl2va", "ref2va"]] = None
    """A bundled request of that task in place of prompt and media, all of it made by code."""
    request: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """The whole request as JSON; cannot be combined with the flags above."""

    def given(self) -> list[str]:
        """The flags that describe a request and were set, as a person wrote them."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        return [
            "the prompt" if name == "text" else f"--{name.replace('_', '-')}" for name in changed if name != "request"
        ]

    def written(self) -> dict[str, str]:
        """What a person wrote for the fields that are no flags: `keyframes[0]` may be `--last`. A file has the fields."""
        if self.request is not None:
            return {name: name for name in REQUEST_FLAGS}
        frames = [flag for flag, image in (("--first", self.first), ("--last", self.last)) if image is not None]
        names = {"prompt": "the prompt"} | {f"keyframes[{i}]": flag for i, flag in enumerate(frames)}
        return names | {f"references[{i}]": f"--ref {i + 1}" for i in range(len(self.ref))}

    def build(self) -> Request:
        """The `Request`; reads the JSON file if one is named. Raises RequestError."""
        if self.request is not None:
            return self._from_file(self.request)
        if self.example is not None:
            return self._from_example(self.example)
        if self.text is not None and self.prompt is not None:
            raise RequestError("prompt", "was given twice, by position and by --prompt; keep one")
        prompt = self.text if self.text is not None else self.prompt
        if prompt is None:
            raise RequestError("prompt", 'is missing; give one, as in: twinreel generate "A cat plays piano."')
        pairs = ((self.first, 0), (self.last, -1))
        if self.fit is not None and self.first is None and self.last is None:
            raise RequestError("keyframes", "--fit is of --first and --last; give one of them, or leave it out")
        values: dict[str, Any] = {
            "keyframes": tuple(Keyframe(image, at, self.fit or "auto") for image, at in pairs if image is not None),
            "references": tuple(parse_reference(text, i) for i, text in enumerate(self.ref)),
        }
        return Request(prompt=prompt, **values, **self._plain())

    def _plain(self) -> dict[str, Any]:
        """The fields of a `Request` that were given and are neither its prompt nor its media."""
        names = "task", "duration", "aspect", "short_edge", "steps", "seed", "shifts", "noise", "policy"
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return values if self.size is None else values | {"size": parse_size(self.size)}

    def _from_example(self, name: str) -> Request:
        from .demo.examples import example

        own = "the prompt", "--prompt", "--first", "--last", "--fit", "--ref"
        if said := [flag for flag in self.given() if flag in own]:
            raise RequestError("example", f"--example {name} has its own prompt and media; leave out {', '.join(said)}")
        return replace(example(name), **self._plain())

    def _from_file(self, path: Path) -> Request:
        if self.given():
            names = ", ".join(self.given())
            raise RequestError("request", f"{path} says everything already; leave out {names}, or write it there")
        try:
            return parse_json(read_small(path, MOST_JSON))
        except OSError as error:
            raise RequestError("request", f"cannot read {path}: {why(error)}; name a file of JSON") from None


@dataclass(frozen=True)
class EngineFlags:
    """What to make it with."""

    model: Optional[str] = None
    """Folder of the weights, either released layout or one partition. Default: the bundled miniature of a little world."""
    component: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=PATH")] = ()
    """Folder for one component, repeatable, such as transformer=PATH."""
    device: str = EngineConfig.device
    """auto, cpu, cuda or cuda:N."""
    precision: str = EngineConfig.precision
    """Of DiT and conditioner: auto (bf16 on CUDA, fp32 on CPU), bf16, fp32, or fp8 (not exact; Ada, Hopper, Blackwell),
    with fields as in fp8:blocks=2,steps=0,attention=auto: what stays bf16 at either end."""
    vae_encode: str = EngineConfig.vae_encode
    """Video VAE encode: fp32, or on CUDA tf32 or fp16 (faster, not exact)."""
    residency: str = EngineConfig.residency
    """all (parts stay loaded), conditioner (it alone runs layer by layer), stages (parts leave between stages), layers
    (layer by layer from host memory), mapped (from the files), or auto: the first that fits. Same bits."""
    host_memory: Optional[float] = EngineConfig.host_memory
    """GiB of host memory a process may use; what needs more is refused. Default: what is free; on a CPU, no bound."""
    row_chunk: Optional[int] = EngineConfig.row_chunk
    """Rows at a time in the row-wise parts of a block, in 8192s up to 1048576, 0 for all. Default: all, where they fit."""
    ops: str = EngineConfig.ops
    """Table of kernels: reference (plain PyTorch), triton (CUDA), or auto, which is triton where it runs."""
    attention: str = EngineConfig.attention
    """Attention kernel: auto (the fastest that works here; doctor prints it), fa3, fa4, cudnn, flash, sdpa or math."""
    adaln: str = EngineConfig.adaln
    """AdaLN: live, precompute (tables for the request's timesteps, same bits, 13 billion parameters less) or auto."""
    threads: Optional[int] = EngineConfig.threads
    """CPU threads; the count can change the last bits of CPU results."""
    gpus: Optional[int] = EngineConfig.gpus
    """Ranks: one process a GPU, or with --device cpu that many on it. Under torchrun leave it out."""
    sp: Optional[int] = EngineConfig.sp
    """Ranks over which the rows are dealt out. Default: all, where the weights fit."""
    tp: Optional[int] = EngineConfig.tp
    """Ranks over which heads and feed-forward width are dealt out: to save memory."""
    attend: str = EngineConfig.attend
    """How rows and heads change places between ranks: plain, packed, overlapped or auto."""
    conditioner: str = EngineConfig.conditioner
    """The conditioner on several ranks: split by heads, fsdp (weights spread, gathered in use), whole on each, or auto."""
    allow_remote: bool = EngineConfig.allow_remote
    """Fetch media from http(s) addresses: whoever writes the request then chooses what this machine asks for."""

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
        same = (
            "device", "precision", "vae_encode", "residency", "host_memory", "row_chunk", "ops", "attention", "adaln",
            "threads", "gpus", "sp", "tp", "attend", "conditioner", "allow_remote",
        )  # fmt: skip
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
    """No progress; which model runs without --model, warnings and errors are still told."""
    traceback: bool = False
    """Show where an error came from."""


@dataclass(frozen=True)
class OutputFlags:
    """What kind of file to write."""

    crf: int = OutputOptions.crf
    """Quality of H.264 (.mp4, .mkv) or VP9 (.webm), 0 (lossless) to 51."""
    preset: str = OutputOptions.preset
    """Speed of the encoder, ultrafast to veryslow."""
    overwrite: bool = False
    """Replace the file, its report and waiting latents where they exist, but nothing that the run itself reads."""
    no_audio: bool = False
    """Leave the sound out."""
    exact_seconds: bool = False
    """Cut picture and sound to the seconds asked for; otherwise all that was made (17n+5 frames) is kept."""
    private: bool = False
    """Leave the prompt and every path out of the report."""

    def build(self) -> OutputOptions:
        """The `OutputOptions`; they are checked together with the path."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "no_audio"}
        return OutputOptions(**values, audio=not self.no_audio)


ENDINGS = "; ".join(f"{suffix or 'no ending'}: {what}" for suffix, what in FORMATS.items())


@dataclass(frozen=True)
class Generate:
    """Make one video with picture and sound, and a JSON report beside it."""

    request: RequestFlags = field(default_factory=RequestFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    output: Annotated[
        str, tyro.conf.arg(aliases=["-o"], metavar="PATH", help=f"What to write, by its ending. {ENDINGS}.")
    ] = "out.mp4"
    writing: OutputFlags = field(default_factory=OutputFlags)
    server: Optional[str] = None
    """Address of a twinreel server that is to make it, such as http://127.0.0.1:8188."""
    server_key_file: Optional[Path] = None
    """File whose first line is that server's API key."""
    trace: Optional[Path] = None
    """New folder for the values between stages, which compare reads: velocities of the first, middle and last step."""
    trace_every_step: bool = False
    """Velocities of every step in --trace."""

    def needed(self, request: Request) -> list[Path]:
        """What a run of `request` reads or fills besides its output."""
        from .media.addresses import files_of

        named = (self.request.request, self.trace, self.server_key_file)
        return [*files_of(request), *(path for path in named if path is not None)]


@dataclass(frozen=True)
class Decode:
    """Finish an interrupted run from the latents it has kept; they go once the file is read back."""

    latents: tyro.conf.Positional[Path]
    """The file NAME.latents.safetensors."""
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="PATH", help_behavior_hint="")] = None
    """What to write, as in generate. Default: NAME.mp4."""
    writing: OutputFlags = field(default_factory=OutputFlags)

    @property
    def target(self) -> str:
        """The file to write."""
        name = self.latents.name.removesuffix(LATENTS_SUFFIX).removesuffix(self.latents.suffix)
        return str(self.latents.with_name(f"{name}.mp4")) if self.output is None else self.output


@dataclass(frozen=True)
class Plan:
    """Say what a request would make and how much memory it would take here. Loads no weight."""

    request: RequestFlags = field(default_factory=RequestFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


@dataclass(frozen=True)
class Verify:
    """Check weights: names, shapes, dtypes, bytes, finite values, tokenizer, hashes of a manifest."""

    path: tyro.conf.Positional[Path]
    """Folder of the weights."""
    write_manifest: bool = False
    """Write the hashes of this folder into a manifest beside the weights; one that exists stays."""
    report: ReportFlags = field(default_factory=ReportFlags)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine would use for every choice, why, and what each missing part costs."""

    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"], help="Where you would write: the folder whose free space is asked.")
    ] = Path("out.mp4")
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


@dataclass(frozen=True)
class Completion:
    """Print a shell's completion script, as in: eval "$(twinreel completion bash)"."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """The shell."""


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Decode, tyro.conf.subcommand("decode")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Completion, tyro.conf.subcommand("completion")]
)


def parse(words: Sequence[str] | None, more: Sequence[Any] = ()) -> Any:
    """The command of `words` (None: the process's own), one of `Command` and `more`. A bad flag prints its reason and
    ends the process with 2."""
    words = sys.argv[1:] if words is None else words
    known = [get_args(item)[1].name for item in (*get_args(Command), *more)]
    if words and not words[0].startswith("-") and words[0] not in known:
        print(unknown_command(words[0], known), file=sys.stderr)
        raise SystemExit(2)
    return tyro.cli(
        Union[(Command, *more)],  # type: ignore[call-overload]  # noqa: UP007
        prog="twinreel",
        args=words,
        description="Video and its stereo sound from MiniMax H3 weights. twinreel --version prints the version.",
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.DisallowNone,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.UseAppendAction,
        ),
    )


def flag_names(command: Any) -> dict[str, str]:
    """What a person wrote for each field that an error of `command`, a dataclass of flags, may name."""
    names = {item.name: f"--{item.name.replace('_', '-')}" for item in fields(command) if item.name not in POSITIONAL}
    for item in fields(command):
        if is_dataclass(getattr(command, item.name)):
            names |= flag_names(getattr(command, item.name))
    return names | (command.written() if hasattr(command, "written") else {})
