"""`twinreel plan`: the numbers of the real run, quickly, and without torch."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from media_files import flat, tone, write_mp4
from twinreel import cli
from twinreel.config import EngineConfig, resolve
from twinreel.engine import Engine
from twinreel.errors import CheckpointError, ConfigError, RequestError, TwinreelError
from twinreel.layout import build_layout
from twinreel.machine import Memory, cuda_memory, host_memory
from twinreel.media.read import prepare, read_sources
from twinreel.parts import Parts
from twinreel.plan import make_plan
from twinreel.planner import in_words, plan_request, verdict
from twinreel.presentation import present
from twinreel.request import Keyframe, Reference, Request
from twinreel.sources import Clip, Picture, Sound
from twinreel.weights import locate, read_spec, verify
from twinreel.weights.fingerprint import fingerprint
from twinreel.weights.stored import StoredWeights
from twinreel.weights.tokenizer import load_tokenizer

CLIP = Clip(np.zeros((50, 48, 64, 3), np.uint8), 24.0, Sound(np.zeros((1, 50_000), np.float32), 24_000))
PICTURE = Picture(np.zeros((64, 96, 3), np.uint8))
REQUESTS = [
    Request("A cat <d>meows</d>."),
    Request("A cat.", keyframes=(Keyframe(PICTURE), Keyframe(PICTURE, -1))),
    Request(
        "<Picture 1> <Video 1> <Audio 2>",
        references=(
            Reference("image", PICTURE),
            Reference("video", CLIP),
            Reference("audio", Sound(np.zeros((2, 96_000), np.float32), 48_000)),
        ),
        duration=2.0,
    ),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.resolved_task)
def test_rows_and_tokens_are_those_of_the_run(request_: Request, tiny_all: Path) -> None:
    planned = plan_request(request_, EngineConfig(model=str(tiny_all), device="cpu"))
    checkpoint = locate(tiny_all)
    spec = read_spec(checkpoint)
    sources = read_sources(request_, spec)
    plan = make_plan(request_, spec, sources)
    prompt = present(plan, prepare(plan, sources), load_tokenizer(checkpoint.folders["tokenizer"], spec.text), spec)
    layout = build_layout(plan, prompt.tags, spec)
    assert planned["prompt"]["tokens"] == len(prompt.ids)
    segments = [(segment.kind, segment.role, segment.rows) for segment in layout.segments]
    assert [tuple(row.values()) for row in planned["rows"]["segments"]] == segments
    assert planned["rows"]["total"] == layout.rows
    assert planned["plan"]["frames"] == plan.frames and planned["notes"] == list(plan.notes)
    json.dumps(planned, allow_nan=False)
    assert planned["memory"]["fits"] in (True, False)


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("residency", ["auto", "stages"])
def test_the_setting_is_what_the_engine_chooses(precision: str, residency: str, tiny_all: Path) -> None:
    config = EngineConfig(model=str(tiny_all), precision=precision, residency=residency, device="cpu")
    facts = plan_request(REQUESTS[0], config)["memory"]
    setting = facts["setting"]
    choices = resolve(config)
    parts = Parts(StoredWeights(locate(tiny_all)), choices, residency)
    assert setting == {
        "device": choices.device.type,
        "element": choices.dtype.itemsize,
        "vae_element": choices.vae_compute.itemsize,
        "tile_batch": choices.tile_batch,
        "residency": parts.residency,
        "adaln": parts.adaln,
        "ops": choices.ops.name,
        "row_chunk": parts.row_chunk,
        "sp": 1,
        "tp": 1,
        "text": 1,
        "stored": 1,
        "fp8": None,
        "encode": choices.vae_encode,
    }
    assert facts["chosen"] == parts.why


def test_the_door_is_the_engines(tiny_all: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_all))
    with pytest.raises(RequestError, match="^duration"):
        plan_request(Request("a", duration=60), config)
    with pytest.raises(ConfigError, match="^device: got 'cuda:99'"):
        plan_request(REQUESTS[0], EngineConfig(model=str(tiny_all), device="cuda:99"))
    with pytest.raises(ConfigError, match="^device: got 'tpu'"):
        plan_request(REQUESTS[0], EngineConfig(model=str(tiny_all), device="tpu"))
    with pytest.raises(CheckpointError):
        plan_request(REQUESTS[0], EngineConfig(model=str(tmp_path)))


PROFILE = {
    "schema": "twinreel-profile/1", "steps": 6, "shifts": [13.0, 10.0], "task": "t2va", "size": [96, 96, 22],
    "ratios": {"steps": [2, 3, 4], "video": [0.1, 0.1, -1], "audio": [0.1, 0.1, 0.1]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        (None, "cannot be read"),
        ({"steps": 7}, "was made for steps 7"),
        ({"task": "x" * 5000}, "was made for task 'xxx"),
        ({"weights": "other"}, "was made for weights 'other'"),
        ({"schema": "x"}, "holds no profile"),
        ({"ratios": None}, "is damaged"),
        ({"ratios": {"steps": [1], "video": [], "audio": [0.1]}}, "is damaged"),
        ({"ratios": {"steps": [1], "video": ["x"], "audio": [0.1]}}, "is damaged"),
    ],
)
def test_plan_and_run_refuse_one_profile_in_one_way(
    change: dict[str, Any] | None, words: str | None, tiny_all: Path, tmp_path: Path
) -> None:
    config, path = EngineConfig(model=str(tiny_all), device="cpu"), tmp_path / "profile.json"
    asked = Request("A cat.", steps=6, duration=0.9, policy=f"adaptive:profile={path}")
    facts = plan_request(replace(asked, policy="every-step"), config)["plan"]
    checkpoint = locate(tiny_all)
    own = {"shifts": facts["shifts"], "size": [*facts["canvas"], facts["frames"]]}
    own["weights"] = fingerprint(checkpoint.component("dit", facts["partition"]))
    if change is not None:
        path.write_text(json.dumps(PROFILE | own | change))
    said = []
    for run in (lambda: plan_request(asked, config), lambda: Engine(config).generate(asked)):
        with pytest.raises(RequestError, match="^policy") if words else nullcontext() as caught:
            run()
        said.append(str(caught.value) if words else "")
    assert said[0] == said[1] and (words or "") in said[0]


def test_verdict() -> None:
    stages = {"encode": {"device": 50, "host": 10}, "decode": {"device": 20, "host": 30}}
    roomy, full = Memory(1000, 500), Memory(1000, 54)
    assert verdict(stages, {"device": roomy, "host": roomy})["fits"] is True
    told = verdict(stages, {"device": full, "host": roomy})
    assert told["fits"] is False and told["peak"] == {"device": 50, "host": 30}
    assert verdict(stages, {"device": None, "host": roomy})["fits"] is None
    assert verdict(stages, {"device": full, "host": None})["fits"] is False
    assert verdict(stages, {"host": None, "device": full})["fits"] is False
    silent = Memory(54, 54, told=False)  # nobody says what of it is free
    assert verdict(stages, {"device": Memory(99, 99, told=False), "host": roomy})["fits"] is None
    told = verdict(stages, {"device": silent, "host": roomy})
    assert told["fits"] is False and "free is not told" in told["why"][0]
    # ranks have a device each and share the host
    assert verdict(stages, {"device": Memory(60, 56), "host": Memory(99, 67)}, 2)["fits"] is True
    told = verdict(stages, {"device": Memory(60, 56), "host": Memory(99, 67)}, 3)
    assert told["fits"] is False and "needed by each of 3 ranks" in told["why"][1]


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert memory is not None and 0 < memory.free <= memory.total
    assert all(device.free <= device.total for device in cuda_memory())


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "4096", "memory.current": "4000", "memory.stat": "active_file 904\ninactive_file 3000\n"}, 4000),
        ({"memory.max": "max", "memory.current": "1", "memory.stat": ""}, None),
    ],
)  # fmt: skip
def test_cached_files_of_a_container_are_room(
    files: dict[str, str], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("twinreel.machine.GROUP", tmp_path)
    memory = host_memory()
    assert memory is not None and (memory.free == free if free else memory.free > 4096)


def test_plan_in_words_and_on_the_command_line(tiny_all: Path, tmp_path: Path, capsys) -> None:
    video = tmp_path / "v.mp4"
    write_mp4(video, [flat((9, 9, 9), 96, 64)] * 60, sound=tone(440, 2.5, 48_000))
    words = ["plan", "<Video 2>", "--ref", f"video:{video}", "--model", str(tiny_all), "--device", "cpu"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert " MiB" in out and "\n- " in out
    assert "60 frames, 2.50 s of sound" in out and "calls" in out and "predicted" in out
    assert "warning: prompt: <Video 2> names nothing" in err
    assert cli.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] and facts["references"][0]["audio_latents"] == 100
    assert in_words(facts)["steps"] == "50 steps = 49 calls, policy every-step"
    assert cli.main(["plan", "a", "--steps", "1"]) == 2


def test_the_released_sizes_are_planned_without_torch(release: Path) -> None:
    # the released tokenizer and configs, without any weights
    parts = {name: release / "FL2VA" / name for name in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    parts |= {"tokenizer": release / "tokenizer", "processor": release / "processor"}
    flags = [word for name, path in parts.items() for word in ("--component", f"{name}={path}")]
    script = f"""
