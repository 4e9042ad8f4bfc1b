"""Predicted peak memory of every stage, from sizes alone. Estimates: allocators, kernels and libraries add their own.

The counts below name what is alive at the fullest moment of the plain ops; `tests/test_estimate.py` holds them to
measured peaks. Bytes everywhere; `S` packed rows, `L` prompt tokens, `P` patches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..plan import Condition, Plan
from ..spec import AUDIO_CHANNELS, Spec
from ..weights.keymap import MODULES, Stored, stored_tensors

FP32 = 4
PROCESS = {"cpu": 560 << 20, "cuda": 2560 << 20}  # Python, PyTorch and its libraries in host memory
CUDA_OWN = 640 << 20  # what the driver and the libraries keep of a device
ENCODER_FRAMES = 64  # frames that the video encoder looks ahead and refers to
RGB, YUV = 3.0, 1.5  # bytes of a pixel
# Linears of the video decoder whose weights take the dtype of their products.
_COMPUTE = re.compile(r"\.(to_qkv|to_out|w1|w2)\.")


@dataclass(frozen=True)
class Setting:
    """How the parts run: `device` cpu or cuda, bytes of an element of DiT and conditioner, and of the video decoder's
    products, tiles a call of that decoder, `all` or `stages` resident, `adaln` live or precompute."""

    device: str
    element: int
    vae_element: int
    tile_batch: int
    residency: str
    adaln: str = "live"


@dataclass(frozen=True)
class Weights:
    """One part's weights: in use, at the fullest moment of loading, its largest stored tensor, and all as stored."""

    kept: int
    loading: int
    largest: int
    stored: int


def part_weights(spec: Spec, part: str, setting: Setting) -> Weights:
    """Bytes of the part called `part` (`dit:ref2va`, `video_decoder`, ...) in the dtypes it runs in."""
    name = part.partition(":")[0]
    rows = [row for row in stored_tensors(MODULES[name], "original", spec).values() if row.module == name]

    def kept(row: Stored) -> int:
        if name == "video_decoder" and _COMPUTE.search(row.parameter):
            return setting.vae_element
        return FP32 if row.island else setting.element

    stored = [prod(row.shape) * (FP32 if row.dtype == "float32" else 2) for row in rows]
    total = sum(prod(row.shape) * kept(row) for row in rows)
    # the decoder's weights arrive in fp32 and are cast afterwards
    arriving = sum(prod(row.shape) * (FP32 if row.island else setting.element) for row in rows)
    return Weights(total, max(total, arriving), max(stored), sum(stored))


def table_weights(plan: Plan, spec: Spec, setting: Setting) -> Weights:
    """The modulation of all steps as tables, which are made one projection at a time."""
    live = part_weights(spec, f"modulation:{plan.partition}", setting)
    timesteps = 2 + any(c.frames for c in plan.conditions) + any(c.samples for c in plan.conditions)
    values = (18 * spec.dit.layers + 2) * spec.dit.hidden
    kept = plan.calls * timesteps * values * setting.element
    return Weights(kept, kept + live.largest, live.largest, live.stored)


