"""A request's journey, one screen: every task and every machine walks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calibration import identity
from .conditioning import Wanted
from .config import set_flags
from .denoise import VelocityAt, Vote, denoise
from .layout import PackedLayout, Shard, build_layout, shard, shard_sizes, unpatchify
from .media.pixels import normalise
from .media.read import Tell, prepare, read_sources
from .media.remote import fetched
from .models.dit import DiT, make_row_state
from .models.modulation import Modulation, StepRows, step_rows
from .models.quantized import Stepwise, each_step
from .noise import ConditionLatents, Rows, initial_rows, sample_posterior
from .output.latents import Latents
from .parts import Parts
from .plan import Plan, describe_plan, make_plan, warn_of_fp8
from .policies import Setting, make_policy
from .policy import StepPolicy
from .policy_options import parse_policy
from .presentation import Prompt, present, vision_patches
from .request import Request, check_request
from .schedule import Sigmas, make_sigmas, step_timesteps
from .sources import Prepared
from .spec import AUDIO_CHANNELS, Spec
from .watch import Stages


@dataclass(frozen=True)
class Settled:
    """All that is known of a request before a weight is loaded."""

    plan: Plan
    inputs: tuple[Prepared, ...]
    prompt: Prompt
    layout: PackedLayout
    sigmas: Sigmas

    def boundaries(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Its values by name, for a trace."""
        prompt, layout, sigmas = self.prompt, self.layout, self.sigmas
        yield "prompt", {"ids": prompt.ids, "tags": prompt.tags, "types": prompt.token_types}
        indices = {f"{kind}_indices": getattr(layout, f"{kind}_indices") for kind in ("text", "video", "audio")}
        yield "layout", {"positions": layout.positions_S3, "tags": layout.tags_S, **indices}
        yield "sigmas", {"video": sigmas.video.sigmas, "audio": sigmas.audio.sigmas}


@torch.inference_mode()
def sample(
    request: Request, parts: Parts, stages: Stages, vote: Vote, *, planned: Callable[[Plan], None] | None = None
) -> Latents:
    """Everything up to the latents. Raises RequestError, also what `planned` raises, and CheckpointError for files that are
    not whole, before any weight is loaded."""
    team = parts.team
    with stages.stage("read"):
        settled = team.first(partial(settle, request, parts, planned, stages.tell))
        needed = f"dit:{settled.plan.partition}", "text_encoder", "video_decoder", "audio_decoder"
        team.first(partial(parts.check_files, *needed))
        part = shard(settled.layout, parts.parallel.sp.size, parts.parallel.sp.rank)
        parts.arrange(settled.plan, settled.layout)
        options = parse_policy(request.policy)
        policy = team.together(lambda: make_policy(options, policy_setting(settled, part, parts)))
        stages.gate()
    for name, values in settled.boundaries():
        stages.boundary(name, values)
    encoded = encode(settled, parts, stages)
    rows = initial_rows(settled.plan, encoded.conditions, parts.spec)
    stages.boundary("noise", vars(rows))
    work = Work(settled, part, encoded.text, policy, vote)
    rows, denoised = run_steps(work, rows, parts, stages)
    video, audio = split_latents(rows, settled.layout, settled.plan, parts.spec)
    stages.boundary("latents", {"video": video, "audio": audio})
    sigmas = settled.sigmas
    facts = {
        "plan": describe_plan(settled.plan),
        "sigmas": {"video": sigmas.video.sigmas.tolist(), "audio": sigmas.audio.sigmas.tolist()},
        "rows": [vars(segment) for segment in settled.layout.segments],
        "policy": policy.report(),
        "adaln": denoised["adaln"],
        "memory": parts.memory(),
        "conditioning": encoded.cache,
        "flags": {"encode": encoded.flags, "denoise": denoised["flags"]},
    }
    if parts.parallel.control.size > 1:
        mine = {"stages": stages.records, "communication": {"encode": encoded.costs, **denoised["communication"]}}
        facts["ranks"] = parts.parallel.control.tell_all(mine)
    return Latents(settled.plan, video, audio, facts)


def settle(
    request: Request, parts: Parts, planned: Callable[[Plan], None] | None = None, tell: Tell | None = None
) -> Settled:
    """Check, read, plan, present and lay out `request`. Raises RequestError; loads no weight."""
    spec = parts.spec
    check_request(request, spec, allow_remote=parts.choices.allow_remote)
    with fetched(request) as local:
        sources = read_sources(local, spec, tell)
    plan = warn_of_fp8(make_plan(request, spec, sources), parts.choices.fp8)
    if planned is not None:
        planned(plan)
    inputs = prepare(plan, sources)
    prompt = present(plan, inputs, parts.tokenizer, spec)
    return Settled(plan, inputs, prompt, build_layout(plan, prompt.tags, spec), make_sigmas(plan.steps, plan.shifts))


