"""Request + Spec + media shapes -> Plan: every size of the generation, decided before a weight is loaded.

Pure: no file is read and nothing is drawn. What the contract itself cuts (frames to 17n+5, a reference longer than
the target) is listed in `Plan.notes`; what is legal but probably not meant, in `Plan.warnings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import limits
from .errors import RequestError
from .limits import aligned_frames, check_ratio, counted, max_frames, tail_frames
from .precision import Fp8
from .request import Request, check_request, parse_aspect
from .sources import Clip, Picture, Sound, notes_of
from .spec import AUDIO_CHANNELS, AUDIO_LATENTS_PER_SECOND, FPS, SAMPLE_RATE, Spec, VideoVAESpec
from .wording import prompt_warnings

DISTORTION = 0.02  # a ratio that changes by more than this is reported


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
    warnings: tuple[str, ...] = ()
    asked_seconds: float = 0.0  # of the request, before lengths became 17n+5 frames

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


def warn_of_fp8(plan: Plan, fp8: Fp8 | None) -> Plan:
    """`plan`, with a warning where fp8's first and last steps in bf16 are all that the request has."""
    if fp8 is None or 2 * fp8.steps < plan.calls:
        return plan
    own = f"this request's {counted(plan.calls, 'call')}"
    told = f"precision: fp8: steps={fp8.steps} leaves none of {own} in fp8: all run in bf16"
    return replace(plan, warnings=(*plan.warnings, told))


def make_plan(request: Request, spec: Spec, sources: Sequence[Picture | Clip | Sound] = ()) -> Plan:
    """The plan of `request`, whose media are `sources` in request order (keyframes, then references).

    Raises RequestError naming the field. SPEC 4 throughout.
    """
    check_request(request, spec, allow_remote=True)  # the door has decided about addresses; here there are sources
    check_clips(request, spec, sources)
    task = request.resolved_task
    partition = spec.partition_for(task)
    assert partition is not None
    height, width = _target_canvas(request, spec, sources)
    seconds, notes = _seconds(request, spec, sources)
    rounded, warnings = _unmet(request, height, width, spec)
    notes += rounded
    notes += [note for source in sources for note in notes_of(source)]
    asked = int(round(seconds * FPS))
    frames = aligned_frames(asked, spec.video)
    if frames != asked:
        notes.append(f"duration: {asked} frames asked, {frames} made (lengths are 17n+5 frames at {FPS} fps)")
    if request.keyframes:
        conditions, distorted = _keyframe_conditions(request, sources, height, width, notes)
        warnings += distorted
    else:
        conditions = [
            _reference_condition(i, reference.kind, source, frames, spec, notes)
            for i, (reference, source) in enumerate(zip(request.references, sources, strict=True))
        ]
    labels = condition_labels(conditions)
    warnings += prompt_warnings(request.prompt, labels, must_be_named=bool(request.references))
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
        warnings=tuple(warnings),
        asked_seconds=seconds,
    )


def check_clips(request: Request, spec: Spec, sources: Sequence[Any]) -> None:
    """Refuse references of the wrong length: each alone, and all of a kind together. RequestError names the reference.

    Lengths count in 24ths of a second, so that 362 frames, our own longest output, still are 15 s. A soundtrack goes
    with its picture and does not count as a sound.
    """
    limit, seconds = limits.clip_frames(spec), limits.clip_seconds(spec.world)
    total = {"video": 0, "audio": 0}
    for i, source in enumerate(sources[len(request.keyframes) :]):
        if isinstance(source, Picture):
            continue
        kind = "video" if isinstance(source, Clip) else "audio"
        length = len(source.frames) if isinstance(source, Clip) else limits.in_frames(source.seconds)
        field = f"references[{i}].source"
        if source.cut or length > limit.high:
            raise RequestError(
                field,
                f"goes on after {limit.high / FPS:.2f} s; a clip lasts {seconds}, so choose a part of at most "
                f"{seconds.high:g} s with start and end",
            )
        if length < limit.low:
            raise RequestError(
                field, f"lasts {source.seconds:.2f} s; a clip lasts {seconds}, so give at least {seconds.low:g} s"
            )
        total[kind] += length
        if total[kind] > limit.high:
            raise RequestError(
                field,
                f"brings the references of kind {kind} to {total[kind] / FPS:.2f} s; at most {seconds.high:g} s "
                f"together, so cut {(total[kind] - limit.high) / FPS:.2f} s off with start and end",
            )


def condition_labels(conditions: Sequence[Condition]) -> list[tuple[str, tuple[str, ...]]]:
    """Each condition's field in the request and the labels by which the prompt may name it (SPEC 3.1)."""
    counts = {"Audio": 0, "Picture": 0, "Video": 0}
    named = []
    for condition in conditions:
        kinds = ["Audio"] * bool(condition.samples)
        kinds += {"image": ["Picture"], "video": ["Video"], "audio": []}[condition.kind]
        for kind in kinds:
            counts[kind] += 1
        field = "keyframes" if condition.role == "keyframe" else "references"
        named.append((f"{field}[{condition.source}]", tuple(f"{kind} {counts[kind]}" for kind in kinds)))
    return named


