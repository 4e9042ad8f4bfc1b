"""The conditioner's presentation: token ids, tags, sampled frames and patches (SPEC 3.1 to 3.3, 13.5)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from golden.make_processor_golden import BUDGETS, FILE, IMAGES, PROMPT, REFERENCES, VIDEOS, facts, picture, runs
from tiny_tokenizer import VOCAB, write_tokenizer
from twinreel.errors import CheckpointError, RequestError
from twinreel.plan import Condition, Plan
from twinreel.presentation import Prompt, Vision, fitted_size, pair_times, present, see, vision_patches
from twinreel.spec import PROJECT_TOKENS, ProcessorSpec, Spec, TextSpec
from twinreel.weights.tokenizer import Tokenizer, load_tokenizer

GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
RELEASED = ProcessorSpec()


@dataclass(frozen=True)
class Input:
    """As much of a prepared source as the presentation reads."""

    frames: np.ndarray | None


def text_spec(ids: dict[str, int]) -> TextSpec:
    return TextSpec(
        vocab=VOCAB,
        image_token=ids["<|image_pad|>"],
        video_token=ids["<|video_pad|>"],
        vision_start_token=ids["<|vision_start|>"],
        vision_end_token=ids["<|vision_end|>"],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def ids(folder: Path) -> dict[str, int]:
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def tiny(folder: Path, ids: dict[str, int]) -> tuple[Tokenizer, Spec]:
    spec = Spec(text=text_spec(ids))
    return load_tokenizer(folder, spec.text), spec


@pytest.fixture(scope="module")
def released(release: Path) -> Tokenizer:
    return load_tokenizer(release / "tokenizer", TextSpec())


def make_plan(prompt: str, conditions: list[Condition], task: str = "ref2va") -> Plan:
    return Plan(
        task=task, partition="ref2va", prompt=prompt, height=96, width=128, frames=22, latents=7, audio_latents=37,
        steps=2, seed=0, noise="official", shifts=(12.0, 3.0), conditions=tuple(conditions),
    )  # fmt: skip


def golden_request() -> tuple[Plan, list[Input]]:
    """The request of the golden script in our own terms."""
    conditions, inputs = [], []
    for number, (kind, frames, height, width, sounding) in enumerate(REFERENCES):
        samples = 32_000 if sounding else 0
        conditions.append(Condition(kind, "reference", number, None, height, width, frames, samples=samples))
        inputs.append(Input(picture(frames, height, width, number) if frames else None))
    return make_plan(PROMPT, conditions), inputs


def check_golden_presentation(prompt: Prompt, golden: dict[str, Any]) -> None:
    assert runs(prompt.ids) == golden["ids"]
    assert runs(prompt.tags) == golden["tags"]
    assert [list(v.timestamps) for v in prompt.visions if v.kind == "video"] == golden["timestamps"]
    for kind, name in (("image", "images"), ("video", "videos")):
        members = [vision for vision in prompt.visions if vision.kind == kind]
        patches = torch.cat([vision_patches(vision, RELEASED) for vision in members])
        assert facts(patches, [vision.grid for vision in members]) == golden[name]


def test_a_whole_request_is_diffusers_presentation(tiny: tuple[Tokenizer, Spec]) -> None:
    prompt = present(*golden_request(), *tiny)
    check_golden_presentation(prompt, GOLDEN["tiny"])
    text = tiny[1].text
    pads = (prompt.ids == text.image_token) + 2 * (prompt.ids == text.video_token)
    assert torch.equal(prompt.token_types, pads) and set(pads.tolist()) == {0, 1, 2}
    assert prompt.ids.dtype == prompt.tags.dtype == prompt.token_types.dtype == torch.int64


def test_a_whole_request_with_the_released_tokenizer(released: Tokenizer) -> None:
    check_golden_presentation(present(*golden_request(), released, Spec()), GOLDEN["released"])


def test_the_golden_request_misses_nothing() -> None:
    assert {kind for kind, *_ in REFERENCES} == {"image", "audio", "video"}
    assert any(frames // 12 % 2 == 1 for kind, frames, *_ in REFERENCES if kind == "video")
    assert "<d>" in PROMPT and any(ord(letter) > 127 for letter in PROMPT)


@pytest.mark.parametrize("number", range(len(IMAGES)))
def test_image_patches_are_transformers_patches(number: int) -> None:
    budget, height, width = IMAGES[number]
    check_patches("image", picture(1, height, width), budget, GOLDEN["images"][number])


@pytest.mark.parametrize("number", range(len(VIDEOS)))
def test_video_patches_are_transformers_patches(number: int) -> None:
    budget, frames, height, width = VIDEOS[number]
    check_patches("video", picture(frames, height, width), budget, GOLDEN["videos"][number])


def check_patches(kind: Any, frames: np.ndarray, budget: str, golden: dict[str, Any]) -> None:
    image_least, image_most, video_least, video_most = BUDGETS[budget]
    processor = replace(
        RELEASED,
        image_min_pixels=image_least,
        image_max_pixels=image_most,
        video_min_pixels=video_least,
        video_max_pixels=video_most,
    )
    height, width = fitted_size(kind, *frames.shape[:3], processor)
    vision = Vision(kind, frames, (-(-len(frames) // 2), height // 16, width // 16))
    patches = vision_patches(vision, processor)
    assert patches.dtype == torch.float32 and patches.shape == (np.prod(vision.grid), 1536)
    assert facts(patches, vision.grid) == golden  # the hash among them: bit for bit


def test_golden_cases_shrink_grow_and_keep() -> None:
    """Every branch of the size rule stands behind a golden hash."""
    for cases, kind in ((IMAGES, "images"), (VIDEOS, "videos")):
        area = [int(np.prod(case[-2:])) for case in cases]
        fitted = [golden["grid"][1] * golden["grid"][2] * 256 for golden in GOLDEN[kind]]
        assert {np.sign(new - old) for new, old in zip(fitted, area, strict=True)} == {-1, 0, 1}


def test_tokens_of_the_contract(released: Tokenizer) -> None:
    expected = {
        "<Picture 1>: ": [21604, 3826, 220, 16, 26818, 220],
        "<Video 1>: ": [27, 10724, 220, 16, 26818, 220],
        "<Audio 1>: ": [65406, 220, 16, 26818, 220],
        "<0.2 seconds>": [27, 15, 13, 17, 6486, 29],
        "<10.8 seconds>": [27, 16, 15, 13, 23, 6486, 29],
        "A cat plays piano.": [32, 8251, 11088, 26278, 13],
        "She says <d>hello</d>.": [7941, 2727, 220, 151669, 14990, 151670, 13],
    }
    assert {text: released.encode(text) for text in expected} == expected
    assert list(released.project.values()) == list(range(151669, 151676))
    assert len(released.backend) == 151676


@pytest.mark.parametrize("text", ["<|vision_start|>", "<|image_pad|>", "<|im_start|>user", "a<|endoftext|>b"])
def test_special_tokens_typed_by_a_person_stay_text(
    tiny: tuple[Tokenizer, Spec], ids: dict[str, int], text: str
) -> None:
    tokenizer, _ = tiny
    encoded = tokenizer.encode(f"<d>{text}</d>")
    assert encoded[0] == ids["<d>"] and encoded[-1] == ids["</d>"]
    assert not set(encoded[1:-1]) & {ids[token] for token in ids if token.startswith("<|")}
    assert tokenizer.backend.decode(encoded[1:-1]) == text
    assert len(tokenizer.backend(text)["input_ids"]) < len(encoded) - 2  # what transformers would do by default


def test_project_tokens_are_cut_as_the_tokenizer_cuts_them(released: Tokenizer) -> None:
    """Cutting by hand changes no id: neither spaces nor composed letters at the seams."""
    texts = [f"a {token} b{token}\n {token}{token}ｅ\u0301 c's" for token in PROJECT_TOKENS]
    for text in [*texts, "<d", "<think>x</think>", ""]:
        assert released.encode(text) == released.backend(text, add_special_tokens=False)["input_ids"], text


def test_text_alone(tiny: tuple[Tokenizer, Spec]) -> None:
    prompt = present(make_plan("the <d>sea</d>", [], "t2va"), [], *tiny)
    assert prompt.ids.tolist() == tiny[0].encode("the <d>sea</d>")
    assert set(prompt.tags.tolist()) == {1} and not prompt.token_types.any() and prompt.visions == ()


def test_keyframes(tiny: tuple[Tokenizer, Spec]) -> None:
    tokenizer, spec = tiny
    frames = picture(1, 256, 288)
    conditions = [Condition("image", "keyframe", i, anchor, 256, 288, 1) for i, anchor in enumerate(("first", "last"))]
    prompt = present(make_plan("sea", conditions, "fl2va"), [Input(frames), Input(frames)], tokenizer, spec)
    expected: list[int] = []
    tags: list[int] = []
    for number in (1, 2):
        label = tokenizer.encode(f"<Picture {number}>: ")
        block = [spec.text.vision_start_token, *[spec.text.image_token] * 72, spec.text.vision_end_token]
        expected += label + block
        tags += [1] * len(label) + [0] * len(block)
    assert prompt.ids.tolist() == expected + tokenizer.encode("sea")
    assert prompt.tags.tolist() == tags + [1] * len(tokenizer.encode("sea"))


def test_pieces_are_tokenised_apart(tiny: tuple[Tokenizer, Spec]) -> None:
    """A label ends with a space that must not merge into the prompt's first word."""
    tokenizer, spec = tiny
    conditions = [
        Condition("audio", "reference", 0, samples=10),
        Condition("image", "reference", 1, None, 256, 256, 1),
        Condition("audio", "reference", 2, samples=10),
    ]
    inputs = [Input(None), Input(picture(1, 256, 256)), Input(None)]
    prompt = present(make_plan("the", conditions), inputs, tokenizer, spec)
    last = tokenizer.encode("<Audio 2>: ") + tokenizer.encode("the")
    assert prompt.ids.tolist()[-len(last) :] == last != tokenizer.encode("<Audio 2>: the")