import sys
from twinreel import cli
code = cli.main(["plan", "A cat <d>meows</d>.", "--duration", "15", "--device", "cpu", *{flags!r}])
refused = cli.main(["plan", "A cat.", "--policy", "adaptive:profile=none.json", "--device", "cpu", *{flags!r}])
assert code == 0 and refused == 2 and "torch" not in sys.modules, code
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1206 target audio, 107856 target video" in done.stdout


CHOICES = [
    *(
        {"device": name}
        for name in ("cpu", "auto", "cuda", "cuda:0", "cuda:", "cuda:99", "cpu:0", "cpu:7", "CPU", "tpu", "")
    ),
    {"device": "cuda:" + "9" * 5000},
    *({"ops": name} for name in ("reference", "triton", "x", "")),
    *({"attention": name} for name in ("sdpa", "math", "flash", "fa3", "x")),
    *({"conditioner": name} for name in ("whole", "split")),
    *({name: "x"} for name in ("precision", "residency", "adaln", "vae_encode", "attend")),
    *({"precision": word} for word in ("fp8", "fp8:blocks=99", "fp8:x")),
    *({"precision": "bf16"}, {"vae_encode": "tf32"}, {"attend": "plain"}, {"threads": 0}, {"model": "x" * 5000}),
    *({"gpus": 3}, {"gpus": 2, "device": "cuda:0"}, {"gpus": 999_999}, {"sp": 2}, {"tp": 2}, {"gpus": 2, "sp": 3}),
]


