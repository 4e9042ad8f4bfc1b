"""The DiT with its conditioner: rectified flow over both streams at once, all three tasks."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.audio_encoder import AudioEncoder
from ...models.dit import DiT
from ...models.modulation import LiveModulation
from ...models.text_encoder import TextEncoder
from ...models.video_encoder import VideoEncoder
from ...parallel import Parallel
from ...spec import AUDIO_CONDITION_TIME, CONDITION_TIME, Spec
from ...weights.tokenizer import Tokenizer, load_tokenizer
from ..batches import Batch, Batches
from ..batching import CLOCKS, Segments, encode_prompts
from ..data import EVALUATION_SEED, Encoders, Shelf, encode_audio, encode_video, fill_shelf
from ..recipe import DitRecipe, Recipe
from ..scenes import render_audio, render_video, sample_scene
from ..words import write_tokenizer
from .loop import Piece, Run, Weights, load_means

STEM = "dit"


class Model(nn.Module):
    """The three trained modules, built as they generate; the DiT's ops are those of a batch."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        super().__init__()
        self.spec, self.segments = spec, Segments()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.dit = DiT(spec.dit, self.segments.ops(), Parallel.single(), self.dtype)
        self.modulation = LiveModulation(spec.dit, self.dtype)
        self.text = TextEncoder(spec.text, self.dtype)
        start(self)
        self.to(device)
        self.text.init_buffers(device)

    def forward(self, batch: Batch, video: Tensor, audio: Tensor, times_B4: Tensor) -> tuple[Tensor, Tensor]:
        """Velocities float32 [B, Nv, 96] and [B, Na, 32] of noisy targets, at the times of the clocks."""
        at = batch.layout
        self.segments.lay_out(at)
        text = encode_prompts(self.text, batch.ids, batch.prompt, batch.sights)
        refined = self.dit.refine(text)
        rows = video if batch.conditions is None else torch.cat([batch.conditions, video], dim=1)
        sounds = audio if batch.sounds is None else torch.cat([batch.sounds, audio], dim=1)
        mod = self.modulation.at(times_B4.flatten(), at.clock_indices, at.at)
        v, a = self.dit(rows.flatten(0, 1), sounds.flatten(0, 1), refined, at.at, mod)
        size = at.batch
        return v.unflatten(0, (size, -1))[:, -video.shape[1] :], a.unflatten(0, (size, -1))[:, -audio.shape[1] :]


@torch.no_grad()
def start(model: Model) -> None:
    """First values: matrices keep variance, modulation and heads are zero, so every block begins as the identity."""
    for name, p in model.named_parameters():
        if "adaln_proj" in name or "final_layer.video_out" in name or "final_layer.audio_out" in name:
            nn.init.zeros_(p)
        elif "embed_tokens" in name or "pos_embed" in name:
            nn.init.normal_(p, std=0.3)
        elif p.ndim >= 2:
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def matrices(weights: Weights) -> list[str]:
    """Matrices inside blocks and layers, for Muon."""
    inside = ("dit.blocks", "token_refiner.blocks", "language_model.layers", "visual.blocks")
    return [n for n, p in weights.masters.items() if p.ndim == 2 and any(part in n for part in inside)]


def draw_times(batch: int, recipe: DitRecipe, shifts: tuple[float, float], device: torch.device) -> Tensor:
    """Base times u in (0, 1), [B]; 1 is noise. A share is uniform in the video's sigma instead of in u."""
    u = torch.rand(batch, device=device)
    late = torch.rand(batch, device=device) < recipe.late
    # u = sigma / (s - (s - 1) sigma) inverts sigma = s u / (1 + (s - 1) u).
    return torch.where(late, u / (shifts[0] - (shifts[0] - 1) * u), u)


