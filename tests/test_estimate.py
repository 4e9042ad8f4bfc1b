"""Predicted memory: weights to the byte, peaks against processes that were measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny import BUILD, tiny_spec, write_tiny
from twinreel.demo.tiny import ALL_TASKS
from twinreel.memory.estimate import FP32, WINOGRAD_STRIP, Setting, estimate, part_weights, table_weights
from twinreel.models.dit import DiT
from twinreel.models.text_encoder import TextEncoder
from twinreel.models.video_encoder import VideoEncoder
from twinreel.ops import frames, select
from twinreel.parallel import Axis, Parallel
from twinreel.plan import make_plan
from twinreel.request import Request
from twinreel.spec import Spec
from twinreel.weights import locate, read_spec, stored_bytes

CPU = Setting("cpu", 4, 4, 1, "all")
H3_GPU = Setting("cuda", 2, 2, 4, "stages")
ROWS = {"text": 100, "audio": 1206, "video": 107_856}
GIB = 2**30


@pytest.fixture(scope="module")
def h3(release: Path) -> Spec:
    parts = {name: release / "FL2VA" / name for name in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    return read_spec(locate(None, parts | {"tokenizer": release / "tokenizer"}, weights=False))


@pytest.mark.parametrize("part", list(BUILD))
def test_weights_are_those_of_the_modules(part: str) -> None:
    spec = tiny_spec()
    with torch.device("meta"):
        module = BUILD[part](spec)  # built in bf16
    built = sum(value.numel() * value.element_size() for value in module.state_dict().values())
    assert part_weights(spec, part, replace(CPU, element=2)).kept == built


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_its_share_of_the_linears_and_all_of_the_rest(ranks: int) -> None:
    tiny = tiny_spec()
    spec = replace(
        tiny,
        dit=replace(tiny.dit, heads=4, head_dim=8, ffn=64, rope_freqs=1),
        text=replace(tiny.text, heads=8, kv_heads=4),
    )
    axis = Axis("ranks", ranks)
    with torch.device("meta"):
        modules = {
            "dit": DiT(spec.dit, select(), replace(Parallel.single(), tp=axis), torch.bfloat16),
            "text_encoder": TextEncoder(spec.text, torch.bfloat16, axis),
        }
    for part, module in modules.items():
        built = sum(value.numel() * value.element_size() for value in module.state_dict().values())
        assert part_weights(spec, part, replace(CPU, element=2, tp=ranks, text=ranks)).kept == built


@pytest.mark.parametrize("channels", [(32, 32, 32, 64, 64, 128), (32, 32, 32, 64, 64, 96)], ids=str)
def test_weights_of_winograd_are_those_of_the_module(channels: tuple[int, ...]) -> None:
    winograd = pytest.importorskip("twinreel.ops.winograd")
    assert winograd.BUDGET == WINOGRAD_STRIP
    spec = replace(tiny_spec(), video=replace(tiny_spec().video, channels=channels))
    module = VideoEncoder(spec.video, passes=frames.choose("triton", "fp32", channels, torch.device("cpu")))
    module.freeze()
    built = sum(value.numel() * FP32 for value in (*module.parameters(), *module.buffers()))
    plain, made = (part_weights(spec, "video_encoder", replace(CPU, ops=name)) for name in ("reference", "triton"))
    assert made.kept == built and (built > 2 * plain.kept) is (channels[-1] == 128)
    assert part_weights(spec, "video_encoder", replace(CPU, ops="triton", encode="tf32")) == plain


def test_h3_weights(h3: Spec) -> None:
    parts = ("dit:fl2va", "modulation:fl2va", "text_encoder")
    assert sum(part_weights(h3, part, H3_GPU).kept / GIB for part in parts) == pytest.approx(61.7 + 48.2, abs=1)
    decoder = part_weights(h3, "video_decoder", H3_GPU)
    assert decoder.kept < 0.52 * decoder.loading  # it arrives in fp32 and runs in fp16
    assert decoder.loading == stored_bytes(h3, "video_decoder")
    assert part_weights(h3, "text_encoder", H3_GPU).largest == 151_936 * 5120 * 2  # the embeddings


def test_a_conditioner_that_is_spread_arrives_whole_and_keeps_a_part(h3: Spec) -> None:
    whole, spread = (part_weights(h3, "text_encoder", replace(H3_GPU, stored=ranks)) for ranks in (1, 8))
    assert spread.loading == whole.loading
    # what no layer has, the embeddings first of all, is gathered for the whole pass
    assert whole.kept / 8 + 1.5 * GIB < spread.kept < whole.kept / 8 + 6 * GIB < 0.3 * whole.kept


def test_what_stays_counts_in_the_next_stage(h3: Spec) -> None:
    plan = make_plan(Request("a", duration=15), h3)
    dropped, kept = (estimate(plan, ROWS, h3, replace(H3_GPU, residency=name)) for name in ("stages", "all"))
    assert dropped["encode"] == kept["encode"]
    gained = kept["denoise"]["device"] - dropped["denoise"]["device"]
    assert gained == part_weights(h3, "text_encoder", H3_GPU).kept
    assert 14 < dropped["denoise"]["work"] / GIB < 22 and dropped["decode"]["work"] / GIB < 3
    assert dropped["denoise"]["host"] < 5 * GIB  # the host holds one tensor at a time


def test_tables_in_place_of_projections(h3: Spec) -> None:
    plan = make_plan(Request("a", duration=15), h3)
    live, tables = (estimate(plan, ROWS, h3, replace(H3_GPU, adaln=name)) for name in ("live", "precompute"))
    saved = (live["denoise"]["device"] - tables["denoise"]["device"]) / GIB
    assert 22 < saved < 24  # 24.3 GiB of projections, 0.9 GiB of tables
    waiting = tables["decode"]["host"] - live["decode"]["host"]  # they leave the device
    assert waiting == table_weights(plan, h3, H3_GPU).kept and tables["denoise"]["host"] == live["denoise"]["host"]
    kept = (estimate(plan, ROWS, h3, replace(H3_GPU, residency="all", adaln=name)) for name in ("live", "precompute"))
    assert len({facts["decode"]["host"] for facts in kept}) == 1


def test_work_grows_with_rows_and_canvas(h3: Spec) -> None:
    def at(**values: object) -> dict[str, int]:
        plan = make_plan(Request("a", **values), h3)  # type: ignore[arg-type]
        rows = ROWS | {"video": plan.latents * plan.height * plan.width // 1024}
        return {stage: facts["work"] for stage, facts in estimate(plan, rows, h3, H3_GPU).items()}

    short, long, small = at(duration=5), at(duration=15), at(duration=5, short_edge=384)
    assert 2.5 < long["denoise"] / short["denoise"] < 3 and small["denoise"] < 0.3 * short["denoise"]
    assert long["decode"] == short["decode"]  # clips stream


def test_a_clip_leaves_a_device_beside_the_next(h3: Spec) -> None:
    plan = make_plan(Request("a"), h3)
    cuda, cpu = (estimate(plan, ROWS, h3, replace(H3_GPU, device=name))["decode"] for name in ("cuda", "cpu"))
    assert cuda["work"] - cpu["work"] == 17 * plan.height * plan.width * 3


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint whose activations, not its weights, fill memory."""
    spec = tiny_spec()
    dit = replace(spec.dit, hidden=256, heads=4, head_dim=64, ffn=8192, layers=1, refiner_layers=1)
    video = replace(spec.video, channels=(128, 128, 128, 128, 128, 128))
    world = replace(spec.world, short_edge=384, area_cap=384 * 672, reference_edge=256)
    spec = replace(spec, dit=dit, video=video, world=world, partitions=(ALL_TASKS,))
    return write_tiny(tmp_path_factory.mktemp("wide") / "model", layout="single", spec=spec)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(("case", "stages"), [("target", ("denoise", "decode")), ("picture", ("encode",))])
def test_peaks_are_as_predicted(wide_model: Path, tmp_path: Path, case: str, stages: tuple[str, ...]) -> None:
    program = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(program), str(wide_model), case, str(tmp_path / "x.mp4")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    for stage in stages:
        measured, predicted, work = facts[stage]
        assert work > 0.2 * predicted, "the case must be one that the work decides"
        assert 0.8 < measured / predicted < 1.2, f"{stage}: {measured >> 20} MiB measured, {predicted >> 20} predicted"