def refusal(build: Callable[[], object]) -> str | None:
    try:
        build()
    except TwinreelError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: str(choice)[:40])
def test_plan_and_engine_refuse_the_same_choices_in_the_same_words(choice: dict[str, Any], tiny_all: Path) -> None:
    config = EngineConfig(**{"model": str(tiny_all), **choice})
    told = refusal(lambda: plan_request(REQUESTS[0], config))
    assert told == refusal(lambda: Engine(config).close())
    assert told is None or told.startswith("ConfigError: ") and len(told) < 300


BAD = {
    "--policy": "reuse:threshold=nan",
    "--duration": "0.01",
    "--device": "cuda:999",
    "--ops": "x",
    "--precision": "x",
}


@pytest.mark.parametrize("pair", list(itertools.combinations(BAD, 2)), ids="".join)
def test_plan_and_generate_refuse_the_same_of_two_faults(
    pair: tuple[str, str], tiny_all: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["a ball", "--model", str(tiny_all), *(word for name in pair for word in (name, BAD[name]))]
    told = []
    for command in (["plan"], ["generate", "-o", str(tmp_path / "a.npz")]):
        code = cli.main([*command, *words])
        told.append((code, capsys.readouterr().err.splitlines()[-3:]))
    assert told[0] == told[1] and told[0][0] in (2, 3)


def test_what_was_taken_by_default_is_noted(tiny_all: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_all, tmp_path / "model")
    shutil.rmtree(model / "processor")
    config = EngineConfig(model=str(model), device="cpu")
    (note,) = (note for note in plan_request(REQUESTS[0], config)["notes"] if "no processor/" in note)
    assert note in Engine(config).describe()["notes"] and note in verify(model)["notes"]


@pytest.mark.parametrize(("mesh", "sizes"), [({}, (2, 1)), ({"tp": 2}, (1, 2))])
def test_of_several_ranks_one_is_planned_and_said_to_be(
    mesh: dict[str, int], sizes: tuple[int, int], tiny_all: Path
) -> None:
    config = EngineConfig(model=str(tiny_all), device="cpu", gpus=2, **mesh)
    told, alone = (plan_request(REQUESTS[0], each)["memory"] for each in (config, EngineConfig(str(tiny_all))))
    assert told["fits"] is True and "needed by each of 2 ranks" in told["why"][-1]
    assert (told["setting"]["sp"], told["setting"]["tp"]) == sizes
    assert told["stages"]["denoise"]["work"] < alone["stages"]["denoise"]["work"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpus": 2}, "2: sp 2, tp 1 (auto: rows over all ranks); conditioner split over 2 (auto: less memory, "),
        ({"gpus": 2, "tp": 2, "conditioner": "whole"}, "2: sp 1, tp 2 (asked for); conditioner whole on each (asked"),
        ({"gpus": 2, "conditioner": "fsdp"}, "conditioner fsdp (asked for); attend plain (auto: "),
        ({}, None),
    ],
    ids=str,
)
def test_the_ranks_to_come_are_told_as_the_engine_tells_them(
    given: dict[str, Any], told: str | None, tiny_all: Path
) -> None:
    facts = plan_request(REQUESTS[0], EngineConfig(model=str(tiny_all), device="cpu", **given))
    assert (told or "") in in_words(facts).get("ranks", "") and ("ranks" in in_words(facts)) == (told is not None)


def test_a_plan_has_the_topology_of_the_run(tiny_all: Path) -> None:
    config = EngineConfig(model=str(tiny_all), device="cpu", gpus=2, threads=1)
    with closing(Engine(config)) as engine:
        assert plan_request(REQUESTS[0], config)["topology"] == engine.describe()["topology"]


def test_memory_that_was_given_is_planned_with(tiny_all: Path) -> None:
    config = EngineConfig(model=str(tiny_all), device="cpu", host_memory=2)
    facts = plan_request(REQUESTS[0], config)
    assert facts["memory"]["why"][-1].endswith("2.00 GiB given") and "2.00 GiB given" in in_words(facts)["fits"]


def test_a_launchers_processes_are_planned_as_its_ranks(tiny_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, config = Request("A bell.", duration=0.9), EngineConfig(model=str(tiny_all), device="cpu")
    asked = plan_request(request, replace(config, gpus=2))
    place = {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    found = plan_request(request, config)
    assert found["topology"]["ranks"] == 2 and found["topology"] == asked["topology"]
    assert found["memory"]["setting"] == asked["memory"]["setting"]
    assert "by each of 2 ranks" in str(found["memory"]["why"]) and "by each of 2 ranks" in str(asked["memory"]["why"])
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="gpus: got 3; it must divide the 2 heads"):
        plan_request(request, config)


@pytest.mark.parametrize(
    ("policy", "steps", "words", "warned"),
    [
        ("reuse", 50, "50 steps = 49 calls, policy reuse, of which it computes 34", None),
        ("forecast:balanced", 4, "4 steps = 3 calls, policy forecast", "has no meaning for 3 calls"),
        ("adaptive", 50, "50 steps = 49 calls at most, policy adaptive", None),
    ],
)
def test_how_many_calls_a_policy_makes_is_said(
    policy: str, steps: int, words: str, warned: str | None, tiny_all: Path
) -> None:
    facts = plan_request(
        Request("A bell.", steps=steps, policy=policy), EngineConfig(model=str(tiny_all), device="cpu")
    )
    assert in_words(facts)["steps"].startswith(words)
    assert [warned in warning for warning in facts["warnings"]] == ([True] if warned else [])
