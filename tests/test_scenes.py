"""The demo's world: same seed, same scene; events, pixels, sounds and sentences that belong together."""

from __future__ import annotations

import math

import pytest
import torch

from twinreel.demo.captions import split_words
from twinreel.demo.scenes import (
    CANVASES,
    COLORS,
    HOP,
    LENGTHS,
    RATE,
    SOUNDS,
    WORDS,
    Scene,
    caption,
    events,
    render_audio,
    render_reference_image,
    render_reference_sound,
    render_video,
    sample_scene,
)
from twinreel.demo.world import FPS, SOUNDS_OF, columns, pan_of, positions, thing_events

SENTENCE = "a red ball bounces and a low bell rings at every bounce"


def varied(count: int, start: int = 0) -> list[Scene]:
    return [
        sample_scene(s, width=CANVASES[s % 3][0], height=CANVASES[s % 3][1], frames=LENGTHS[s // 3 % 3])
        for s in range(start, start + count)
    ]


def test_a_seed_means_one_scene() -> None:
    assert sample_scene(5) == sample_scene(5)
    assert len({sample_scene(s).captions[0] for s in range(50)}) > 40
    with pytest.raises(ValueError, match="sounds like one of"):
        sample_scene(0, motion="bounce", sound="hum")


@pytest.mark.parametrize("frames, latents", [(107, 178), (124, 207), (158, 263)])
def test_lengths_are_exact(frames: int, latents: int) -> None:
    scene = sample_scene(1, frames=frames)
    assert scene.audio_latents == latents
    assert render_audio([scene], "cpu").shape == (1, 2, 800 * latents) == (1, 2, HOP * latents)


def test_things_stay_inside_and_apart() -> None:
    for scene in varied(150):
        short = min(scene.width, scene.height)
        t = torch.arange(scene.frames, dtype=torch.float64) / FPS
        paths = [positions(columns([scene], i, "cpu"), t) for i in range(len(scene.things))]
        for thing, (x, y, _) in zip(scene.things, paths, strict=True):
            assert 2 * thing.size >= short / 4
            assert x.min() > thing.size and x.max() < scene.width - thing.size
            assert y.min() > thing.size and y.max() <= scene.floor - thing.size + 1e-9
        if len(paths) == 2:
            reach = math.sqrt(2) * sum(thing.size for thing in scene.things)
            apart = torch.maximum((paths[0][0] - paths[1][0]).abs(), (paths[0][1] - paths[1][1]).abs())
            assert apart.min() > reach / math.sqrt(2)


def test_a_bounce_is_on_the_floor_and_nowhere_lower() -> None:
    scene = sample_scene(2, motion="bounce", sound="bell")
    hits = events(scene)
    assert len(hits) >= 3 and all(e.kind == "bounce" for e in hits)
    at = columns([scene], 0, "cpu")
    t = torch.tensor([e.time for e in hits], dtype=torch.float64)
    for shift in (-0.02, 0.02):
        assert (positions(at, t + shift)[1] < scene.things[0].y - 0.5).all()
    assert torch.allclose(positions(at, t)[1], torch.tensor(scene.things[0].y, dtype=torch.float64))


def test_sound_starts_at_its_event_and_nothing_before() -> None:
    for motion, kind in (("bounce", "click"), ("appear", "bell"), ("slide", "buzz")):
        scene = sample_scene(3, motion=motion, sound=kind)
        wave = render_audio([scene], "cpu")[0]
        first = math.ceil(events(scene)[0].time * RATE)
        assert (wave[:, : first - 1] == 0).all()
        assert wave[:, first : first + 800].abs().max() > 0.02
        assert wave.abs().max() <= 1
    slide = sample_scene(3, motion="slide", sound="hum")
    stop = math.ceil(slide.things[0].stop * RATE) + 1
    assert (render_audio([slide], "cpu")[0, :, stop:] == 0).all()


def test_stereo_follows_x_at_constant_power() -> None:
    scene = sample_scene(4, motion="bounce", sound="bell", count=1)
    left, right = render_audio([scene], "cpu")[0].double().square().sum(1)
    angle = math.atan2(math.sqrt(right), math.sqrt(left)) / (math.pi / 2)
    assert angle == pytest.approx(pan_of(scene.things[0].x, scene.width), abs=1e-3)


def test_a_batch_is_its_scenes_one_by_one() -> None:
    scenes = [sample_scene(s) for s in range(12)]
    some = [0, 40, 123]
    together = render_video(scenes, "cpu", frames=some)
    sounds = render_audio(scenes, "cpu")
    for i, scene in enumerate(scenes):
        assert torch.equal(together[i], render_video([scene], "cpu", frames=some)[0])
        assert torch.equal(sounds[i], render_audio([scene], "cpu")[0])
    cut = render_video(scenes, "cpu", frames=torch.tensor([some] * 12), window=(32, 64, 64, 96))
    assert torch.equal(cut, together[:, :, 32:96, 64:160])
    with pytest.raises(ValueError, match="one canvas"):
        render_video([sample_scene(0), sample_scene(0, width=128)], "cpu")


def test_colours_are_drawn_exactly_and_edges_softly() -> None:
    scene = sample_scene(6, motion="appear", count=1)
    thing = scene.things[0]
    frame = render_video([scene], "cpu", frames=[scene.frames - 1])[0, 0]
    assert tuple(frame[int(thing.y), int(thing.x)].tolist()) == COLORS[thing.color]
    empty = render_video([scene], "cpu", frames=[0])[0, 0]
    assert (empty[..., 0] == empty[..., 1]).all() and (empty[..., 1] == empty[..., 2]).all()
    changed = (frame != empty).any(-1).sum().item()
    area = {"ball": math.pi, "square": 4.0, "triangle": 2.0}[thing.shape] * thing.size**2
    assert changed == pytest.approx(area, rel=0.25)
    still = render_reference_image(thing)
    assert still.shape == (128, 128, 3) and tuple(still[64, 64].tolist()) == COLORS[thing.color]


def test_every_word_is_in_the_list() -> None:
    assert len(WORDS) == len(set(WORDS)) <= 120
    assert set(split_words(SENTENCE)) <= set(WORDS)
    used: set[str] = set()
    choices = (False, True)
    for scene in varied(120):
        assert len(scene.captions) == 3
        for variant in range(3):
            for one in choices:
                for other in choices:
                    used |= set(split_words(caption(scene, variant, first=one, last=other).text))
                    used |= set(split_words(caption(scene, variant, picture=one, audio=other).text))
    assert used <= set(WORDS)
    unused = set(WORDS) - used - {*"0123456789;", "Video", "seconds"}
    assert not unused


def test_the_first_caption_says_everything_and_says_it_right() -> None:
    for scene in varied(60):
        thing, full = scene.things[0], caption(scene, 0)
        assert full.text == scene.captions[0]
        for word in (thing.color, thing.shape, scene.background, thing.pitch, thing.sound.replace("none", "")):
            assert word in full.text
        assert {"color", "shape", "motion", "sound", "place", "background"} <= full.says
    texts = {caption(scene, variant).text.split(".\n")[0] for scene in varied(900) for variant in (0, 1, 2)}
    assert any(text.startswith("integrated_multimodal_description: ") for text in texts)
    form = SENTENCE.replace("red ball", "{} {}").replace("low", "{}")
    bounces = [sample_scene(seed, motion="bounce", sound="bell", count=1) for seed in range(400)]
    texts = {caption(scene, variant).text for scene in bounces for variant in (0, 1, 2)}
    assert any(text.rstrip(".") == form.format(*t) for text in texts for t in _triples(text))


def _triples(text: str) -> list[tuple[str, str, str]]:
    words = split_words(text)
    return [(words[1], words[2], words[6])] if len(words) > 6 else []


def test_reference_words_replace_what_the_reference_shows() -> None:
    scene = sample_scene(9, motion="bounce", sound="bell", count=1)
    text = caption(scene, 1, picture=True, audio=True).text
    assert "<Picture 1>" in text and "<Audio 1>" in text
    assert scene.things[0].color not in text and scene.things[0].pitch not in text.replace("in the middle", "")


@pytest.mark.parametrize("sound", [s for s in SOUNDS if s != "none"])
def test_reference_sounds_are_one_event_in_the_middle(sound: str) -> None:
    motion = next(m for m, sounds in SOUNDS_OF.items() if sound in sounds)
    thing = sample_scene(1, motion=motion, sound=sound).things[0]
    wave = render_reference_sound(thing, seconds=1.0)
    assert wave.shape == (2, 32000) and torch.equal(wave[0], wave[1])
    assert (wave[:, :3200] == 0).all() and wave[:, 3201:4000].abs().max() > 0.05
    silent = sample_scene(1, motion=motion, sound="none").things[0]
    assert not render_reference_sound(silent).any()


def test_orbits_turn_at_the_top() -> None:
    scene = sample_scene(8, motion="orbit", sound="click")
    at = columns([scene], 0, "cpu")
    times = torch.tensor([e.time for e in thing_events(scene, 0)], dtype=torch.float64)
    thing = scene.things[0]
    top = torch.full((1, len(times)), thing.y - thing.reach, dtype=torch.float64)
    assert len(times) >= 2 and torch.allclose(positions(at, times)[1], top)