def stage_parts(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Which parts each stage of `plan` uses."""
    encoders = ["text_encoder"]
    encoders += ["video_encoder"] * any(condition.frames for condition in plan.conditions)
    encoders += ["audio_encoder"] * any(condition.samples for condition in plan.conditions)
    return {
        "encode": tuple(encoders),
        "denoise": (f"dit:{plan.partition}", f"modulation:{plan.partition}"),
        "decode": ("video_decoder", "audio_decoder"),
    }


def estimate(plan: Plan, rows: Mapping[str, int], spec: Spec, setting: Setting) -> dict[str, dict[str, int]]:
    """Per stage: bytes of `weights`, of `work` beside them, and the peaks `device` and `host` (one peak on a CPU).

    `rows` counts the packed rows of kind `text`, `video` and `audio`.
    """
    work = {
        "encode": encode_work(plan, rows["text"], spec, setting),
        "denoise": denoise_work(rows, spec, setting),
        "decode": decode_work(plan, spec, setting),
    }
    made: dict[str, dict[str, int]] = {}
    before = 0  # weights that stay from earlier stages
    for stage, parts in stage_parts(plan).items():
        weights = [
            table_weights(plan, spec, setting)
            if setting.adaln == "precompute" and part.startswith("modulation:")
            else part_weights(spec, part, setting)
            for part in parts
        ]
        kept = before + sum(part.kept for part in weights)
        peak = max(kept + work[stage], before + _loading(weights))
        largest = max(part.largest for part in weights)
        host = PROCESS[setting.device] + media_bytes(plan) + (encoder_bytes(plan) if stage == "decode" else 0)
        if setting.device == "cpu":
            peak = max(peak, before + _loading(weights) + largest) + host
            made[stage] = {"weights": kept, "work": work[stage], "host": peak}
        else:
            made[stage] = {"weights": kept, "work": work[stage], "device": peak + CUDA_OWN, "host": host + largest}
        before = kept if setting.residency == "all" else 0
    return made


def _loading(weights: Sequence[Weights]) -> int:
    """The fullest moment of loading parts one after the other."""
    done, peak = 0, 0
    for part in weights:
        peak = max(peak, done + part.loading)
        done += part.kept
    return peak


# ---- stages ----------------------------------------------------------------------------------------------------------


def encode_work(plan: Plan, tokens: int, spec: Spec, setting: Setting) -> int:
    """The conditioner's prompt and pictures, then each condition's pass through the VAEs."""
    text, element = spec.text, setting.element
    query = text.heads * text.head_dim
    feed = 3 * text.hidden + 3 * text.intermediate  # two residuals, the normalised input; gate, value, product
    # two residuals, qkv and output in the model's dtype; the normalised query twice in fp32
    attend = (2 * text.hidden + 3 * query) * element + 2 * query * FP32
    peaks = [tokens * max(feed * element, attend) + vision_work(plan, spec, setting)]
    for condition in plan.conditions:
        if condition.frames:
            peaks.append(pixels_work(condition, spec))
        if condition.samples:
            samples = condition.audio_latents * spec.audio.hop
            # residual, its copy and four temporaries of the first, widest level
            peaks.append(AUDIO_CHANNELS * samples * spec.audio.encoder_dim * FP32 * 6)
    return max(peaks)


def vision_work(plan: Plan, spec: Spec, setting: Setting) -> int:
    """The vision tower over all pictures, or over all videos, whichever is more."""
    processor, vision = spec.processor, spec.text.vision
    patches = {"image": 0, "video": 0, "audio": 0}
    for condition in plan.conditions:
        slices = -(-condition.frames // 24) if condition.kind == "video" else 1  # pairs of frames at 2 a second
        patches[condition.kind] += slices * (condition.height // processor.patch) * (condition.width // processor.patch)
    most = max(patches.values())
    if not most:
        return 0
    values = vision["in_channels"] * processor.temporal_patch * processor.patch**2
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    rows = values * (FP32 + 2 * setting.element)  # as cut, as cast, and all together
    rows += setting.element * (3 * width + max(2 * inner, 3 * width)) + FP32 * 4 * width  # rotation runs in fp32
    return most * rows


def pixels_work(condition: Condition, spec: Spec) -> int:
    """One picture or clip through the video encoder: its pixels, and one tile at the first, widest level."""
    video = spec.video
    frames = min(condition.vae_frames, video.clip)
    area = min(condition.height, video.tile) * min(condition.width, video.tile)
    pixels = condition.vae_frames * condition.height * condition.width * 3 * FP32
    # residual, output, its copy and a norm's; the input padded by two frames, and the convolution's copy of that
    wide = (4 * frames + 2 * (frames + 2)) * area * video.channels[0]
    return 2 * pixels + wide * FP32


def denoise_work(rows: Mapping[str, int], spec: Spec, setting: Setting) -> int:
    """One block over all packed rows at its fullest, beside what lives through all steps."""
    dit, element, total = spec.dit, setting.element, sum(rows.values())
    D, inner = dit.hidden, dit.inner
    # residual and input; qkv 3, normalised q and k 2, rotated q 1, and k in rotation 1.75
    attend = 2 * D + 7.75 * inner
    # the residual before and after attention, the input; gate and value 2, silu 1, product 1
    feed = 3 * D + 4 * dit.ffn
    block = max(attend, feed) * element
    enter = D * (2 * FP32 + 2 * element)  # both modalities' rows projected in fp32, then rounded
    leave = D * (FP32 + 4 * element)
    states = 2 * 3 * dit.rope_freqs * element + 6 * FP32 * dit.video_row
    text = rows["text"] * (dit.text_dim + D) * element
    tables = 4 * 18 * D * element * 2  # at most four distinct timesteps; this block's and the last one's
    return int(total * (max(block, enter, leave) + states) + text + tables)


def decode_work(plan: Plan, spec: Spec, setting: Setting) -> int:
    """The sound's decoder, or the video's: a window of tiles on the canvas, then the finished clip."""
    video, audio = spec.video, spec.audio
    frame = plan.height * plan.width * 3 * FP32
    window = (2 * video.clip_latents - video.token_drop) * video.time
    height, width = min(plan.height, video.tile), min(plan.width, video.tile)
    latents = window // video.time * (height // video.space) * (width // video.space)
    tokens = (latents + video.decoder_registers + 1) * setting.tile_batch
    D = video.decoder_heads * video.decoder_head_dim
    inner = video.decoder_ffn_mult * D
    # fp32: two residuals and the normalised input; in the products' dtype: its cast, gate and value, silu, product
    vit = tokens * (3 * D * FP32 + (D + 4 * inner) * setting.vae_element)
    tiled = plan.height > height or plan.width > width
    # two rows of tiles, which overlap by about a third
    tiles = 2 * window * height * plan.width * 3 * FP32 * 4 // 3 if tiled else 0
    tiles += setting.tile_batch * window * height * width * 3 * FP32 * 2
    canvas = (window + 5) * frame if tiled else 5 * frame
    clip = (window + 3 * video.clip + 10) * frame
    sound_level = max(
        audio.decoder_dim // 2 ** (stage + 1) * prod(audio.decoder_rates[: stage + 1])
        for stage in range(len(audio.decoder_rates))
    )
    sound = AUDIO_CHANNELS * plan.audio_latents * sound_level * FP32 * 12
    # tiles are small enough for the allocators to keep them, beside what the finished clip then takes
    return max(tiles + max(canvas + vit, clip), sound)


def media_bytes(plan: Plan) -> int:
    """What was read of the references, as bytes on their own canvas and as fitted."""
    pictures = sum(int(RGB) * c.frames * c.height * c.width for c in plan.conditions)
    return 2 * pictures + sum(2 * FP32 * AUDIO_CHANNELS * c.samples for c in plan.conditions)


def encoder_bytes(plan: Plan) -> int:
    """The clip in flight and the frames that the video encoder holds."""
    return int(plan.height * plan.width * (17 * RGB + ENCODER_FRAMES * YUV)) + plan.samples * AUDIO_CHANNELS * FP32
