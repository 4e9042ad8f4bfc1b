"""From shelves of encoded scenes to batches of the DiT: equal prompts, conditions, targets.

All requests of a batch have one task, one canvas, one length and one number of prompt tokens, so they share a layout
and need no padding: what is trained is exactly the packing that generates.

Legend: B requests, L prompt tokens, N rows of one modality.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..layout import build_layout
from ..plan import Condition, Plan
from ..presentation import Tokenizer, present
from ..sources import Prepared
from ..spec import CONDITION_TIME, SAMPLE_RATE, Spec
from .batching import BatchLayout, PromptLayout, Sight, batch_layout, cut_patches, prompt_layout
from .captions import VARIANTS, caption
from .data import REFERENCE_EDGE, REFERENCE_FRAMES, Shelf
from .scenes import HOP, Scene

SOUND_LATENTS = (40, 60, 80)
VISION_TASKS = {"first": 1, "last": 1, "both": 2, "image": 1, "image+audio": 1, "video": 1}


@dataclass(frozen=True)
class Batch:
    """`layout` and `prompt` belong to all; tensors are on the device. Condition rows carry their noise already.

    `conditions` [B, Nc, 96] and `sounds` [B, Na, 32] are None without any; `video` and `audio` are clean targets.
    """

    task: str
    layout: BatchLayout
    prompt: PromptLayout
    ids: Tensor
    sights: tuple[Sight, ...]
    conditions: Tensor | None
    sounds: Tensor | None
    video: Tensor
    audio: Tensor


def conditions_of(task: str, width: int, height: int, sound_latents: int) -> tuple[Condition, ...]:
    """The plan's conditions of a training task on a canvas."""

    def keyframe(anchor: str, source: int) -> Condition:
        return Condition("image", "keyframe", source, anchor, height, width, frames=1, vae_frames=1, latents=1)

    edge = REFERENCE_EDGE
    picture = Condition("image", "reference", 0, None, edge, edge, frames=1, vae_frames=1, latents=1)
    if task in ("first", "last"):
        return (keyframe(task, 0),)
    if task == "both":
        return (keyframe("first", 0), keyframe("last", 1))
    if task == "image":
        return (picture,)
    if task == "image+audio":
        samples = sound_latents * HOP
        sound = Condition("audio", "reference", 1, samples=samples, rate=SAMPLE_RATE, audio_latents=sound_latents)
        return (picture, sound)
    if task == "video":
        frames, latents = REFERENCE_FRAMES, REFERENCE_FRAMES // 17 * 5 + 2
        film = Condition("video", "reference", 0, None, edge, edge, frames=frames, vae_frames=frames, latents=latents)
        return (film,)
    assert task == "t2va", task
    return ()


def task_plan(task: str, scene: Scene, latents: int, spec: Spec, sound_latents: int = 0) -> Plan:
    """The plan of a training request like `scene`; its prompt is empty."""
    name = "t2va" if task == "t2va" else "fl2va" if task in ("first", "last", "both") else "ref2va"
    return Plan(
        task=name, partition=spec.partitions[0].name, prompt="", height=scene.height, width=scene.width,
        frames=scene.frames, latents=latents, audio_latents=scene.audio_latents, steps=50, seed=0, noise="official",
        shifts=spec.world.shifts, conditions=conditions_of(task, scene.width, scene.height, sound_latents),
    )  # fmt: skip


def task_caption(scene: Scene, task: str, variant: int) -> str:
    """A caption for a training task."""
    found = caption(
        scene,
        variant,
        first=task in ("first", "both"),
        last=task in ("last", "both"),
        picture=task in ("image", "image+audio", "video"),
        audio=task == "image+audio",
    ).text
    return found.replace("<Picture 1>", "<Video 1>") if task == "video" else found


@dataclass(frozen=True)
class _Group:
    """Captions of one token count: rows of a shelf and ids int64 [n, L]."""

    rows: Tensor
    ids: Tensor