@pytest.mark.parametrize(
    ("frames", "sampled", "first", "last"), [(13, 2, 0.25, 0.25), (25, 3, 0.25, 1.0), (362, 31, 0.25, 15.0)]
)
def test_frames_are_sampled_at_two_a_second(frames: int, sampled: int, first: float, last: float) -> None:
    clip = np.arange(frames, dtype=np.int64)[:, None, None, None].astype(np.uint16).repeat(64, 1).repeat(64, 2)
    vision = see(Condition("video", "reference", 0, None, 64, 64, frames), clip, RELEASED)
    assert vision.frames[:, 0, 0, 0].tolist() == list(range(0, frames, 12)) and len(vision.frames) == sampled
    assert (vision.timestamps[0], vision.timestamps[-1]) == (first, last)
    assert len(vision.timestamps) == vision.grid[0] == (sampled + 1) // 2
    assert np.shares_memory(vision.frames, clip)


def test_labels_round_half_to_even() -> None:
    assert [f"{time:.1f}" for time in pair_times(11)] == ["0.2", "1.2", "2.2", "3.2", "4.2", "5.0"]


def test_a_video_of_one_sampled_frame_is_refused() -> None:
    with pytest.raises(RequestError, match=r"references\[3\]: the video has 12 frames .* at least 13 \(0.54 s\)"):
        see(Condition("video", "reference", 3, None, 64, 64, 12), np.zeros((12, 64, 64, 3), np.uint8), RELEASED)