def policy_setting(settled: Settled, part: Shard, parts: Parts) -> Setting:
    """What the step policy of this rank's rows may know; its ballots are agreed on over both axes."""
    plan, sigmas = settled.plan, settled.sigmas

    return Setting(
        sigmas.video.sigmas.tolist(),
        sigmas.audio.sigmas.tolist(),
        part.layout.condition_video,
        part.layout.condition_audio,
        agree=lambda ballot: parts.parallel.tp.vote(parts.parallel.sp.vote(ballot)),
        identity=lambda: identity(plan, parts.weights.version(f"dit:{plan.partition}")),
    )


@dataclass(frozen=True)
class Encoded:
    """Prompt embeddings [L, text_dim] on the device, condition latents on CPU; the flags set; hits of the cache; what
    the ranks' exchange cost."""

    text: Tensor
    conditions: ConditionLatents
    flags: dict[str, Any]
    cache: dict[str, int]
    costs: dict[str, Any]


def encode(settled: Settled, parts: Parts, stages: Stages) -> Encoded:
    """Everything the encoders make of the request (SPEC 3.5, 6), as far as `parts.cache` does not know it."""
    flags = set_flags("encode", parts.choices)
    wanted = [wanted_text(settled.prompt, parts), *wanted_latents(settled, parts)]
    found = parts.cache.recall(wanted, parts)
    missing = [item.part for item, value in zip(wanted, found, strict=True) if value is None]
    with parts.resident(stages, *dict.fromkeys(missing)), stages.stage("encode", len(wanted)):
        values = []
        for i, (item, value) in enumerate(zip(wanted, found, strict=True)):
            stages.tell(i, len(wanted), item.note)
            values.append(item.make() if value is None else value)
            stages.tell(i + 1, len(wanted), item.note)
            stages.gate()
    parts.cache.keep(wanted, values, parts)
    made = list(zip((item.part for item in wanted), values, strict=True))
    visual = tuple(value for part, value in made if part == "video_encoder")
    sound = tuple(value for part, value in made if part == "audio_encoder")
    stages.boundary("text", {"embeddings": values[0]})
    named = ("visual", visual), ("sound", sound)
    stages.boundary("conditions", {f"{kind}.{i}": value for kind, group in named for i, value in enumerate(group)})
    hits = {"hits": len(wanted) - len(missing), "misses": len(missing)}
    return Encoded(values[0], ConditionLatents(visual, sound), flags, hits, parts.lap())


def wanted_text(prompt: Prompt, parts: Parts) -> Wanted:
    """The prompt's embeddings."""
    processor = parts.spec.processor

    def make() -> Tensor:
        # a generator: the encoder asks for one medium's pixels at a time
        visions = ((vision_patches(vision, processor), vision.grid) for vision in prompt.visions)
        return parts["text_encoder"](prompt.ids, prompt.token_types, visions)

    return Wanted("text_encoder", (prompt.ids, prompt.token_types, prompt.visions, processor), make, "prompt")


def wanted_latents(settled: Settled, parts: Parts) -> Iterator[Wanted]:
    """The latents of each condition, its sound before its picture."""
    for i, (condition, item) in enumerate(zip(settled.plan.conditions, settled.inputs, strict=True)):
        note = f"{condition.role} {i}: {condition.kind}"
        if item.waveform is not None:
            yield Wanted("audio_encoder", (item.waveform,), partial(encode_sound, item.waveform, parts), note)
        if item.frames is not None:
            frames = item.frames[: condition.vae_frames]
            yield Wanted("video_encoder", (frames,), partial(encode_pixels, frames, parts), note)


def encode_pixels(frames: np.ndarray, parts: Parts) -> Tensor:
    """uint8 frames [f, H, W, 3] -> normalised latents, CPU fp32 [1, C, T, h, w] (SPEC 6, 8)."""
    mean, std = parts["video_encoder"].encode(normalise(frames, parts.choices.device))
    sampled = sample_posterior(mean, std)
    spec = parts.spec.video
    return (sampled - _column(spec.mean, 5)) / _column(spec.std, 5)


