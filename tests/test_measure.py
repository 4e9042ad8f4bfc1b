"""The measuring code on ground truth: right everywhere, also through blur and noise, and able to say no."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, pad

from twinreel.demo.measure import listen, look, psnr, score, summarise, synchrony
from twinreel.demo.scenes import (
    CANVASES,
    LENGTHS,
    Scene,
    caption,
    events,
    render_audio,
    render_reference_sound,
    render_video,
    sample_scene,
)

ALWAYS = ("color", "shape", "motion", "place", "count", "sound", "pitch", "hertz", "side", "agrees")


def varied(seed: int) -> Scene:
    width, height = CANVASES[seed % 3]
    return sample_scene(seed, width=width, height=height, frames=LENGTHS[seed // 3 % 3])


def rendered(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    return render_video([scene], "cpu")[0], render_audio([scene], "cpu")[0]


def smeared(video: torch.Tensor, sigma: float, noise: float, seed: int) -> torch.Tensor:
    """Gaussian blur of `sigma` px and white noise of `noise` levels, as a coarse picture of a VAE's error."""
    at = torch.arange(-7, 8).float()
    kernel = torch.exp(-(at**2) / (2 * sigma**2))
    kernel /= kernel.sum()
    flat = video.float().permute(0, 3, 1, 2).flatten(0, 1)[:, None]
    flat = pad(flat, (7, 7, 7, 7), mode="replicate")
    flat = conv2d(conv2d(flat, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))
    soft = flat.reshape(len(video), 3, *video.shape[1:3]).permute(0, 2, 3, 1)
    soft = soft + noise * torch.randn(soft.shape, generator=torch.Generator().manual_seed(seed))
    return soft.clamp(0, 255).round().to(torch.uint8)


def test_everything_is_right_on_ground_truth() -> None:
    figures = summarise([score(scene, *rendered(scene)) for scene in map(varied, range(5000, 5036))])
    assert {name: figures[name] for name in ALWAYS} == dict.fromkeys(ALWAYS, 1.0)
    assert figures["missed"] == 0 and figures["contacts"] > 20
    assert abs(figures["offset_median_ms"]) < 1 and figures["offset_abs_p90_ms"] < 2


def test_blur_and_noise_change_nothing() -> None:
    scores = []
    for seed in range(7000, 7006):
        scene = varied(seed)
        video, audio = rendered(scene)
        noise = 0.004 * torch.randn(audio.shape, generator=torch.Generator().manual_seed(seed))
        scores.append(score(scene, smeared(video, 2.0, 6.0, seed), audio + noise))
    figures = summarise(scores)
    assert {name: figures[name] for name in ALWAYS} == dict.fromkeys(ALWAYS, 1.0)
    assert figures.get("offset_abs_p90_ms", 0) < 4


def test_contacts_and_onsets_are_the_scene_s_own() -> None:
    scene = sample_scene(11, motion="bounce", sound="bell", count=1)
    video, audio = rendered(scene)
    truth = [event.time for event in events(scene)]
    assert look(video)[0].contacts == pytest.approx(truth, abs=0.002)
    assert listen(audio).onsets == pytest.approx(truth, abs=0.002)


@pytest.mark.parametrize("frames", [-4, 3])
def test_a_late_or_early_sound_is_measured_as_such(frames: int) -> None:
    scene = sample_scene(12, motion="bounce", sound="click", count=1)
    video, audio = rendered(scene)
    late = torch.roll(audio, frames * 32000 // 24, dims=1)
    assert score(scene, video, late)["offset_ms"] == pytest.approx(1000 * frames / 24, abs=2)
    assert synchrony([1.0, 2.0], [1.02, 9.0]) == pytest.approx((0.02,))


@pytest.mark.parametrize("motion, sound", [("bounce", "bell"), ("slide", "hum"), ("orbit", "click")])
def test_wrong_pictures_and_sounds_score_wrong(motion: str, sound: str) -> None:
    scene = sample_scene(13, motion=motion, sound=sound, count=1)
    others = [s for s in (sample_scene(s, count=1) for s in range(60)) if s.things[0].sound not in (sound, "none")]
    thing = scene.things[0]
    other = next(
        s
        for s in others
        if s.things[0].motion != motion and s.things[0].color != thing.color and s.things[0].shape != thing.shape
    )
    video, audio = rendered(other)
    measured = score(scene, video, audio)
    assert not any(measured[name] for name in ("color", "shape", "motion", "sound", "hertz"))
    video, audio = rendered(scene)
    swapped = score(scene, video, audio.flip(0))
    if thing.place != "middle":
        assert not swapped["side"] and swapped["sound"]
    mirrored = score(scene, video.flip(2), audio)
    assert mirrored["motion"] and mirrored["place"] == (thing.place == "middle")


def test_silence_and_empty_pictures() -> None:
    scene = sample_scene(14, motion="bounce", sound="bell", count=1)
    blank = np.full((124, 128, 224, 3), 90, dtype=np.uint8)
    measured = score(scene, blank, np.zeros((2, 800 * 207), dtype=np.float32))
    assert not measured["color"] and not measured["motion"] and not measured["sound"] and not measured["count"]
    assert measured["missed"] == len(events(scene)) and not measured["offsets"]
    quiet = sample_scene(14, motion="bounce", sound="none", count=1)
    figures = score(quiet, *rendered(quiet))
    assert figures["sound"] and "pitch" not in figures and "offsets" not in figures


def test_only_what_is_said_counts() -> None:
    scene = sample_scene(15, motion="bounce", sound="bell", count=1)
    video, audio = rendered(scene)
    says = caption(scene, 1).says - {"place"}
    kept = score(scene, video, audio, says)
    assert "place" not in kept and "side" not in kept and kept["agrees"] and kept["pitch"]


def test_reference_sounds_are_recognised() -> None:
    for motion, sound in (("bounce", "click"), ("appear", "bell"), ("slide", "buzz"), ("slide", "hum")):
        thing = sample_scene(16, motion=motion, sound=sound).things[0]
        heard = listen(render_reference_sound(thing))
        assert (heard.kind, heard.pitch, heard.side) == (sound, thing.pitch, "middle")
        assert heard.hertz == pytest.approx(thing.hertz, rel=0.01)


def test_psnr_of_a_known_difference() -> None:
    one = np.full((4, 4, 3), 100, dtype=np.uint8)
    assert psnr(one, one + 10) == pytest.approx(28.13, abs=0.01)


def test_summaries_count_only_scores_that_have_a_measure() -> None:
    figures = summarise([{"color": True, "offsets": (0.01, -0.03)}, {"color": False, "missed": 1.0}, {}])
    assert figures["color"] == 0.5 and figures["missed"] == 1 and figures["scenes"] == 3
    assert figures["offset_abs_median_ms"] == pytest.approx(20)