def clocks(u: Tensor, shifts: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Video and audio sigma [B] at base times u, and the four clocks' timesteps [B, 4]."""
    video, audio = (s * u / (1 + (s - 1) * u) for s in shifts)
    ones = torch.ones_like(u)
    times = [1 - video, 1 - audio, (1 - video).clamp(min=CONDITION_TIME), AUDIO_CONDITION_TIME * ones]
    assert len(times) == CLOCKS
    return video, audio, torch.stack(times, dim=1)


def flow_loss(model: Model, batch: Batch, u: Tensor) -> tuple[Tensor, Tensor]:
    """Mean square error of the velocities `clean - noise` of both streams at base times u."""
    video_sigma, audio_sigma, times = clocks(u, model.spec.world.shifts)
    losses, noisy, wanted = [], [], []
    for clean, sigma in ((batch.video, video_sigma), (batch.audio, audio_sigma)):
        noise, sigma = torch.randn_like(clean), sigma[:, None, None]
        noisy.append(torch.lerp(clean, noise, sigma))
        wanted.append(clean - noise)
    for found, velocity in zip(model(batch, noisy[0], noisy[1], times), wanted, strict=True):
        losses.append((found - velocity).square().mean())
    return losses[0], losses[1]


# ---- what is needed before the first step ---------------------------------------------------------------------------


def demo_tokenizer(spec: Spec) -> Tokenizer:
    """The bundled tokenizer, through the loader that generation uses."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_tokenizer(folder, spec.text)


def load_encoders(spec: Spec, folder: Path, device: torch.device) -> Encoders:
    """The averaged encoders of the VAE runs."""
    video, audio = VideoEncoder(spec.video), AudioEncoder(spec.audio)
    load_means(folder / "video-mean.safetensors", "vae/encoder.", video)
    load_means(folder / "audio-mean.safetensors", "vae/encoder.", audio)
    video.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).requires_grad_(False)
    audio.to(device).requires_grad_(False).freeze()
    return Encoders(video, audio, spec.video, spec.audio)


@torch.no_grad()
def measure_statistics(encoders: Encoders, device: torch.device, count: int) -> dict[str, list[float]]:
    """Mean and deviation of each latent channel over `count` scenes, for the VAE configs."""
    found: dict[str, list[Tensor]] = {"video": [], "audio": []}
    for begin in range(0, count, 16):
        scenes = [sample_scene(2_000_000 + i) for i in range(begin, min(begin + 16, count))]
        z = encode_video(encoders.video, render_video(scenes, device))
        found["video"].append(z.transpose(0, 1).flatten(1))
        w = encode_audio(encoders.audio, render_audio(scenes, device).flatten(0, 1))
        found["audio"].append(w.transpose(0, 1).flatten(1))
    stats: dict[str, list[float]] = {}
    for name, parts in found.items():
        whole = torch.cat(parts, dim=1)
        stats[f"{name}_mean"], stats[f"{name}_std"] = whole.mean(1).tolist(), whole.std(1).tolist()
    return stats


def with_statistics(spec: Spec, stats: dict[str, list[float]]) -> Spec:
    """The spec with measured latent statistics, rounded as the config files will hold them."""

    def values(name: str) -> tuple[float, ...]:
        return tuple(round(value, 6) for value in stats[name])

    return replace(
        spec,
        video=replace(spec.video, mean=values("video_mean"), std=values("video_std")),
        audio=replace(spec.audio, mean=values("audio_mean"), std=values("audio_std")),
    )


def fill_shelves(encoders: Encoders, recipe: DitRecipe, first_seed: int, device: torch.device) -> list[Shelf]:
    """The training scenes of one piece, every canvas and length by its share."""
    shelves = []
    for (width, height), frames, share in recipe.shelves:
        count = max(2, round(recipe.scenes * share))
        scenes = [sample_scene(first_seed + i, width=width, height=height, frames=frames) for i in range(count)]
        shelves.append(fill_shelf(scenes, encoders, device, -(-count // 8) if needs_clips(recipe) else 0))
    return shelves


def needs_clips(recipe: DitRecipe) -> bool:
    """Whether any task refers to a video."""
    return any(task == "video" for task, _ in recipe.tasks)


def train(recipe: Recipe, piece: Piece, device: torch.device) -> None:
    """One piece: encodes its own scenes, then trains; leaves `dit`, `dit-mean` (safetensors) and `dit.jsonl`."""
    begin = time.monotonic()
    settings = recipe.dit
    encoders = load_encoders(recipe.spec, piece.folder, device)
    model = Model(recipe.spec, device)
    weights = Weights({"dit": model.dit, "modulation": model.modulation, "text": model.text})
    run = Run(STEM, piece, settings.pace, weights, matrices(weights))
    stats = run.facts.setdefault("statistics", None) or measure_statistics(encoders, device, settings.measured)
    run.facts["statistics"] = stats
    spec = model.spec = with_statistics(recipe.spec, stats)
    encoders = replace(encoders, video_spec=spec.video, audio_spec=spec.audio)
    tokenizer = demo_tokenizer(spec)
    shelves = fill_shelves(encoders, settings, 100_000 * (1 + round(100 * piece.begin)), device)
    batches = Batches(shelves, tokenizer, spec, settings.tasks, seed=run.total)
    held = Batches(fill_held(encoders, settings, device), tokenizer, spec, settings.tasks, seed=1)
    run.hurry(time.monotonic() - begin)
    run.log.write(prepared_seconds=time.monotonic() - begin)
    for _ in run:
        batch = batches.draw(settings.pace.batch, model.dtype)
        video, audio = flow_loss(model, batch, draw_times(settings.pace.batch, settings, spec.world.shifts, device))
        run.learn(video + audio, video=video, audio=audio)
    weights.use_mean()
    run.log.write(step=run.total, **check(model, held, settings.unseen))


def fill_held(encoders: Encoders, recipe: DitRecipe, device: torch.device) -> list[Shelf]:
    """A few scenes of the first canvas that are never trained on."""
    (width, height), frames, _ = recipe.shelves[0]
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + recipe.unseen)
    scenes = [sample_scene(seed, width=width, height=height, frames=frames) for seed in seeds]
    return [fill_shelf(scenes, encoders, device, len(scenes) if needs_clips(recipe) else 0)]


@torch.no_grad()
def check(model: Model, held: Batches, batch: int) -> dict[str, float]:
    """Losses on unseen scenes with the averaged weights, at fixed base times and with fixed noise, by task."""
    device = held.shelves[0].video.device
    facts: dict[str, float] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for task, _ in held.tasks:
            groups = held.groups[0][task]
            group = max(groups, key=lambda g: len(g.rows))
            index = torch.arange(batch) % len(group.rows)
            drawn = held.assemble(task, 0, group.rows[index], group.ids[index], model.dtype)
            u = (torch.arange(batch, device=drawn.video.device) + 0.5) / batch
            video, audio = flow_loss(model, drawn, u)
            facts |= {f"video_{task}": float(video), f"audio_{task}": float(audio)}
    return facts
