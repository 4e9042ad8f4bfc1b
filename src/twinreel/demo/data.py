"""Training data: windows of rendered scenes, loud stretches of their sound, and whole scenes as latents.

Legend: B examples, F frames, C channels, T latent frames, A audio latents a channel, R rows of a latent frame.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models.audio_encoder import AudioEncoder
from ..models.video_encoder import VideoEncoder, num_latents
from ..spec import PIXEL_MEAN, PIXEL_STD, AudioVAESpec, VideoVAESpec
from .fast_encoder import moments
from .scenes import (
    HOP,
    Scene,
    Thing,
    render_audio,
    render_reference_images,
    render_reference_sound,
    render_video,
    sample_scene,
)

WINDOW = 22  # frames behind one decoding window: a clip and the five frames that its last two latents stand for
REFERENCE_EDGE = 128
REFERENCE_FRAMES = 56
REFERENCE_SECONDS = 2.0
EVALUATION_SEED = 1_000_000  # seeds from here on are never trained on


def normalise(pixels_BFHWC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [B, F, H, W, 3] -> ImageNet-normalised, same shape."""
    mean, std = (torch.tensor(v, device=pixels_BFHWC.device) for v in (PIXEL_MEAN, PIXEL_STD))
    return pixels_BFHWC.float().div_(255.0).sub_(mean).div_(std).to(dtype)