class Batches:
    """Draws batches from shelves. `tasks` are (name, share)."""

    def __init__(
        self, shelves: Sequence[Shelf], tokenizer: Tokenizer, spec: Spec, tasks: Sequence[tuple[str, float]], seed: int
    ) -> None:
        self.shelves, self.spec, self.tokenizer = shelves, spec, tokenizer
        self.random = random.Random(seed)
        self.tasks = tasks
        self.groups = [{name: self._sort(shelf, name) for name, _ in tasks} for shelf in shelves]
        self.layouts: dict[tuple[object, ...], tuple[BatchLayout, PromptLayout, Tensor]] = {}

    def draw(self, batch: int, dtype: torch.dtype) -> Batch:
        """A batch of one random task, shelf and prompt length, each as often as its share."""
        names, shares = zip(*self.tasks, strict=True)
        task = self.random.choices(names, shares)[0]
        index = self.random.choices(range(len(self.shelves)), [len(s.scenes) for s in self.shelves])[0]
        groups = self.groups[index][task]
        group = self.random.choices(groups, [len(g.rows) for g in groups])[0]
        chosen = torch.tensor([self.random.randrange(len(group.rows)) for _ in range(batch)])
        return self.assemble(task, index, group.rows[chosen], group.ids[chosen], dtype)

    def assemble(self, task: str, index: int, rows_B: Tensor, ids_BL: Tensor, dtype: torch.dtype) -> Batch:
        """The batch of the given scenes of shelf `index` and their caption ids (both on the CPU)."""
        shelf = self.shelves[index]
        device = shelf.video.device
        sound_latents = self.random.choice(SOUND_LATENTS) if task == "image+audio" else 0
        key = (task, index, len(rows_B), ids_BL.shape[1], sound_latents, dtype)
        if key not in self.layouts:
            self.layouts[key] = self._lay_out(task, shelf, ids_BL.shape[1], len(rows_B), sound_latents, dtype)
        layout, prompt, prefix = self.layouts[key]
        rows = rows_B.to(device, non_blocking=True)
        ids = torch.cat([prefix.expand(len(rows_B), -1), ids_BL.to(device, non_blocking=True)], dim=1)
        visual = [noised(part) for part in _visual(shelf, task, rows)]
        sounds = None
        if sound_latents:
            whole = shelf.sound[rows].float().unflatten(1, (2, -1))
            sounds = whole[:, :, :sound_latents].flatten(1, 2)
        return Batch(
            task, layout, prompt, ids,
            sights=tuple(cut_patches(frames, self.spec.processor) for frames in _frames(shelf, task, rows)),
            conditions=torch.cat(visual, dim=1) if visual else None,
            sounds=sounds,
            video=shelf.video[rows].float(),
            audio=shelf.audio[rows].float(),
        )  # fmt: skip

    def _lay_out(
        self, task: str, shelf: Shelf, length: int, batch: int, sound_latents: int, dtype: torch.dtype
    ) -> tuple[BatchLayout, PromptLayout, Tensor]:
        device, spec = shelf.video.device, self.spec
        plan = task_plan(task, shelf.scenes[0], shelf.latents, spec, sound_latents)
        prompt = present(plan, _blank(plan), self.tokenizer, spec)
        tags = torch.cat([prompt.tags, torch.ones(length, dtype=torch.int64)])
        types = torch.cat([prompt.token_types, torch.zeros(length, dtype=torch.int64)])
        packed = batch_layout(build_layout(plan, tags, spec), batch, spec.dit, dtype, device)
        grids = [vision.grid for vision in prompt.visions]
        return packed, prompt_layout(types, grids, spec.text, dtype, device), prompt.ids.to(device)

    def _sort(self, shelf: Shelf, task: str) -> list[_Group]:
        """The shelf's captions for a task by token count. Counts with few captions are left out, or their scenes would
        be seen far more often than others."""
        count = len(shelf.clip) if task == "video" else len(shelf.scenes)
        rows = [row for row in range(count) for _ in range(VARIANTS)]
        texts = [task_caption(shelf.scenes[row], task, variant) for row in range(count) for variant in range(VARIANTS)]
        ids = self.tokenizer.backend(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        found: dict[int, list[int]] = {}
        for i, tokens in enumerate(ids):
            found.setdefault(len(tokens), []).append(i)
        least = min(16, max(len(members) for members in found.values()))
        return [
            _Group(torch.tensor([rows[i] for i in members]), torch.tensor([ids[i] for i in members]))
            for members in found.values()
            if len(members) >= least
        ]


def noised(clean: Tensor) -> Tensor:
    """Visual conditions as they enter the rows: at time 0.999."""
    clean = clean.float()
    return CONDITION_TIME * clean + (1.0 - CONDITION_TIME) * torch.randn_like(clean)


def _visual(shelf: Shelf, task: str, rows: Tensor) -> list[Tensor]:
    per_frame = shelf.last.shape[1]
    # The first frame's picture has the latents of the clip's own first frame: the encoder sees no later one.
    first = [shelf.video[rows, :per_frame]] if task in ("first", "both") else []
    last = [shelf.last[rows]] if task in ("last", "both") else []
    picture = [shelf.picture[rows]] if task in ("image", "image+audio") else []
    return first + last + picture + ([shelf.clip[rows]] if task == "video" else [])


def _frames(shelf: Shelf, task: str, rows: Tensor) -> list[Tensor]:
    """uint8 [B, F, H, W, 3] of each vision input in prompt order."""
    if task in ("first", "last"):
        return [shelf.ends[rows][:, :1] if task == "first" else shelf.ends[rows][:, 1:]]
    if task == "both":
        return list(shelf.ends[rows].split(1, dim=1))
    if task in ("image", "image+audio"):
        return [shelf.pictures[rows]]
    return [shelf.clips[rows]] if task == "video" else []


def _blank(plan: Plan) -> tuple[Prepared, ...]:
    """Inputs of the right sizes for `present`, which looks at nothing else when it lays out a prompt."""

    def frames(condition: Condition) -> np.ndarray | None:
        shape = (condition.frames, condition.height, condition.width, 3)
        return None if condition.kind == "audio" else np.zeros(shape, dtype=np.uint8)

    return tuple(Prepared(frames(condition), None) for condition in plan.conditions)
