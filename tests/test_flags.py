"""Flags -> Request, EngineConfig; every field of both can be reached from the command line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from twinreel import limits
from twinreel.config import EngineConfig
from twinreel.demo import bundled_model
from twinreel.errors import ConfigError, RequestError
from twinreel.finish import Ending
from twinreel.flags import (
    REQUEST_FLAGS,
    Doctor,
    EngineFlags,
    Generate,
    OutputFlags,
    RequestFlags,
    Verify,
    flag_names,
    parse,
    parse_reference,
)
from twinreel.media.read import read_sources
from twinreel.output import OutputOptions
from twinreel.plan import make_plan
from twinreel.request import Keyframe, Reference, Request
from twinreel.request_json import parse_json, request_from_json
from twinreel.serve.flags import COMMANDS as SERVE
from twinreel.serve.intake import OWN
from twinreel.tool_flags import COMMANDS
from twinreel.tools import bench
from twinreel.weights import locate, read_spec

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("generate", "decode", "plan", "verify", "doctor", "compare", "validate", "quantize", "bench", "serve")
NAMES += ("completion",)

EVERY_REQUEST_FLAG = [
    ["--task", "ref2va"],
    ["--ref", "image:x.png"],
    ["--ref", "video:y.mp4@1.0-4.5"],
    ["--ref", "audio:z.mp3"],
    ["--first", "a.png"],
    ["--last", "b.png"],
    ["--fit", "cover"],
    ["--duration", "6.5"],
    ["--aspect", "4:3"],
    ["--size", "1344x768"],
    ["--short-edge", "512"],
    ["--steps", "20"],
    ["--seed", "7"],
    ["--shifts", "9", "2.5"],
    ["--noise", "sequential"],
]


def request_of(*words: str) -> Request:
    command = parse(["generate", *words])
    assert isinstance(command, Generate)
    return command.request.build()


def test_every_request_flag_arrives():
    assert request_of("A cat.", *sum(EVERY_REQUEST_FLAG, [])) == Request(
        prompt="A cat.",
        task="ref2va",
        keyframes=(Keyframe("a.png", 0, "cover"), Keyframe("b.png", -1, "cover")),
        references=(Reference("image", "x.png"), Reference("video", "y.mp4", 1.0, 4.5), Reference("audio", "z.mp3")),
        duration=6.5,
        aspect="4:3",
        size=(1344, 768),
        short_edge=512,
        steps=20,
        seed=7,
        shifts=(9.0, 2.5),
        noise="sequential",
    )


def test_no_field_of_request_or_config_is_out_of_reach():
    assert set(REQUEST_FLAGS) == {item.name for item in fields(Request)}
    flags = {item.name for item in fields(RequestFlags)} - {"request", "example"}
    assert flags == {flag for names in REQUEST_FLAGS.values() for flag in names}
    renamed = {"components" if item.name == "component" else item.name for item in fields(EngineFlags)}
    assert renamed == {item.name for item in fields(EngineConfig)}


def test_what_is_not_given_is_left_to_the_dataclasses():
    assert request_of("A cat.") == Request("A cat.") == request_of("--prompt", "A cat.")
    doctor = parse(["doctor"])
    assert isinstance(doctor, Doctor) and doctor.engine.build() == EngineConfig()


def test_engine_flags_arrive():
    words = "--model m --component transformer=t --component audio_vae=a=b --device cuda:1 --precision bf16".split()
    words += "--vae-encode tf32 --residency stages --ops reference --threads 3 --allow-remote".split()
    words += "--host-memory 9.5 --row-chunk 8192".split()
    words += "--attention flash --adaln precompute".split()
    doctor = parse(["doctor", *words])
    assert isinstance(doctor, Doctor)
    assert doctor.engine.build() == EngineConfig(
        "m",
        {"transformer": "t", "audio_vae": "a=b"},
        device="cuda:1",
        precision="bf16",
        vae_encode="tf32",
        residency="stages",
        host_memory=9.5,
        row_chunk=8192,
        ops="reference",
        attention="flash",
        adaln="precompute",
        threads=3,
        allow_remote=True,
    )


@pytest.mark.parametrize("component", ["transformer", "=x", "transformer="])
def test_component_needs_name_and_path(component: str):
    with pytest.raises(ConfigError, match="NAME=PATH"):
        EngineFlags(component=(component,)).build()
    with pytest.raises(ConfigError, match="twice"):
        EngineFlags(component=("a=b", "a=c")).build()


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("image:x.png", Reference("image", "x.png")),
        ("video:y.mp4@1.0-4.5", Reference("video", "y.mp4", 1.0, 4.5)),
        ("video:y.mp4@2-", Reference("video", "y.mp4", 2.0, None)),
        ("audio:z.mp3@-4.", Reference("audio", "z.mp3", None, 4.0)),
        ("video_audio:a@home/y.mp4", Reference("video_audio", "a@home/y.mp4")),
        ("video:a@1-2/y.mp4@.5-3", Reference("video", "a@1-2/y.mp4", 0.5, 3.0)),
        ("video:y@-", Reference("video", "y@-")),
        ("image:data:image/png;base64,QUJD", Reference("image", "data:image/png;base64,QUJD")),
        ("audio:file:///tmp/z.wav@0-2", Reference("audio", "file:///tmp/z.wav", 0.0, 2.0)),
        ("image:C:\\x.png", Reference("image", "C:\\x.png")),
    ],
)
def test_references(text: str, reference: Reference):
    assert parse_reference(text, 0) == reference


@pytest.mark.parametrize("text", ["x.png", "picture:x.png", "image:", ":x.png", ""])
def test_wrong_references_are_named(text: str):
    with pytest.raises(RequestError, match="KIND:SOURCE") as caught:
        parse_reference(text, 2)
    assert caught.value.field == "references[2]"


@pytest.mark.parametrize("text", ["1344", "1344*768", "x768", "1344x", "-1x5", "1e3x2"])
def test_wrong_sizes_are_named(text: str):
    with pytest.raises(RequestError, match="WIDTHxHEIGHT"):
        RequestFlags(text="a", size=text).build()


def test_prompt_missing_or_twice():
    with pytest.raises(RequestError, match="^prompt: is missing"):
        request_of()
    with pytest.raises(RequestError, match="^prompt: was given twice"):
        request_of("one", "--prompt", "two")


def test_fit_needs_a_keyframe():
    with pytest.raises(RequestError, match="^keyframes: --fit"):
        request_of("A cat.", "--fit", "cover")


def test_request_file(tmp_path):
    body = {"task": "t2va", "prompt": "A cat.", "seed": 3, "target": {"duration_seconds": 8, "aspect_ratio": "9:16"}}
    path = tmp_path / "request.json"
    path.write_text(json.dumps(body))
    made = request_of("--request", str(path))
    assert (made.prompt, made.task, made.seed, made.duration, made.aspect) == ("A cat.", "t2va", 3, 8, "9:16")


@pytest.mark.parametrize("flag", EVERY_REQUEST_FLAG + [["--prompt", "x"]], ids=" ".join)
def test_request_file_with_another_flag_is_refused_by_name(flag: list[str], tmp_path):
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(RequestError, match=flag[0]) as caught:
        request_of("--request", str(tmp_path / "r.json"), *flag)
    assert caught.value.field == "request"


def test_request_file_with_positional_prompt_or_absent(tmp_path):
    with pytest.raises(RequestError, match="leave out the prompt"):
        request_of("A cat.", "--request", str(tmp_path / "r.json"))
    with pytest.raises(RequestError, match="cannot read .*: No such file"):
        request_of("--request", str(tmp_path / "r.json"))


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["generate", "a", "--steps", "many"], ["generate", "a", "--bad"], ["verify"], ["generate", "a", "b"]],
    ids=" ".join,
)
def test_bad_flags_end_with_2(words: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("slip", "meant"), [("--stpes", "--steps"), ("--precison", "--precision"), ("--sed", "--seed")]
)
def test_an_unknown_flag_names_the_nearest(slip: str, meant: str, capsys):
    with pytest.raises(SystemExit):
        parse(["generate", "a", slip, "1"])
    said = capsys.readouterr().err
    assert slip in said and meant in said


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["generat", "a"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "twinreel: no such command: generat" and len(lines) == 3
    assert "did you mean generate?" in lines[2]


def test_verify_and_output_flags():
    verify = parse(["verify", "weights", "--write-manifest", "--json"])
    assert isinstance(verify, Verify)
    assert str(verify.path) == "weights" and verify.write_manifest and verify.report.json
    made = parse(["generate", "a", "-o", "b.mp4", "--crf", "20", "--preset", "slow", "-q", "--traceback"])
    assert isinstance(made, Generate)
    assert (str(made.output), made.writing.crf, made.writing.preset) == ("b.mp4", 20, "slow")
    assert made.report.quiet and made.report.traceback and not made.report.json


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What `--help` prints for the program ("") and for every command, 100 columns wide."""
    pages = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        for name in ("", *NAMES):
            page = io.StringIO()
            with contextlib.redirect_stdout(page), pytest.raises(SystemExit) as ended:
                parse([*name.split(), "--help"], (*COMMANDS, *SERVE))
            assert not ended.value.code
            pages[name] = page.getvalue()
    return pages


