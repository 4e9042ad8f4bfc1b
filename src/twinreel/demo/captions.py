"""Sentences for scenes: a closed vocabulary, several paraphrases, the released prompt sections, and reference words.

Released prompts name their parts `integrated_multimodal_description`, `overall_soundscape` and `non_diegetic_music`,
and their conditions `<Picture 1>` and `<Audio 1>`; a part of the captions does so too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from .world import BACKGROUNDS, COLORS, PITCHES, PLACES, SHAPES, SOUNDS, Scene, Thing

SECTIONS = ("integrated_multimodal_description", "overall_soundscape", "non_diegetic_music")
VARIANTS = 3

_MOTION = {
    "bounce": ("bounces", "is bouncing", "bounces up and down"),
    "orbit": ("circles", "moves in a circle", "orbits"),
    "appear": ("appears", "suddenly appears"),
    "rest": ("rests", "stands still"),
}
_SLIDE = ("slides from {0} to {1}", "slides to the {1}", "moves from {0} to {1}")
_PLACE = {"left": ("on the left",), "middle": ("in the middle",), "right": ("on the right",)}
_GROUND = ("on a {} background", "against a {} background")
_WHEN = {
    "bounce": ("at every bounce", "at each bounce", "whenever it lands"),
    "orbit": ("at every turn", "at each turn"),
    "appear": ("as it appears", "at that moment"),
    "moving": ("while it moves", "as it moves"),
}
_HEARD = {
    "bell": ("{} rings", "{} is heard", "{} sounds"),
    "click": ("{} is heard", "{} sounds"),
    "buzz": ("{} is heard", "{} sounds"),
    "hum": ("{} is heard", "{} sounds"),
}
_SILENT = ("nothing is heard", "there is no sound")

_FUNCTION_WORDS = (
    "a an the and with while without of from to in on at as it is up down there no nothing that any "
    "thing sound sounds heard rings background against every each bounce bounces bouncing turn whenever lands moment "
    "circles moves circle orbits appears suddenly rests stands still slides starting ending N/A"
)
# Every word, sign and number of every caption, and what the prompts' presentation puts before them.
WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *_FUNCTION_WORDS.split(),
            *COLORS,
            *SHAPES,
            *PLACES,
            *PITCHES,
            *(s for s in SOUNDS if s != "none"),
            *BACKGROUNDS,
            *SECTIONS,
            *("Picture", "Audio", "Video", "seconds"),
            *"0123456789<>:.,;",
        )
    )
)
_WORD = re.compile(r"[A-Za-z_/]+|\S")


@dataclass(frozen=True)
class Caption:
    """A sentence and what it or its references state: some of color, shape, motion, sound, pitch, place, background."""

    text: str
    says: frozenset[str]


def split_words(text: str) -> list[str]:
    """The words, digits and signs of a caption in order; whitespace separates and is dropped."""
    return _WORD.findall(text)


def write_captions(scene: Scene) -> tuple[str, ...]:
    """The scene's three text-to-video captions; the first one states everything."""
    return tuple(caption(scene, variant).text for variant in range(VARIANTS))


def caption(
    scene: Scene,
    variant: int = 0,
    *,
    first: bool = False,
    last: bool = False,
    picture: bool = False,
    audio: bool = False,
) -> Caption:
    """Caption number `variant` (0, 1, 2) of the scene.

    `first`, `last`: for a request with those keyframes. `picture`, `audio`: the first thing is that of `<Picture 1>`,
    its sound that of `<Audio 1>`. Variant 0 states all, 1 is short, 2 may have the released sections.
    """
    random = Random(f"caption-{scene.seed}-{variant}-{first}-{last}-{picture}-{audio}")
    thing = scene.things[0]
    place = variant == 0 or random.random() < 0.5
    ground = variant == 0 or (variant == 2 and random.random() < 0.5)
    says = (
        {"color", "shape", "motion", "sound"} | ({"place"} if place else set()) | ({"background"} if ground else set())
    )
    says |= {"pitch"} if thing.sound != "none" else set()
    view = _view(random, scene, definite=first or last, picture=picture, place=place)
    view += " " + random.choice(_GROUND).format(scene.background) if ground else ""
    text = _assemble(random, variant, _opening(random, first, last) + view, _sound(random, thing, audio))
    return Caption(text, frozenset(says))


def _assemble(random: Random, variant: int, view: str, sound: tuple[str, str]) -> str:
    clause, phrase = sound
    if variant == 2 and random.random() < 0.6:
        return f"{SECTIONS[0]}: {view}.\n{SECTIONS[1]}: {clause}.\n{SECTIONS[2]}: N/A"
    end = random.choice(("", ".")) if variant else "."
    form = random.choice((f"{view} and {clause}", f"{view}, {phrase}", f"{view}. {clause}"))
    return form + end


def _view(random: Random, scene: Scene, *, definite: bool, picture: bool, place: bool) -> str:
    thing = scene.things[0]
    if picture:
        subject = f"the {random.choice((thing.shape, 'thing'))} {random.choice(('of', 'from'))} <Picture 1>"
    else:
        subject = _name(thing, definite)
    text = f"{subject} {_doing(random, scene, thing, place)}"
    for other in scene.things[1:]:
        text += f" while {_name(other, definite)} {_doing(random, scene, other, place)}"
    return text


def _name(thing: Thing, definite: bool) -> str:
    article = "the" if definite else "an" if thing.color[0] in "aeiou" else "a"
    return f"{article} {thing.color} {thing.shape}"


def _doing(random: Random, scene: Scene, thing: Thing, place: bool) -> str:
    if thing.motion == "slide":
        other = "left" if thing.place == "right" else "right"
        # A slide's direction is its motion: it is always said.
        return random.choice(_SLIDE).format(thing.place, other)
    words = random.choice(_MOTION[thing.motion])
    return f"{words} {random.choice(_PLACE[thing.place])}" if place else words


def _sound(random: Random, thing: Thing, audio: bool) -> tuple[str, str]:
    """What is heard, as a clause ("a low bell rings at every bounce") and as a phrase ("with a low bell at ...")."""
    if thing.sound == "none":
        return random.choice(_SILENT), "without any sound"
    noun = "the sound of <Audio 1>" if audio else f"a {thing.pitch} {thing.sound}"
    held = thing.sound in ("buzz", "hum")
    when = random.choice(_WHEN["moving" if held else thing.motion])
    heard = random.choice(_HEARD[thing.sound][1:2] if audio and thing.sound == "bell" else _HEARD[thing.sound])
    return f"{heard.format(noun)} {when}", f"with {noun} {when}"


def _opening(random: Random, first: bool, last: bool) -> str:
    """Words for keyframes; a third of the captions leave them to the pictures."""
    if not (first or last) or random.random() < 1 / 3:
        return ""
    if first and last:
        return "from <Picture 1> to <Picture 2>, "
    return f"{'starting from' if first else 'ending with'} <Picture 1>, "
