"""The training program in its smoke size: what it trains is what generates, and it resumes, exports and is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from twinreel import ops
from twinreel.demo.batches import Batches, conditions_of, task_caption
from twinreel.demo.batching import Segments, batch_layout, cut_patches, encode_prompts, prompt_layout
from twinreel.demo.captions import VARIANTS
from twinreel.demo.data import video_rows
from twinreel.demo.fast_encoder import moments
from twinreel.demo.recipe import Pace, release, smoke
from twinreel.demo.scenes import WORDS, render_reference_image, sample_scene
from twinreel.demo.train import __main__ as command
from twinreel.demo.train import dit
from twinreel.demo.train.__main__ import main
from twinreel.demo.train.loop import rate_factor, read_state
from twinreel.demo.words import token_ids, write_tokenizer
from twinreel.layout import build_layout, patchify
from twinreel.models.dit import DiT, make_row_state
from twinreel.models.modulation import LiveModulation
from twinreel.models.text_encoder import TextEncoder
from twinreel.models.video_encoder import VideoEncoder
from twinreel.parallel import Parallel
from twinreel.plan import Plan
from twinreel.presentation import Vision, vision_patches
from twinreel.weights.keymap import stored_tensors
from twinreel.weights.tokenizer import load_tokenizer

CPU = torch.device("cpu")
LIMIT = 20_000_000  # bytes of all weights together


@pytest.fixture(scope="module")
def spec():
    return smoke().spec


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which every part was trained for a few steps, the DiT in two pieces."""
    folder = tmp_path_factory.mktemp("training")
    common = ["--smoke", "--device", "cpu", "--folder", str(folder)]
    for part in ("audio", "vae", "decoder"):
        main([part, *common, "--steps", "2"])
    main(["dit", *common, "--steps", "3", "--end", "0.5"])
    main(["dit", *common, "--steps", "2", "--begin", "0.5"])
    main(["export", *common])
    return folder


def test_released_sizes_fit_the_limit():
    total = 0
    for component in ("transformer", "text_encoder", "video_vae", "audio_vae"):
        for row in stored_tensors(component, "original", release().spec).values():
            if not row.optional:
                total += torch.Size(row.shape).numel() * getattr(torch, row.dtype).itemsize
    assert total < LIMIT


def test_every_word_is_one_token(tmp_path: Path):
    ids = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for word in WORDS:
        if word.islower() and word.isalpha():
            assert len(tokenizer.encode(f" {word}")) == 1, word
    assert len(tokenizer.encode("<Picture 1>: ")) == 5
    assert tokenizer.encode("<d>") == [ids["<d>"]]
    assert tokenizer.encode(" zebra") and max(tokenizer.encode(" zebra")) < len(token_ids())
    assert len(set(ids.values())) == len(ids) <= release().spec.text.vocab


def test_batched_dit_equals_the_dit(spec):
    torch.manual_seed(0)
    segments = Segments()
    batched = DiT(spec.dit, segments.ops(), Parallel.single(), torch.float32)
    single = DiT(spec.dit, ops.select("reference"), Parallel.single(), torch.float32)
    modulation = LiveModulation(spec.dit, torch.float32)
    single.load_state_dict(batched.state_dict())
    conditions = conditions_of("both", 64, 64, 0)
    plan = Plan("fl2va", "demo", "", 64, 64, 22, 7, 37, 50, 0, "official", (12.0, 3.0), conditions)
    layout = build_layout(plan, torch.tensor([1, 1, 0, 0, 1]), spec)
    many = batch_layout(layout, 3, spec.dit, torch.float32, CPU)
    segments.lay_out(many)
    video, audio = torch.randn(3, len(layout.video_indices), 96), torch.randn(3, len(layout.audio_indices), 32)
    text, times = torch.randn(3, 5, spec.dit.text_dim), torch.rand(3, 4)
    with torch.no_grad():
        mod = modulation.at(times.flatten(), many.clock_indices, many.at)
        found = batched(video.flatten(0, 1), audio.flatten(0, 1), batched.refine(text.flatten(0, 1)), many.at, mod)
        indices = (layout.text_indices, layout.video_indices, layout.audio_indices)
        at = make_row_state(layout.positions_S3, layout.tags_S, indices, spec.dit, torch.float32, CPU)
        for i in range(3):
            mod = modulation.at(times[i], layout.clock_S, at)
            wanted = single(video[i], audio[i], single.refine(text[i]), at, mod)
            for both, one in zip(found, wanted, strict=True):
                # Other products, other roundings: float32 noise, far under the values' size of about one.
                torch.testing.assert_close(both.unflatten(0, (3, -1))[i], one, rtol=0, atol=1e-5)