def test_help_fits_100_columns_and_explains_every_flag(helps: dict[str, str]):
    for name, page in helps.items():
        for line in page.splitlines():
            assert len(line) <= 100 or line.startswith("usage:"), f"{name}: {line}"
        # a flag without a text would be followed by the next one, or by the end of its box
        assert not re.search(r"│ (-\w \w+, )?--[\w-]+( [\w{},.=]+)? +│\n[│╰] ?(--|─)", page), name
    assert set(NAMES) == set(re.findall(r"• (\w+)", helps[""]))


def test_help_names_the_limits(helps: dict[str, str]):
    page = " ".join(helps["generate"].replace("│", " ").split())
    for words in (
        "1 to 7,000 characters",
        "4 to 15 s",
        "9 of kind image",
        "12 in all",
        "clips of 2 to 15 s",
        "2 to 1000",
    ):
        assert words in page, words
    assert f"0 to {2**63 - 1}" in page and "from 1:4 to 4:1" in page and "N-1 model calls" in page


def test_help_knows_the_bundled_limit(helps: dict[str, str]):
    spec = read_spec(locate(bundled_model()))
    assert f"(miniature: {limits.durations(spec.world)})" in " ".join(helps["generate"].replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["generate", "A", "--last", "b.png"], {"keyframes[0]": "--last", "short_edge": "--short-edge"}),
        (["plan", "A", "--ref", "image:a", "--ref", "image:b"], {"references[1]": "--ref 2", "prompt": "the prompt"}),
        (["generate", "--request", "a.json"], {"duration": "duration", "output": "--output"}),
        (["compare", "a", "b"], {"b": "B, the second file", "page": "--page"}),
    ],
)
def test_fields_have_the_names_that_were_written(words: list[str], names: dict[str, str]):
    found = flag_names(parse(words, (*COMMANDS, *SERVE)))
    assert {field: found.get(field) for field in names} == names


