"""The conditioning cache: found again only by everything that reached the encoder, bounded, same bits."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from twinreel import Clip, Engine, EngineConfig, Keyframe, Picture, Reference, Request, Sound
from twinreel.conditioning import ConditionCache, Wanted, absorb
from twinreel.pipeline import encode, settle
from twinreel.watch import Stages, ignore

RNG = np.random.default_rng(3)
SOUND = Sound(RNG.uniform(-0.1, 0.1, (2, 32_000)).astype(np.float32), 32_000)
CLIP = Clip(RNG.integers(0, 256, (24, 64, 64, 3), dtype=np.uint8), 24.0, SOUND)
PICTURE = Picture(RNG.integers(0, 256, (64, 96, 3), dtype=np.uint8))
SHORT = {"steps": 2, "duration": 0.9}


def digest(value: object) -> str:
    sha = hashlib.sha256()
    absorb(sha, value)
    return sha.hexdigest()


def test_different_values_have_different_keys() -> None:
    values = [
        (), ((),), (1,), (1.0,), ("1",), (True,), (1, 2), ((1,), 2), (1, (2,)), "ab", ("a", "b"),
        np.zeros(4, np.uint8), np.zeros(1, np.float32), np.zeros((2, 2), np.uint8), torch.zeros(4, dtype=torch.int64),
        PICTURE, Picture(PICTURE.pixels + 1),
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.arange(4)) == digest(np.arange(4)) and digest(PICTURE) == digest(Picture(PICTURE.pixels.copy()))


@pytest.fixture(scope="module")
def engine(tiny_original: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_original), device="cpu", threads=2), ConditionCache(64 << 20))


def test_a_cache_travels_to_the_ranks() -> None:
    sent = pickle.loads(pickle.dumps(ConditionCache(7)))
    assert sent.limit == 7 and not len(sent)


def test_hits_give_the_same_bits_and_only_where_they_may(engine: Engine, tiny_original: Path) -> None:
    plain = Engine(EngineConfig(model=str(tiny_original), device="cpu", threads=2))
    references = (Reference("image", PICTURE), Reference("video", CLIP))
    first = Request("<Picture 1> meets <Video 1>.", references=references, **SHORT)
    expected = plain.generate(first).report
    assert expected["conditioning"] == {"hits": 0, "misses": 4}
    reports = [engine.generate(first).report for _ in range(2)]
    assert [report["conditioning"] for report in reports] == [{"hits": 0, "misses": 4}, {"hits": 4, "misses": 0}]
    assert all(report["sha256"] == expected["sha256"] for report in reports)

    def uses(request: Request) -> tuple[int, int]:
        parts = engine.parts
        with torch.inference_mode():
            cache = encode(settle(request, parts), parts, Stages(ignore, parts.choices.device)).cache
        return cache["hits"], cache["misses"]

    # another seed reaches no encoder; other words only the text's; the order of references changes its presentation
    assert uses(Request(first.prompt, references=references, seed=1, **SHORT)) == (4, 0)
    assert uses(Request("Other words.", references=references, **SHORT)) == (3, 1)
    assert uses(Request(first.prompt, references=references[::-1], **SHORT)) == (3, 1)
    assert (
        uses(Request(first.prompt, references=(references[0], Reference("video", CLIP, start=0.05)), **SHORT))[1] == 3
    )
    changed = Picture(PICTURE.pixels ^ np.uint8(1))
    assert uses(Request(first.prompt, references=(Reference("image", changed), references[1]), **SHORT)) == (2, 2)
    # the same picture as a keyframe is another presentation at another size, so nothing of it is found
    assert uses(Request("The sea.", keyframes=(Keyframe(PICTURE),), **SHORT))[1] >= 1


def test_the_cache_is_bounded(engine: Engine) -> None:
    engine.parts.cache = cache = ConditionCache(1 << 30)
    engine.generate(Request("Prompt number 0.", **SHORT))
    engine.parts.cache = cache = ConditionCache(3 * cache.size)
    for number in range(6):
        engine.generate(Request(f"Prompt number {number}.", **SHORT))
        assert cache.size <= cache.limit
    assert len(cache) == 3
    assert engine.generate(Request("Prompt number 5.", **SHORT)).report["conditioning"]["hits"] == 1
    assert engine.generate(Request("Prompt number 0.", **SHORT)).report["conditioning"]["hits"] == 0


def test_weights_and_choices_are_part_of_the_key(
    engine: Engine, tiny_original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Wanted("text_encoder", (1,), lambda: torch.zeros(1), "")
    others = [
        Engine(EngineConfig(model=str(tiny_original), device="cpu", threads=2, precision=precision))
        for precision in ("bf16", "fp32")
    ]
    cache = ConditionCache(1 << 20)
    for other in others:
        assert cache.recall([wanted], other.parts) == [None]
        cache.keep([wanted], [torch.zeros(1)], other.parts)
        assert cache.recall([wanted], other.parts) != [None]
    keys = {ConditionCache(1)._key(wanted, engine.parts)}
    monkeypatch.setattr(engine.parts, "versions", {})
    monkeypatch.setattr(engine.parts.weights, "version", lambda part: "other weights")
    keys.add(ConditionCache(1)._key(wanted, engine.parts))
    assert len(keys) == 2