def _unmet(request: Request, height: int, width: int, spec: Spec) -> tuple[list[str], list[str]]:
    """Notes of what rounding has changed of the canvas that was asked for, warnings of what the area cap has."""
    notes, warnings = [], []
    edge, made = request.short_edge, min(height, width)
    rounding = f"sides are multiples of {spec.multiple}"
    if edge is not None and abs(made - edge) > spec.multiple // 2:
        warnings.append(f"short_edge: {edge} asked, {made} made (at most {spec.world.area_cap:,} pixels in all)")
    elif edge is not None and made != edge:
        notes.append(f"short_edge: {edge} asked, {made} made ({rounding})")
    if request.aspect != "auto":
        wide, high = parse_aspect(request.aspect)
        if abs(width / height / (wide / high) - 1) > DISTORTION:
            notes.append(f"aspect: {request.aspect} asked, {width}x{height} made, {width / height:.3g}:1 ({rounding})")
    return notes, warnings


def _target_canvas(request: Request, spec: Spec, sources: Sequence[Any]) -> tuple[int, int]:
    if request.size is not None:
        width, height = request.size
        allowed = canvas(width, height, spec)
        if width * height > max(spec.world.area_cap, allowed[0] * allowed[1]):
            raise RequestError(
                "size",
                f"{width}x{height} is {width * height:,} pixels; this model's limit is {spec.world.area_cap:,}, "
                f"the nearest of this shape is {allowed[1]}x{allowed[0]}",
            )
        return height, width
    if request.aspect != "auto":
        return canvas(*parse_aspect(request.aspect), spec, request.short_edge)
    if request.keyframes:
        height, width = sources[0].pixels.shape[:2]
        check_ratio("keyframes[0].image", width, height)
        return canvas(width, height, spec, request.short_edge)
    return canvas(*limits.ASPECTS[limits.DEFAULT_ASPECT], spec, request.short_edge)


def _seconds(request: Request, spec: Spec, sources: Sequence[Any]) -> tuple[float, list[str]]:
    world = spec.world
    if request.duration is not None:
        return float(request.duration), []
    sounds = [sound for sound in map(_sound_of, sources) if sound is not None]
    if request.references and len(sounds) == 1:
        seconds, cut = sounds[0].seconds, sounds[0].cut
        if cut or seconds < world.min_seconds or limits.in_frames(seconds) > max_frames(spec):
            lasts = f"was not given and the only sound {'goes on after' if cut else 'lasts'} {seconds:.2f} s"
            raise RequestError(
                "duration", f"{lasts}; this model's limit is {limits.durations(world)}, so give a duration"
            )
        return seconds, [f"duration: not given, {seconds:.3f} s taken from the only sound"]
    seconds = min(max(limits.DEFAULT_SECONDS, world.min_seconds), world.max_seconds)
    return seconds, [f"duration: not given, {seconds:g} s taken"]


def _sound_of(source: Any) -> Sound | None:
    return source if isinstance(source, Sound) else source.sound if isinstance(source, Clip) else None


def _keyframe_conditions(
    request: Request, sources: Sequence[Any], height: int, width: int, notes: list[str]
) -> tuple[list[Condition], list[str]]:
    conditions, warnings = [], []
    for i, (keyframe, source) in enumerate(zip(request.keyframes, sources, strict=True)):
        own_height, own_width = source.pixels.shape[:2]
        check_ratio(f"keyframes[{i}].image", own_width, own_height)
        # the released rule: the second picture covers; the first binds the canvas, or is stretched to it
        cover = keyframe.fit == "cover" or (keyframe.fit == "auto" and i > 0)
        change = (width / own_width) / (height / own_height)
        ratios = f"its ratio {own_width / own_height:.3f}, the canvas's {width / height:.3f}"
        sizes = f"{own_width}x{own_height} to {width}x{height}"
        if cover and abs(change - 1) > DISTORTION:
            lost, side = (change, "width") if change < 1 else (1 / change, "height")
            notes.append(f"keyframes[{i}]: {sizes}, {1 - lost:.0%} of its {side} is cropped off ({ratios})")
        elif abs(change - 1) > DISTORTION:
            advice = "fit=cover would crop it instead" if request.size or request.aspect != "auto" else ""
            warnings.append(f"keyframes[{i}]: distorted from {sizes}: {ratios}; {advice}".removesuffix("; "))
        anchor = "first" if keyframe.index == 0 else "last"
        conditions.append(
            Condition("image", "keyframe", i, anchor, height, width, frames=1, vae_frames=1, latents=1, cover=cover)
        )
    return conditions, warnings


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
            notes.append(f"{field}: sound longer than the target, its first {samples / rate:.2f} s are used")
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


def _clip_condition(field: str, i: int, source: Clip, frames: int, spec: Spec, notes: list[str]) -> dict[str, Any]:
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
        "asked_seconds": plan.asked_seconds,
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
        "warnings": list(plan.warnings),
    }