def denormalise(x_BCFHW: Tensor) -> Tensor:
    """The inverse, float32 in [0, 1] where the pixels were; not clamped."""
    mean, std = (torch.tensor(v, device=x_BCFHW.device).view(1, 3, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    return x_BCFHW.float() * std + mean


class WindowPool:
    """Scenes of one canvas, and windows of `WINDOW` frames of them drawn anew every time."""

    def __init__(self, canvas: tuple[int, int], count: int, device: torch.device, first_seed: int = 0) -> None:
        width, height = canvas
        self.device, self.random = device, random.Random(first_seed)
        self.scenes = [sample_scene(first_seed + i, width=width, height=height) for i in range(count)]

    def draw(self, batch: int) -> Tensor:
        """uint8 [batch, 22, H, W, 3]."""
        scenes = [self._one() for _ in range(batch)]
        starts = torch.tensor([self.random.randint(0, s.frames - WINDOW) for s in scenes])
        return render_video(scenes, self.device, starts[:, None] + torch.arange(WINDOW))

    def _one(self) -> Scene:
        scene = self.random.choice(self.scenes)
        if self.random.random() < 0.06:  # what a picture reference shows: one large still thing
            size = self.random.uniform(0.13, 0.32) * min(scene.width, scene.height)
            middle = (scene.width / 2, scene.height / 2)
            thing = replace(scene.things[0], motion="rest", size=size, x=middle[0], y=middle[1])
            return replace(scene, things=(thing,), floor=scene.height)
        return scene


class SoundPool:
    """Mono stretches of scenes' sound, most of them with something to hear in them."""

    def __init__(self, count: int, device: torch.device, first_seed: int = 0) -> None:
        parts, chunk = [], 64
        for begin in range(0, count, chunk):
            scenes = [sample_scene(first_seed + i) for i in range(begin, min(begin + chunk, count))]
            parts.append(render_audio(scenes, device).flatten(0, 1))
        self.sounds = torch.cat(parts)
        self.sounds = self.sounds[self.sounds.abs().amax(1) > 0.02]

    def draw(self, batch: int, samples: int) -> Tensor:
        """float32 [batch, samples]: of sixteen candidates an example the first loud one, with a gain of its own. Nine in
        ten begin on the latents' grid, as the scenes' sounds do in use."""
        tries, device = 16, self.sounds.device
        rows = torch.randint(len(self.sounds), (batch, 1), device=device)
        starts = torch.randint(self.sounds.shape[1] - samples, (batch, tries), device=device)
        aligned = torch.rand(batch, 1, device=device) < 0.9
        starts = torch.where(aligned, starts // HOP * HOP, starts)
        index = starts[..., None] + torch.arange(samples, device=device)
        found = self.sounds[rows[..., None], index]
        loud = found.square().mean(-1) > 1e-4
        # The last candidate is taken whatever it is, so that a little silence is seen too.
        loud[:, -1] = True
        chosen = found[torch.arange(batch, device=device), loud.int().argmax(1)]
        return chosen * (0.5 + 0.6 * torch.rand(batch, 1, device=device))


# ---- scenes as latents ----------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_video(encoder: VideoEncoder, pixels_BFHWC: Tensor, clips: int = 64) -> Tensor:
    """Posterior means float32 [B, C, T, h, w] of whole videos of 17n + 5 frames, or of pictures (F = 1).

    The same as `VideoEncoder.encode` on canvases of one tile, many clips a call: the encoder sees only past frames, so
    the five frames of the last clip need no filling up.
    """
    spec, frames = encoder.spec, pixels_BFHWC.shape[1]
    dtype = encoder.quant_conv.weight.dtype

    def means(part_BFHWC: Tensor) -> Tensor:
        out = [
            moments(encoder, normalise(piece, dtype))[:, : spec.latent_channels] for piece in part_BFHWC.split(clips)
        ]
        return torch.cat(out)

    whole = frames // spec.clip
    parts = []
    if whole:
        cut = pixels_BFHWC[:, : whole * spec.clip].unflatten(1, (whole, spec.clip)).flatten(0, 1)
        z = means(cut).unflatten(0, (-1, whole))
        parts.append(z.transpose(1, 2).flatten(2, 3))
    if frames % spec.clip:
        parts.append(means(pixels_BFHWC[:, whole * spec.clip :]))
    return torch.cat(parts, dim=2)


@torch.no_grad()
def encode_audio(encoder: AudioEncoder, waveform_Bn: Tensor, batch: int = 256) -> Tensor:
    """Means float32 [B, 32, A] of mono waveforms."""
    return torch.cat([encoder.encode(part) for part in waveform_Bn.split(batch)])


def video_rows(latents_BCThw: Tensor, spec: VideoVAESpec, patch: int = 2) -> Tensor:
    """Normalised rows [B, T h/2 w/2, 4C] of latents, each as `layout.patchify` makes them."""
    mean, std = (torch.tensor(v, device=latents_BCThw.device).view(1, -1, 1, 1, 1) for v in (spec.mean, spec.std))
    x = (latents_BCThw - mean) / std
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * patch * patch)


def audio_rows(latents_BCA: Tensor, spec: AudioVAESpec) -> Tensor:
    """Normalised rows [B/2, 2A, 32] of the latents of left and right channels in turn."""
    mean, std = (torch.tensor(v, device=latents_BCA.device) for v in (spec.mean, spec.std))
    rows = (latents_BCA.transpose(1, 2) - mean) / std
    return rows.unflatten(0, (-1, 2)).flatten(1, 2)


@dataclass(frozen=True)
class Shelf:
    """Encoded scenes of one canvas and length, on the device; rows are float16.

    `video` [N, T R, 96], `audio` [N, 2A, 32], `last` [N, R, 96] the last frame as a picture; `ends` uint8
    [N, 2, H, W, 3] first and last frame. `picture` [N, 16, 96] and `pictures` uint8 [N, 1, 128, 128, 3] are the first
    thing's still, `sound` [N, 2 * 80, 32] its sound alone; `clip` [M, 16 * 17, 96] and `clips` uint8 [M, 5, 128, 128, 3]
    the thing sliding by, for the first M scenes.
    """

    scenes: tuple[Scene, ...]
    latents: int
    audio_latents: int
    video: Tensor
    audio: Tensor
    last: Tensor
    ends: Tensor
    picture: Tensor
    pictures: Tensor
    sound: Tensor
    clip: Tensor
    clips: Tensor

    @property
    def canvas(self) -> tuple[int, int]:
        """(width, height)."""
        return self.scenes[0].width, self.scenes[0].height


def reference_scene(thing: Thing, seed: int) -> Scene:
    """A short clip of the thing sliding by, for video references."""
    draw, edge = random.Random(f"reference-{seed}"), REFERENCE_EDGE
    x, end = (edge * 0.25, edge * 0.75) if draw.random() < 0.5 else (edge * 0.75, edge * 0.25)
    moving = replace(thing, motion="slide", sound="none", x=x, end_x=end, y=edge / 2, start=0.2, stop=2.0)
    moving = replace(moving, size=edge * draw.uniform(0.15, 0.25))
    return Scene(seed, (moving,), "grey", 112.0, 0.0, edge, edge, edge, REFERENCE_FRAMES)


@dataclass(frozen=True)
class Encoders:
    """The two trained encoders and the specs that carry their statistics."""

    video: VideoEncoder
    audio: AudioEncoder
    video_spec: VideoVAESpec
    audio_spec: AudioVAESpec


def fill_shelf(scenes: Sequence[Scene], encoders: Encoders, device: torch.device, clips: int, chunk: int = 16) -> Shelf:
    """Render and encode scenes of one canvas and length; at least the first `clips` get a video reference too."""
    half = torch.float16
    columns: dict[str, list[Tensor]] = {}

    def keep(**tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            columns.setdefault(name, []).append(tensor.to(half) if tensor.is_floating_point() else tensor)

    def rows(pixels: Tensor) -> Tensor:
        return video_rows(encode_video(encoders.video, pixels), encoders.video_spec)

    def sounds(waveform: Tensor) -> Tensor:
        return audio_rows(encode_audio(encoders.audio, waveform.flatten(0, 1)), encoders.audio_spec)

    for begin, part in _parts(scenes, chunk):
        things = [scene.things[0] for scene in part]
        pixels = render_video(part, device)
        ends = pixels[:, (0, -1)]
        stills = render_reference_images(things, device, REFERENCE_EDGE)[:, None]
        alone = torch.stack([render_reference_sound(thing, device, REFERENCE_SECONDS) for thing in things])
        keep(video=rows(pixels), last=rows(ends[:, 1:]), ends=ends, picture=rows(stills), pictures=stills)
        keep(audio=sounds(render_audio(part, device)), sound=sounds(alone))
        if begin < clips:
            films = render_video([reference_scene(s.things[0], s.seed) for s in part], device)
            keep(clip=rows(films), clips=films[:, ::12])
    first, nothing = scenes[0], [torch.empty(0, device=device)]
    columns = {"clip": nothing, "clips": nothing} | columns
    return Shelf(
        scenes=tuple(scenes),
        latents=num_latents(first.frames, encoders.video_spec),
        audio_latents=first.audio_latents,
        **{name: torch.cat(parts) for name, parts in columns.items()},
    )


def _parts(scenes: Sequence[Scene], size: int) -> Iterator[tuple[int, list[Scene]]]:
    for begin in range(0, len(scenes), size):
        yield begin, list(scenes[begin : begin + size])