def encode_sound(waveform: np.ndarray, parts: Parts) -> Tensor:
    """32 kHz stereo fp32 [2, n] -> normalised rows, CPU fp32 [2A, 32], left channel first (SPEC 9)."""
    means = parts["audio_encoder"].encode(torch.from_numpy(waveform).to(parts.choices.device)).cpu()
    spec = parts.spec.audio
    rows = means.transpose(1, 2)
    rows = (rows - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    return rows.reshape(-1, spec.latent_channels)


def _column(values: tuple[float, ...], dims: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, *[1] * (dims - 2))


@dataclass(frozen=True)
class Work:
    """What the steps of a request run on: this rank's rows, the prompt's embeddings, the policy and the vote."""

    settled: Settled
    part: Shard
    text: Tensor
    policy: StepPolicy
    vote: Vote


def run_steps(work: Work, rows: Rows, parts: Parts, stages: Stages) -> tuple[Rows, dict[str, Any]]:
    """Denoise on the device; all rows come back to the CPU, with the flags set, what was done about AdaLN, and what each
    step's exchange cost."""
    flags = set_flags("denoise", parts.choices)
    settled, part, sp = work.settled, work.part, parts.parallel.sp
    layout, sigmas, partition = settled.layout, settled.sigmas, settled.plan.partition
    names = f"dit:{partition}", f"modulation:{partition}"
    sizes = shard_sizes(layout, sp.size)
    costs: list[dict[str, Any]] = []

    def whole(own: Rows) -> Rows:
        return Rows(*(sp.join(x, size) for x, size in zip(vars(own).values(), sizes, strict=True)))

    def watched_vote(step: int, velocity: Rows) -> None:
        work.vote(step, velocity)
        costs.append(parts.lap())
        if stages.followed:
            stages.boundary("velocity", vars(whole(velocity)), step, sigmas.calls)
        stages.tell(step + 1, sigmas.calls)

    reserve(part, parts)
    with parts.resident(stages, *names):
        dit, modulation = (parts[name] for name in names)
        steps = [step_timesteps(layout, sigmas, step) for step in range(sigmas.calls)]
        adaln = modulation.prepare([timesteps for timesteps, _ in steps], stages)
        before = parts.lap()
        with stages.stage("denoise", sigmas.calls):
            velocity_at = predictor(dit, modulation, work.text, part, steps, row_chunk=parts.row_chunk)
            own, move = Rows(rows.video[part.video], rows.audio[part.audio]), parts.choices.ops.euler
            own = own.to(parts.choices.device)
            own = denoise(own, part.layout, sigmas, velocity_at, work.policy, watched_vote, move=move)
            rows = whole(own).to("cpu")
    costs_by_stage = {"prepare": before, "denoise": costs, "gather": parts.lap()}
    return rows, {"flags": flags, "adaln": adaln, "communication": costs_by_stage}


def reserve(part: Shard, parts: Parts) -> None:
    """Room for what the blocks exchange of this request; no more than what an earlier one has made room for, if that is
    enough."""
    dit, dtype = parts.spec.dit, parts.choices.dtype
    parts.parallel.reserve(part.layout.tags_S.shape[0], dit.heads, dit.head_dim * dtype.itemsize)


def predictor(
    model: DiT | Stepwise, modulation: Modulation, text: Tensor, part: Shard, steps: Sequence[tuple[Tensor, Tensor]],
    *, row_chunk: int = 0,
) -> VelocityAt:  # fmt: skip
    """The model as a function of step and rows: what does not change over steps is computed here, once a request.

    `steps`: `step_timesteps` of each step, of all rows; `modulation` is prepared for them. `row_chunk`: see `RowState`.
    """
    device, own = text.device, part.layout
    dits = each_step(model, len(steps))
    dit = dits[0]  # what is made here once is the same in all of them
    indices = own.text_indices, own.video_indices, own.audio_indices
    at = make_row_state(
        own.positions_S3, own.tags_S, indices, dit.spec, dit.dtype, device, used=part.used, chunk=row_chunk
    )
    refined = dit.refine(text)[part.text]
    # the prompt's first row has the target video's timestep, and so has padding
    read = static_rows([part.take(rows, int(rows[0])) for _, rows in steps], at.tags)

    def velocity_at(step: int, rows: Rows) -> Rows:
        return Rows(*dits[step](rows.video, rows.audio, refined, at, modulation.step(steps[step][0], read[step])))

    return velocity_at


def static_rows(indices: Sequence[Tensor], tags_S: Tensor) -> list[StepRows]:
    """Each step's `StepRows` on the device of the tags; neighbouring steps that read alike share one."""
    read: list[StepRows] = []
    for step, indices_S in enumerate(indices):
        same = step > 0 and torch.equal(indices_S, indices[step - 1])
        read.append(read[-1] if same else step_rows(indices_S.to(tags_S.device), tags_S))
    return read


def split_latents(rows: Rows, layout: PackedLayout, plan: Plan, spec: Spec) -> tuple[Tensor, Tensor]:
    """Target rows -> normalised latents: video [1, C, T, h, w], audio [2, 32, A]."""
    shape = (plan.latents, plan.height // spec.video.space, plan.width // spec.video.space)
    video = unpatchify(rows.video[layout.condition_video :], shape, spec.dit.patch)
    audio = rows.audio[layout.condition_audio :].reshape(AUDIO_CHANNELS, plan.audio_latents, -1).permute(0, 2, 1)
    return video, audio.contiguous()
