"""Request + Spec + media shapes -> Plan: every size of the generation, decided before a weight is loaded.

Pure: no file is read and nothing is drawn. What the contract itself cuts (frames to 17n+5, a reference longer than
the target) is listed in `Plan.notes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .request import DEFAULT_ASPECT, DEFAULT_SECONDS, Request, check_ratio, check_request, parse_aspect
from .sources import Clip, Picture, Sound
from .spec import AUDIO_CHANNELS, AUDIO_LATENTS_PER_SECOND, FPS, SAMPLE_RATE, Spec, VideoVAESpec


@dataclass(frozen=True)
class Condition:
    """One keyframe or reference, after its geometry is settled (SPEC 4.4, 4.5).

    `source` indexes the media in request order. `height`, `width` are pixels (0 for a sound); `frames` is what the
    conditioner sees, `vae_frames` what the VAE sees (17n+5, or 1), `latents` the latent frames of that. `samples` is
    the length of the sound per channel at its native `rate` after the cut, `audio_latents` its latents per channel
    (0 without sound). `cover` crops a keyframe to the canvas instead of stretching it.
    """

    kind: str
    role: str
    source: int
    anchor: str | None = None
    height: int = 0
    width: int = 0
    frames: int = 0
    vae_frames: int = 0
    latents: int = 0
    samples: int = 0
    rate: int = 0
    audio_latents: int = 0
    cover: bool = False


@dataclass(frozen=True)
class Plan:
    """All sizes of one generation: pixels `height` x `width`, `frames` at 24 fps, latents per stream, the draws."""

    task: str
    partition: str
    prompt: str
    height: int
    width: int
    frames: int
    latents: int
    audio_latents: int
    steps: int
    seed: int
    noise: str
    shifts: tuple[float, float]
    conditions: tuple[Condition, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """Model calls: one fewer than the points of the sigma grid."""
        return self.steps - 1

    @property
    def samples(self) -> int:
        """Samples per channel of the sound at 32 kHz."""
        return self.audio_latents * (SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND)


def canvas(aspect_width: float, aspect_height: float, spec: Spec, short_edge: int | None = None) -> tuple[int, int]:
    """(height, width) in pixels of a shape: short edge, area cap, both sides rounded half-even (SPEC 4.1)."""
    edge = float(short_edge or spec.world.short_edge)
    ratio = aspect_width / aspect_height
    width, height = (edge * ratio, edge) if ratio >= 1.0 else (edge, edge / ratio)
    area = width * height
    if area > spec.world.area_cap:
        # the exponent form and not sqrt: the contract's last bit decides sides that fall between two multiples
        scale = (spec.world.area_cap / area) ** 0.5
        width, height = width * scale, height * scale
    step = spec.multiple
    return max(step, round(height / step) * step), max(step, round(width / step) * step)


def tail_frames(video: VideoVAESpec) -> int:
    """Frames past the last whole clip of an aligned length (5): what the latents kept of a clip's end decode to."""
    return (video.clip_latents - video.token_drop) * video.time - (video.clip_latents * video.time - video.clip)


def aligned_frames(frames: int, video: VideoVAESpec) -> int:
    """The smallest count of the form 17n+5 that is at least `frames` (SPEC 4.2)."""
    tail = tail_frames(video)
    return max(0, math.ceil((frames - tail) / video.clip)) * video.clip + tail


def latent_frames(frames: int, video: VideoVAESpec) -> int:
    """Latent frames of an aligned count: 5n+2 (SPEC 4.2); 1 for a single picture."""
    if frames == 1:
        return 1
    chunks = (frames - tail_frames(video)) // video.clip
    return chunks * video.clip_latents + video.clip_latents - video.token_drop


def sound_latents(frames: int) -> int:
    """Audio latents per channel beside `frames` frames; the division comes first, in float64 (SPEC 4.2)."""
    return int(round(frames / FPS * AUDIO_LATENTS_PER_SECOND))