def recipes(page: str) -> list[list[str]]:
    """The words of every twinreel command in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("twinreel ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def bench_help(what: str) -> str:
    """What `--help` prints for one bench, which has flags of its own."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), pytest.raises(SystemExit):
        bench.perform([what, "--help"])
    return page.getvalue()


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_every_flag_of_a_recipe_exists(page: str, helps: dict[str, str]):
    found = recipes(page)
    assert found
    for words in found:
        if words == ["--version"]:
            continue
        flags = {word for word in words[1:] if re.match(r"--?[a-z]", word)}
        text = helps[words[0]] if words[0] != "bench" else bench_help(words[1])
        assert flags <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)), words


def test_recipes_show_every_flag_that_describes_a_request_or_a_file():
    shown = {word for words in recipes("docs/recipes.md") for word in words if word.startswith("--")}
    wanted = {name for names in REQUEST_FLAGS.values() for name in names} - {"text", "prompt", "task"}
    wanted |= {item.name for item in fields(OutputFlags)}
    assert {f"--{name.replace('_', '-')}" for name in wanted} <= shown


def test_the_recipes_say_what_of_a_servers_words_a_file_cannot_hold():
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    for word in OWN:
        assert f"`{word}`" in page, word
        with pytest.raises(RequestError, match=f"^{word}: "):
            request_from_json({"prompt": "p", word: 1})


def test_the_json_of_the_recipes_is_a_request():
    body = re.search(r"```json\n(.*?)```", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    assert body and parse_json(body[1]).references == (Reference("image", "her.png"),)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(model="a b", device="cpu", gpus=2, sp=1, tp=2, conditioner="split", threads=3),
        EngineConfig(components={"transformer": "t", "audio_vae": "a=b"}, precision="bf16", residency="stages"),
    ],
)
@pytest.mark.parametrize(
    "output", [OutputOptions(), OutputOptions(crf=3, audio=False, exact_seconds=True, private=True)]
)
def test_the_command_that_finishes_a_run_says_all_that_the_run_was_told(config: EngineConfig, output: OutputOptions):
    words = shlex.split(Ending(Path("o.mp4"), output, config, {}).command(Path("o.latents.safetensors")))
    command = parse(words[1:])
    assert (command.engine.build(), command.writing.build(), str(command.target)) == (config, output, "o.mp4")


def test_a_request_that_is_no_file_is_refused_at_once():
    with pytest.raises(RequestError, match="cannot read /dev/zero: it is no file of at most 256 MiB"):
        RequestFlags(request=Path("/dev/zero")).build()


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_examples_are_requests_of_their_task_that_the_bundled_model_takes(task: str) -> None:
    spec = read_spec(locate(bundled_model()))
    request = RequestFlags(example=task).build()
    assert request.resolved_task == task
    sources = read_sources(request, spec)
    assert make_plan(request, spec, sources).task == task
    changed = RequestFlags(example=task, steps=6, seed=9, size="128x128").build()
    assert (changed.steps, changed.seed, changed.size, changed.prompt) == (6, 9, (128, 128), request.prompt)
    for other in ({"text": "a"}, {"prompt": "a"}, {"first": "a.png"}, {"ref": ("image:a.png",)}, {"fit": "cover"}):
        with pytest.raises(RequestError, match=f"--example {task} has its own prompt and media; leave out"):
            RequestFlags(example=task, **other).build()
    with pytest.raises(RequestError, match="leave out --example"):
        RequestFlags(example=task, request=Path("a.json")).build()
