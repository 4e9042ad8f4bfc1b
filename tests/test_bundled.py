"""The shipped miniature, through the public engine: a quick part of what `demo/evaluate.py` judges over 300 requests.

At 25 steps, to be quick; which trials, by their number in the fixed evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from twinreel import Engine, EngineConfig
from twinreel.demo.evaluate import FIRST_SEED, judge, reconstruct, trials
from twinreel.demo.scenes import sample_scene

# task, its trial, motion and sound that it asks for
CHOSEN = [
    ("t2va", 3, "bounce", "bell"),
    ("t2va", 12, "bounce", "click"),
    ("t2va", 19, "slide", "hum"),
    ("first", 0, "appear", "bell"),
    ("last", 1, "slide", "buzz"),
    ("image+audio", 0, "bounce", "bell"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(EngineConfig(device="cpu", threads=2, ops="reference"))
    yield made
    made.close()


@pytest.mark.parametrize(("task", "number", "motion", "sound"), CHOSEN, ids=lambda value: str(value))
def test_what_was_asked_for_is_seen_and_heard(engine: Engine, task: str, number: int, motion: str, sound: str) -> None:
    trial = list(trials(task, number + 1))[number]
    thing = trial.scene.things[0]
    assert (thing.motion, thing.sound) == (motion, sound)
    media = engine.generate(replace(trial.request, steps=25))
    found: dict[str, Any] = judge(trial, media.video, media.audio)
    assert all(found[name] for name in ("color", "motion", "sound")), (trial.said.text, found)
    assert all(found.get(name, True) for name in ("pitch", "hertz", "side")), (trial.said.text, found)
    if "keyframe_psnr" in found:
        assert found["keyframe_psnr"] > 26
    if motion == "bounce":
        assert abs(found["offset_ms"]) < 84 and len(found["offsets"]) >= 4


def test_reconstruction(engine: Engine) -> None:
    """A scene that was never trained on, through both VAEs."""
    _, _, facts = reconstruct(sample_scene(FIRST_SEED + 90_000), engine.parts)
    assert facts["psnr"] > 30 and facts["ssim"] > 0.95 and facts["pitch_error"] < 0.01, facts


def test_a_request_repeats_its_hashes_in_another_engine(engine: Engine) -> None:
    request = replace(next(iter(trials("t2va", 1))).request, steps=4)
    first, again = engine.generate(request), engine.generate(request)
    other = Engine(EngineConfig(device="cpu", threads=2, ops="reference"))
    hashes = [media.report["sha256"] for media in (first, again, other.generate(request))]
    other.close()
    assert hashes[0] == hashes[1] == hashes[2] and {"frames", "waveform"} <= set(hashes[0])
