"""Predicted peak memory of every stage, from sizes alone. Estimates: allocators, kernels and libraries add their own.

The counts below name what is alive at the fullest moment; `tests/test_estimate.py` holds them to measured peaks.
Bytes everywhere; `S` packed rows, `L` prompt tokens, `P` patches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from ..config import MODES
from ..plan import Condition, Plan
from ..precision import Fp8, running
from ..spec import AUDIO_CHANNELS, Spec
from ..weights.files import BYTES
from ..weights.keymap import E4M3, LAYERS, MODULES, NARROW_ROWS, Stored, stored_tensors

FP32 = 4
PROCESS = {"cpu": 560 << 20, "cuda": 2560 << 20}  # Python, PyTorch and its libraries in host memory
CUDA_OWN = 640 << 20  # what the driver and the libraries keep of a device
SLOTS = 2  # layers on the device, and of mapped ones in host memory, where a part runs layer by layer
ENCODER_FRAMES = 64  # frames that the video encoder looks ahead and refers to
RGB, YUV = 3.0, 1.5  # bytes of a pixel
WINOGRAD_STRIP = 1 << 30  # `ops.winograd.BUDGET`
# Linears of the video decoder whose weights take the dtype of their products.
_COMPUTE = re.compile(r"\.(to_qkv|to_out|w1|w2)\.")
# Linears of which each rank has its share; whatever else the DiT and the conditioner have is whole on every rank.
_DEALT = re.compile(r"attn\.(qkv|out|q|k|v|o)_proj\.weight$|mlp\.(fc1|fc2|gate_proj|up_proj|down_proj)\.weight$")


@dataclass(frozen=True)
class Setting:
    """How the parts run: `device` cpu or cuda, bytes of an element of DiT and conditioner, and of the video decoder's
    products, tiles a call of that decoder, the residency, `adaln` live or precompute, the table of ops, rows at a time,
    ranks over which rows (`sp`), the DiT's heads (`tp`) and the conditioner's heads (`text`) are dealt out, or its weights
    spread (`stored`); what of the DiT runs in fp8; how the video encoder runs (`vae_encode`)."""

    device: str
    element: int
    vae_element: int
    tile_batch: int
    residency: str
    adaln: str = "live"
    ops: str = "reference"
    row_chunk: int = 0
    sp: int = 1
    tp: int = 1
    text: int = 1
    stored: int = 1
    fp8: Fp8 | None = None
    encode: str = "fp32"

    def winograd(self, spec: Spec) -> bool:
        """Whether the video encoder's convolutions are Winograd's: see `ops.frames.choose`."""
        return self.ops == "triton" and self.encode == "fp32" and not any(c & (c - 1) for c in spec.video.channels)


@dataclass(frozen=True)
class Weights:
    """One part's weights on the device: in use, at the fullest moment of loading; its largest stored tensor and all as
    stored; and what lies in host memory, layers or the two that are on their way."""

    kept: int
    loading: int
    largest: int
    stored: int
    host: int = 0


def part_weights(spec: Spec, part: str, setting: Setting) -> Weights:
    """Bytes of the part called `part` (`dit:ref2va`, `video_decoder`, ...) in the dtypes it runs in."""
    name = part.partition(":")[0]
    rows, stored = _rows(spec, name), [prod(row.shape) * BYTES[row.dtype] for row in _rows(spec, name)]
    twice = 0  # bytes of an element that a quantized linear's other weights have
    if name == "dit" and setting.fp8 is not None:
        rows = _rows(replace(spec, dit=running(spec.dit, setting.fp8)), name)
        twice = setting.element if setting.fp8.steps else 0

    def kept(row: Stored) -> int:
        if row.dtype == E4M3:
            return BYTES[E4M3] + twice
        if name == "video_decoder" and _COMPUTE.search(row.parameter):
            return setting.vae_element
        return FP32 if row.island else setting.element

    ranks = {"dit": setting.tp, "text_encoder": setting.text}.get(name, 1)

    def count(row: Stored) -> int:
        return prod(row.shape) // (ranks if _DEALT.search(row.parameter) else 1)

    total = sum(count(row) * kept(row) for row in rows)
    # the decoder's weights arrive in fp32 and are cast afterwards
    arriving = sum(count(row) * (FP32 if row.island else setting.element) for row in rows)
    if name == "dit" and setting.fp8 is not None:
        # the last whole tensor with, in fp32, three copies of the rows that are being quantized
        arriving = total + max(stored) + 3 * FP32 * NARROW_ROWS * max(spec.dit.ffn, spec.dit.inner, spec.dit.hidden)
    if name == "video_encoder" and setting.winograd(spec):
        # 64 values stand for 27; while they are made, quarters of the largest weight in fp64
        total += sum(prod(row.shape) * 37 // 27 * FP32 for row in rows if _becomes_winograd(row))
        arriving = total + 4 * max(stored)
    # it arrives whole; what it uses is gathered, layers two at a time
    if name == "text_encoder" and setting.stored > 1:
        layers = _layer_bytes(rows, LAYERS[name], kept)
        total = total // setting.stored + total - sum(layers) + sum(sorted(layers)[-SLOTS:])
    mode, host = MODES[setting.residency], 0
    if mode.streams(part):
        layers = _layer_bytes(rows, LAYERS[name], kept)
        slots = sum(sorted(layers)[-SLOTS:])
        host = slots if mode.mapped else sum(layers)
        total += slots - sum(layers)
        arriving = total
    return Weights(total, max(total, arriving), max(stored), sum(stored), host)


def _rows(spec: Spec, module: str) -> list[Stored]:
    return [row for row in stored_tensors(MODULES[module], "original", spec).values() if row.module == module]


def _becomes_winograd(row: Stored) -> bool:
    """Whether `ops.winograd.prepare` takes this weight: 3x3x3 of stride 1, channels a power of two."""
    cube = row.shape[2:] == (3, 3, 3) and "downsample" not in row.parameter
    return cube and not row.shape[1] & (row.shape[1] - 1)


def _layer_bytes(rows: Sequence[Stored], prefix: str, kept: Callable[[Stored], int]) -> list[int]:
    found = Counter[str]()
    for row in rows:
        if row.parameter.startswith(prefix):
            found[row.parameter.removeprefix(prefix).partition(".")[0]] += prod(row.shape) * kept(row)
    return list(found.values())


def table_weights(plan: Plan, spec: Spec, setting: Setting) -> Weights:
    """The modulation of all steps as tables, which are made one projection at a time."""
    live = part_weights(spec, f"modulation:{plan.partition}", replace(setting, residency="all"))
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


def estimate(
    plan: Plan, rows: Mapping[str, int], spec: Spec, setting: Setting, there: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Per stage: bytes of `weights`, of `work` beside them, and the peaks `device` and `host` (one peak on a CPU).

    `rows` counts the packed rows of kind `text`, `video` and `audio`. `there` names parts that an earlier request has
    left on the device. Tables of other schedules are not counted: they get what is left (`Choice.spare`).
    """

    def is_tables(part: str) -> bool:
        return setting.adaln == "precompute" and part.startswith("modulation:")

    @cache
    def weigh(part: str) -> Weights:
        return table_weights(plan, spec, setting) if is_tables(part) else part_weights(spec, part, setting)

    work = {
        "encode": encode_work(plan, rows["text"], spec, setting),
        "denoise": denoise_work(rows, spec, setting),
        "decode": decode_work(plan, spec, setting),
    }
    made: dict[str, dict[str, int]] = {}
    # `before`: weights that stay from earlier stages and requests
    mode, before = MODES[setting.residency], sum(weigh(part).kept for part in there)
    hosted = 0  # layers and tables of earlier stages
    for stage, parts in stage_parts(plan).items():
        weights = [weigh(part) for part in parts if part not in there]
        kept = before + sum(part.kept for part in weights)
        peak = max(kept + work[stage], before + _loading(weights))
        largest = max((part.largest for part in weights), default=0)
        host = PROCESS[setting.device] + media_bytes(plan) + hosted + sum(part.host for part in weights)
        if stage == "decode":  # page-locked memory comes in powers of two
            leaving = leaving_bytes(plan, spec, setting)
            host += encoder_bytes(plan) + (2 << (leaving - 1).bit_length() if leaving else 0)
        if setting.device == "cpu":
            peak = max(peak, before + _loading(weights) + largest) + host
            made[stage] = {"weights": kept, "work": work[stage], "host": peak}
        else:
            made[stage] = {"weights": kept, "work": work[stage], "device": peak + CUDA_OWN, "host": host + largest}
        before += sum(weigh(part).kept for part in parts if mode.keeps(part) and part not in there)
        hosted += sum(part.host for part in weights) if mode.keep else 0  # where parts take turns, these make room
        hosted += sum(weigh(part).kept for part in parts if is_tables(part) and not mode.keeps(part))
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
            peaks.append(pixels_work(condition, spec, setting))
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