def resampled_length(samples: int, rate: int) -> int:
    """Samples after resampling to 32 kHz: ceil of the gcd-reduced ratio (SPEC 4.5)."""
    common = math.gcd(rate, SAMPLE_RATE)
    return -(-samples * (SAMPLE_RATE // common) // (rate // common))


def max_frames(spec: Spec) -> int:
    """Frames of the longest target of this checkpoint (362 for H3): no reference is read beyond it."""
    return aligned_frames(int(round(spec.world.max_seconds * FPS)), spec.video)


def make_plan(request: Request, spec: Spec, sources: Sequence[Picture | Clip | Sound] = ()) -> Plan:
    """The plan of `request`, whose media are `sources` in request order (keyframes, then references).

    Raises RequestError naming the field. SPEC 4 throughout.
    """
    check_request(request, spec)
    task = request.resolved_task
    partition = spec.partition_for(task)
    assert partition is not None
    height, width = _target_canvas(request, spec, sources)
    seconds, notes = _seconds(request, spec, sources)
    notes += [note for source in sources for note in source.notes]
    asked = int(round(seconds * FPS))
    frames = aligned_frames(asked, spec.video)
    if frames != asked:
        notes.append(f"duration: {asked} frames asked, {frames} made (lengths are 17n+5 frames at {FPS} fps)")
    if request.keyframes:
        conditions = _keyframe_conditions(request, sources, height, width, notes)
    else:
        conditions = [
            _reference_condition(i, reference.kind, source, frames, spec, notes)
            for i, (reference, source) in enumerate(zip(request.references, sources, strict=True))
        ]
    return Plan(
        task=task,
        partition=partition.name,
        prompt=request.prompt,
        height=height,
        width=width,
        frames=frames,
        latents=latent_frames(frames, spec.video),
        audio_latents=sound_latents(frames),
        steps=request.steps,
        seed=request.seed,
        noise=request.noise,
        shifts=spec.world.shifts if request.shifts is None else (float(request.shifts[0]), float(request.shifts[1])),
        conditions=tuple(conditions),
        notes=tuple(notes),
    )


def _target_canvas(request: Request, spec: Spec, sources: Sequence[Any]) -> tuple[int, int]:
    if request.size is not None:
        width, height = request.size
        allowed = canvas(width, height, spec)
        if width * height > max(spec.world.area_cap, allowed[0] * allowed[1]):
            raise RequestError(
                "size",
                f"{width}x{height} is {width * height:,} pixels; at most {spec.world.area_cap:,}, "
                f"the nearest of this shape is {allowed[1]}x{allowed[0]}",
            )
        return height, width
    if request.aspect != "auto":
        return canvas(*parse_aspect(request.aspect), spec, request.short_edge)
    if request.keyframes:
        height, width = sources[0].pixels.shape[:2]
        check_ratio("keyframes[0].image", width, height)
        return canvas(width, height, spec, request.short_edge)
    return canvas(*DEFAULT_ASPECT, spec, request.short_edge)


def _seconds(request: Request, spec: Spec, sources: Sequence[Any]) -> tuple[float, list[str]]:
    world = spec.world
    if request.duration is not None:
        return float(request.duration), []
    sounds = [sound for sound in map(_sound_of, sources) if sound is not None]
    if request.references and len(sounds) == 1:
        seconds = sounds[0].samples.shape[1] / sounds[0].rate
        if not world.min_seconds <= seconds <= world.max_seconds:
            raise RequestError(
                "duration",
                f"was not given and the only sound lasts {seconds:.2f} s; videos last {world.min_seconds:g} to "
                f"{world.max_seconds:g} s, so give a duration",
            )
        return seconds, [f"duration: not given, {seconds:.3f} s taken from the only sound"]
    seconds = min(max(DEFAULT_SECONDS, world.min_seconds), world.max_seconds)
    return seconds, [f"duration: not given, {seconds:g} s taken"]


def _sound_of(source: Any) -> Sound | None:
    return source if isinstance(source, Sound) else source.sound if isinstance(source, Clip) else None


def _keyframe_conditions(
    request: Request, sources: Sequence[Any], height: int, width: int, notes: list[str]
) -> list[Condition]:
    conditions = []
    for i, (keyframe, source) in enumerate(zip(request.keyframes, sources, strict=True)):
        own_height, own_width = source.pixels.shape[:2]
        cover = i > 0  # the second picture is cropped to cover; the first binds or takes the canvas's shape
        if not cover and (own_height, own_width) != (height, width):
            stretch = (width / own_width) / (height / own_height)
            if abs(stretch - 1) > 0.02:
                notes.append(
                    f"keyframes[{i}]: {own_width}x{own_height} is stretched to {width}x{height}, "
                    f"its ratio {own_width / own_height:.3f} becomes {width / height:.3f}"
                )
        anchor = "first" if keyframe.index == 0 else "last"
        conditions.append(
            Condition("image", "keyframe", i, anchor, height, width, frames=1, vae_frames=1, latents=1, cover=cover)
        )
    return conditions


def _reference_condition(
    i: int, kind: str, source: Picture | Clip | Sound, frames: int, spec: Spec, notes: list[str]
) -> Condition:
    field = f"references[{i}]"
    if isinstance(source, Picture):
        own_height, own_width = source.pixels.shape[:2]
        height, width = _reference_size(field, own_height, own_width, spec)
        return Condition("image", "reference", i, None, height, width, frames=1, vae_frames=1, latents=1)
    sound = _sound_of(source)
    samples, rate, audio_latents = 0, 0, 0
    if sound is not None:
        rate = sound.rate
        samples = min(sound.samples.shape[1], int(frames / FPS * rate))
        if samples < sound.samples.shape[1] or sound.cut:
            notes.append(
                f"{field}: sound longer than the target, its first {samples / rate:.2f} s are used"
            )
        hop = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
        audio_latents = -(-resampled_length(samples, rate) // hop)
        if samples == 0:
            raise RequestError(f"{field}.source", "holds a sound of no samples; give one that can be heard")
    if isinstance(source, Sound):
        return Condition("audio", "reference", i, samples=samples, rate=rate, audio_latents=audio_latents)
    if kind == "video_audio" and sound is None:
        raise RequestError(f"{field}.source", "has no soundtrack; use kind video, or give one with sound")
    clip = _clip_condition(field, i, source, frames, spec, notes)
    return Condition(**(clip | {"samples": samples, "rate": rate, "audio_latents": audio_latents}))


def _clip_condition(
    field: str, i: int, source: Clip, frames: int, spec: Spec, notes: list[str]
) -> dict[str, Any]:
    given, height, width = source.frames.shape[:3]
    used = min(given, frames)
    least = spec.video.clip + tail_frames(spec.video)
    if used < least:
        raise RequestError(
            f"{field}.source", f"has {given} frames at {FPS} fps; at least {least} ({least / FPS:.2f} s) are needed"
        )
    tail = tail_frames(spec.video)
    vae_frames = max(1, (used - tail) // spec.video.clip) * spec.video.clip + tail
    if used < given or source.cut:
        notes.append(f"{field}: longer than the target, its first {used} frames are used")
    if vae_frames < used:
        notes.append(f"{field}: of {used} frames the video VAE sees the first {vae_frames} (lengths are 17n+5)")
    return {
        "kind": "video",
        "role": "reference",
        "source": i,
        "height": height,
        "width": width,
        "frames": used,
        "vae_frames": vae_frames,
        "latents": latent_frames(vae_frames, spec.video),
    }


def _reference_size(field: str, height: int, width: int, spec: Spec) -> tuple[int, int]:
    check_ratio(f"{field}.source", width, height)
    step, scale = spec.multiple, spec.world.reference_edge / min(width, height)
    return max(step, round(height * scale / step) * step), max(step, round(width * scale / step) * step)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values, for reports."""
    return {
        "task": plan.task,
        "partition": plan.partition,
        "canvas": [plan.width, plan.height],
        "frames": plan.frames,
        "seconds": plan.frames / FPS,
        "video_latents": plan.latents,
        "audio_latents": plan.audio_latents,
        "audio_channels": AUDIO_CHANNELS,
        "steps": plan.steps,
        "calls": plan.calls,
        "seed": plan.seed,
        "noise": plan.noise,
        "shifts": list(plan.shifts),
        "conditions": [vars(condition) for condition in plan.conditions],
        "notes": list(plan.notes),
    }