def test_sizes_of_the_contract() -> None:
    for size, tokens in {(768, 1344): 1008, (768, 768): 576, (768, 1024): 768, (2048, 2048): 4096, (2048, 3648): 7296,
                         (2048, 8192): 16384}.items():  # fmt: skip
        assert fitted_size("image", 1, *size, RELEASED) == size and size[0] * size[1] // 1024 == tokens
    videos = {(2, 768, 1344): (48, 84), (11, 768, 1344): (48, 84), (16, 768, 1344): (48, 84), (31, 768, 1344): (42, 74),
              (30, 512, 2016): (28, 112)}  # fmt: skip
    for video, grid in videos.items():
        height, width = fitted_size("video", *video, RELEASED)
        assert (height // 16, width // 16) == grid


def test_a_folder_that_is_no_tokenizer_is_named(tmp_path: Path, folder: Path, ids: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="no vocab.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"<\|image_pad\|> is \d+ in the tokenizer and 5 in"):
        load_tokenizer(folder, replace(text_spec(ids), image_token=5))
    with pytest.raises(CheckpointError, match="outside the text encoder's 300 embeddings"):
        load_tokenizer(folder, replace(text_spec(ids), vocab=300))
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = config["additional_special_tokens"][:-7]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks <d>, </d>"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