def pixels_work(condition: Condition, spec: Spec, setting: Setting) -> int:
    """One picture or clip through the video encoder: its pixels, and one tile at the first, widest level."""
    video = spec.video
    frames = min(condition.vae_frames, video.clip)
    area = min(condition.height, video.tile) * min(condition.width, video.tile)
    pixels = condition.vae_frames * condition.height * condition.width * 3 * FP32
    # residual, output, its copy and a norm's; the input padded by two frames, and the convolution's copy of that
    wide = (4 * frames + 2 * (frames + 2)) * area * video.channels[0] * FP32
    if setting.winograd(spec):  # residual, input, output; the padded input; a strip of products, each of 2x2 pixels
        strip = (64 * (frames // 2) + 16) * area // 4 * 2 * video.channels[0] * FP32
        wide = (4 * frames + 2) * area * video.channels[0] * FP32 + min(WINOGRAD_STRIP, strip)
    return 2 * pixels + wide


def denoise_work(rows: Mapping[str, int], spec: Spec, setting: Setting) -> int:
    """One block over all packed rows at its fullest, beside what lives through all steps."""
    dit, element, total = spec.dit, setting.element, -(-sum(rows.values()) // setting.sp)
    D, inner, ffn = dit.hidden, dit.inner // setting.tp, dit.ffn // setting.tp
    # residual and input; qkv 3, normalised q and k 2, rotated q 1, and k in rotation 1.75
    attend = 2 * D + 7.75 * inner
    # the residual before and after attention, the input; gate and value 2, silu 1, product 1
    feed = 3 * D + 4 * ffn
    if setting.ops != "reference":  # one pass each: no temporaries between the products
        # residual and input; qkv 3, normalised q and k 2, output 1
        attend, feed = 2 * D + 6 * inner, 3 * D + 3 * ffn
    if setting.sp > 1:  # q, k and v as sent and as arrived; attention's output, the same back here and merged
        attend = max(attend, 2 * D + 9 * inner)
    attend += 1.5 * inner if setting.fp8 is not None else 0  # q, k and v once more, in e4m3
    chunk = setting.row_chunk
    if 0 < chunk < total:  # q, k, v and the output, whole; the output of the feed-forward; a chunk of the rest
        attend = 2 * D + 4 * inner + (attend - 2 * D) * chunk // total
        feed = 4 * D + (feed - 3 * D) * chunk // total
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
    ranks = setting.sp * setting.tp
    held = 2 if ranks == 1 else 2 * ranks + 1  # over several ranks two rounds of calls, one of them on its way
    tiles += setting.tile_batch * window * height * width * 3 * FP32 * held
    canvas = (window + 5) * frame if tiled else 5 * frame
    clip = (window + 3 * video.clip + 10) * frame
    sound_level = max(
        audio.decoder_dim // 2 ** (stage + 1) * prod(audio.decoder_rates[: stage + 1])
        for stage in range(len(audio.decoder_rates))
    )
    sound = AUDIO_CHANNELS * plan.audio_latents * sound_level * FP32 * 12
    # tiles are small enough for the allocators to keep them, beside what the finished clip then takes
    return max(tiles + max(canvas + vit, clip) + leaving_bytes(plan, spec, setting), sound)


def leaving_bytes(plan: Plan, spec: Spec, setting: Setting) -> int:
    """The clip before, as bytes, on its way off a CUDA device; the host has two such in page-locked memory."""
    return int(RGB) * spec.video.clip * plan.height * plan.width if setting.device == "cuda" else 0


def media_bytes(plan: Plan) -> int:
    """What was read of the references, as bytes on their own canvas and as fitted."""
    pictures = sum(int(RGB) * c.frames * c.height * c.width for c in plan.conditions)
    return 2 * pictures + sum(2 * FP32 * AUDIO_CHANNELS * c.samples for c in plan.conditions)


def encoder_bytes(plan: Plan) -> int:
    """The clip in flight and the frames that the video encoder holds."""
    return int(plan.height * plan.width * (17 * RGB + ENCODER_FRAMES * YUV)) + plan.samples * AUDIO_CHANNELS * FP32