def test_batched_conditioner_equals_the_conditioner(spec):
    torch.manual_seed(0)
    encoder = TextEncoder(spec.text, torch.float32).requires_grad_(False)
    for p in encoder.parameters():
        torch.nn.init.normal_(p, std=0.2)
    still = torch.randint(0, 256, (2, 1, 64, 96, 3), dtype=torch.uint8)
    film = torch.randint(0, 256, (2, 5, 64, 64, 3), dtype=torch.uint8)
    sights = [cut_patches(still, spec.processor), cut_patches(film, spec.processor)]
    for kind, frames, sight in (("image", still, sights[0]), ("video", film, sights[1])):
        vision = Vision(kind, frames[1].numpy(), sight.grid)
        assert torch.equal(vision_patches(vision, spec.processor), sight.patches[1])
    types = torch.tensor([0] * 3 + [1] * 6 + [0] * 2 + ([0] + [2] * 4 + [0]) * 3 + [0] * 4)
    ids = torch.randint(0, 200, (2, len(types)))
    at = prompt_layout(types, [s.grid for s in sights], spec.text, torch.float32, CPU)
    found = encode_prompts(encoder, ids, at, sights).unflatten(0, (2, -1))
    for i in range(2):
        wanted = encoder(ids[i], types, [(s.patches[i], s.grid) for s in sights])
        torch.testing.assert_close(found[i], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frames", [17, 5, 1])
def test_fast_encoder_equals_the_encoder(spec, frames: int):
    torch.manual_seed(0)
    encoder = VideoEncoder(replace(spec.video, channels=(32, 32, 32, 64, 64, 128)))
    x = torch.randn(1, frames, 32, 64, 3)
    wanted = encoder.quant_conv(encoder.encoder(x.permute(0, 4, 1, 2, 3).contiguous()))
    found = moments(encoder, x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    pull = torch.randn_like(wanted)
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    slopes = [torch.autograd.grad(y, parameters, pull, allow_unused=True) for y in (found, wanted)]
    for name, one, other in zip(names, *slopes, strict=True):
        # A bias before a norm of single channels has no gradient but rounding; hence the floor.
        assert (one - other).norm() <= 1e-3 * other.norm().clamp(min=0.5), name


def test_rows_are_those_of_patchify(spec):
    full = replace(spec.video, mean=(0.0,) * 24, std=(1.0,) * 24)
    z = torch.randn(2, 24, 3, 4, 6)
    assert torch.equal(video_rows(z, full)[1], patchify(z[1:], (1, 2, 2)))


def test_rates_warm_up_and_cool_down():
    pace = Pace(1, 1.0, warmup=0.1, cooldown=0.5, floor=0.02, rewarm=10)
    assert rate_factor(0.05, 100, pace) == pytest.approx(0.5)
    assert rate_factor(0.3, 100, pace) == 1.0
    assert rate_factor(0.75, 100, pace) == pytest.approx(0.5)
    assert rate_factor(0.3, 0, pace) == pytest.approx(0.1)  # moments are new after a resume
    assert rate_factor(1.0, 100, pace) == 0.02


@pytest.mark.parametrize(("device", "kept"), [("cpu", []), ("cuda:1", [torch.device("cuda", 1)])])
def test_a_check_puts_the_random_state_of_its_own_device_back(
    device: str, kept: list[torch.device], monkeypatch: pytest.MonkeyPatch
):
    asked: list[list[torch.device]] = []

    def fork(devices: list[torch.device]) -> object:
        asked.append(devices)
        return forked([])  # there is no such device here

    forked = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    video = SimpleNamespace(device=torch.device(device))
    held = SimpleNamespace(shelves=[SimpleNamespace(video=video)], tasks=())
    assert dit.check(None, held, 2) == {} and asked == [kept]  # type: ignore[arg-type]


def test_captions_of_tasks_name_their_conditions():
    scene = sample_scene(5, sound="bell", motion="bounce")
    for variant in range(VARIANTS):
        assert "<Video 1>" in task_caption(scene, "video", variant)
        both = task_caption(scene, "image+audio", variant)
        assert "<Picture 1>" in both and "<Audio 1>" in both


def test_pieces_resume_and_log(trained: Path):
    lines = [json.loads(line) for line in (trained / "dit.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [1, 2, 3, 4, 5]
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
    state = read_state(trained / "dit-mean.safetensors")
    assert state["step"] == 5 and state["progress"] == 1.0
    assert len(state["facts"]["statistics"]["video_mean"]) == 24


@pytest.mark.parametrize(
    "more",
    [
        "--seconds nan", "--seconds inf", "--seconds 0", "--steps 0", "--begin 0.5 --end 0.5", "--begin -1", "--end 1.5",
        "--begin nan", "--count 0", "--workers 0", "--device gpu", "--device cuda:99", "--device cpu,cpu",
        f"--folder {__file__}", f"--model {__file__}",
    ],
)  # fmt: skip
def test_flags_that_mean_nothing_are_refused(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "run", lambda options: pytest.fail("it began"))
    with pytest.raises(SystemExit) as end:
        main(["audio", "--smoke", "--folder", str(tmp_path / "state"), *more.split()])
    assert end.value.code == 2 and more.split()[0] in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "name", "content"),
    [
        ("decoder", None, b""),
        ("dit", None, b""),
        ("export", None, b""),
        ("evaluate", None, b""),
        ("audio", "audio", b"damaged"),
        ("audio", "audio", None),
        ("audio", "audio-mean", None),
        ("audio", "audio-mean", b""),
        ("vae", "video", None),
        ("dit", "video-mean", b"damaged"),
        ("export", "audio-mean", b"damaged"),
    ],
)
def test_a_state_that_is_absent_or_damaged_is_said(
    part: str,
    name: str | None,
    content: bytes | None,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """`name`: the file of a whole state that is damaged, None for no state; content None is a file of other tensors."""
    folder = tmp_path / "state"
    if name is not None:
        folder.mkdir()
        for path in trained.glob("*.safetensors"):
            (folder / path.name).symlink_to(path)
        broken = folder / f"{name}.safetensors"
        broken.unlink()
        other = trained / f"{'audio' if part == 'vae' else 'video'}.safetensors"
        broken.write_bytes(other.read_bytes() if content is None else content)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([part, "--smoke", "--device", "cpu", "--folder", str(folder), "--steps", "1"]) == 4
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and told[0] == "twinreel: the weights cannot be used" and str(folder) in "".join(told)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_exported_model_generates(trained: Path):
    from twinreel import Engine, EngineConfig, Keyframe, Reference, Request
    from twinreel.sources import Picture, Sound

    engine = Engine(EngineConfig(model=str(trained / "model"), device="cpu"))
    picture = Picture(render_reference_image(sample_scene(1).things[0], edge=64).numpy())
    common = {"duration": 4.0, "size": (64, 64), "steps": 2}
    sound = Sound(np.zeros((2, 64000), dtype=np.float32), 32000)
    requests = [
        Request("a red ball bounces", **common),
        Request("from <Picture 1>, a red ball bounces", keyframes=(Keyframe(picture, -1),), **common),
        Request(
            "the thing of <Picture 1>", references=(Reference("image", picture), Reference("audio", sound)), **common
        ),
    ]
    for request in requests:
        media = engine.generate(request)
        assert media.video.shape == (107, 64, 64, 3)
        assert np.isfinite(media.audio).all()


def test_training_and_generating_read_the_same_weights(trained: Path):
    """The exported DiT predicts what the trained one does, up to bfloat16 storage."""
    from twinreel import Engine, EngineConfig

    engine = Engine(EngineConfig(model=str(trained / "model"), device="cpu"))
    parts, spec = engine.parts, engine.parts.spec
    model = dit.Model(spec, CPU)
    weights = dit.Weights({"dit": model.dit, "modulation": model.modulation, "text": model.text})
    weights.load(trained, dit.STEM)
    weights.use_mean()
    encoders = replace(dit.load_encoders(spec, trained, CPU), video_spec=spec.video, audio_spec=spec.audio)
    shelves = dit.fill_shelves(encoders, replace(smoke().dit, scenes=2, tasks=(("t2va", 1.0),)), 7, CPU)
    batches = Batches(shelves, dit.demo_tokenizer(spec), spec, (("t2va", 1.0),), seed=0)
    group = batches.groups[0]["t2va"][0]
    batch = batches.assemble("t2va", 0, group.rows[:1], group.ids[:1], torch.float32)
    times = torch.tensor([[0.3, 0.6, 0.999, 1.0]])
    with torch.no_grad():
        found, _ = model(batch, batch.video, batch.audio, times)
        loaded = [parts._load(name) for name in ("text_encoder", "dit:demo", "modulation:demo")]
        text = loaded[0](batch.ids[0], torch.zeros(batch.ids.shape[1], dtype=torch.int64))
        layout = batch.layout.layout
        indices = (layout.text_indices, layout.video_indices, layout.audio_indices)
        at = make_row_state(layout.positions_S3, layout.tags_S, indices, spec.dit, torch.float32, CPU)
        mod = loaded[2].at(times[0], layout.clock_S, at)
        wanted, _ = loaded[1](batch.video[0], batch.audio[0], loaded[1].refine(text), at, mod)
    assert (found[0] - wanted).norm() < 0.03 * wanted.norm().clamp(min=1.0)
