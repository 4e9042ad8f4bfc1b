"""A checkpoint's sizes from its config files, with H3's values as defaults (SPEC 1.2, 1.5-1.7, 3.3, 4).

A small model declares what the released files leave to the documentation in one optional block of `model_index.json`
(of a partition or of a diffusers root):

    "_twinreel": {
        "hidden_layer": 4,           decoder layers of the conditioner that are run (H3: 50)
        "short_edge": 64,            canvas short edge, pixels (H3: 768)
        "area_cap": 7168,            canvas area cap, pixels (H3: 768 x 1344)
        "reference_edge": 64,        short edge of image references, pixels (H3: 2048)
        "min_seconds": 0.9,          shortest and longest duration (H3: 4 and 15)
        "max_seconds": 6.0,
        "min_clip_seconds": 0.9,     shortest and longest reference clip (H3: 2 and 15; default: within the two above)
        "max_clip_seconds": 6.0,
        "partitions": {"transformer": {"name": "all", "tasks": ["t2va", "fl2va", "ref2va"]}}    diffusers roots only
    }
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..spec import AUDIO_LATENTS_PER_SECOND, FPS, SAMPLE_RATE, DiTSpec, ProcessorSpec, Spec, TextSpec, World
from .config_text import processor_spec, text_spec
from .config_vae import audio_spec, video_spec
from .fields import Fields
from .files import reading
from .locate import SCHEDULERS, Checkpoint
from .recognise import ORIGINAL, Component

LONGEST, SHARPEST = 3600.0, 16384  # seconds of a clip, pixels of a short edge
FP8 = "_twinreel_fp8"
# DiTSpec field -> name in the original and in the diffusers config (SPEC 1.2).
DIT_WHOLES = {
    "hidden": ("hidden_size", "hidden_size"),
    "layers": ("num_layers", "num_layers"),
    "refiner_layers": ("token_refiner_num_layers", "num_refiner_layers"),
    "heads": ("num_attention_heads", "num_attention_heads"),
    "head_dim": ("attention_head_dim", "attention_head_dim"),
    "ffn": ("ffn_hidden_size", "ffn_dim"),
    "video_channels": ("latents_dim", "in_channels"),
    "audio_channels": ("audio_latents_dim", "audio_in_channels"),
    "text_dim": ("text_dim", "text_dim"),
    "freq_dim": ("timestep_input_dim", "freq_dim"),
    "time_hidden": ("time_embed_hidden_size", "time_embed_hidden_dim"),
    "time_dim": ("time_embed_dim", "time_embed_dim"),
    "rope_freqs": ("rope_inv_freq_len", "rope_freq_dim"),
}
DIT_CLASSES = ("MiniMaxH3DiTModel", "MiniMaxH3Transformer3DModel")
DIT_REALS = ("rope_theta", "norm_eps", "qk_norm_eps", "final_norm_eps")
WORLD_FIELDS = (
    *("hidden_layer", "short_edge", "area_cap", "reference_edge", "partitions"),
    *("min_seconds", "max_seconds", "min_clip_seconds", "max_clip_seconds"),
)


def read_spec(checkpoint: Checkpoint) -> Spec:
    """All sizes of a located checkpoint. Raises CheckpointError naming file and field of a value that cannot be."""
    with reading(checkpoint.path):
        return _read(checkpoint)


def _read(checkpoint: Checkpoint) -> Spec:
    block = _twinreel(checkpoint)
    parts = checkpoint.components
    dits = {name: dit_spec(component) for name, component in checkpoint.dits.items()}
    dit = next(iter(dits.values()))
    for name, other in dits.items():
        if other != dit:
            fields = ", ".join(key for key, value in asdict(other).items() if value != asdict(dit)[key])
            raise CheckpointError(
                f"{checkpoint.dits[name].config}: {fields}: differ from {next(iter(checkpoint.dits.values())).config}"
            )
    text = text_spec(parts["text_encoder"].config, block.whole("hidden_layer", TextSpec.hidden_layer))
    processor = processor_spec(parts["processor"].folder) if "processor" in parts else ProcessorSpec()
    spec = Spec(
        dit=dit,
        text=text,
        processor=processor,
        video=video_spec(parts["video_vae"]),
        audio=audio_spec(parts["audio_vae"]),
        world=_world(checkpoint, block),
        partitions=checkpoint.partitions,
    )
    _check_together(checkpoint, spec)
    return spec


def dit_spec(component: Component) -> DiTSpec:
    """DiT sizes from either layout's `config.json` (SPEC 1.2)."""
    fields = Fields(component.config)
    column = 0 if component.layout == ORIGINAL else 1
    default = DiTSpec()
    values: dict[str, Any] = {
        key: fields.whole(names[column], getattr(default, key)) for key, names in DIT_WHOLES.items()
    }
    values |= {name: fields.real(name, getattr(default, name)) for name in DIT_REALS}
    patch = fields.wholes("patch_size", default.patch)
    fields.need(
        len(patch) == 3 and patch[0] == 1 and patch[1] == patch[2],
        "patch_size",
        f"[1, p, p] is needed, got {list(patch)}",
    )
    spec = DiTSpec(patch=(patch[0], patch[1], patch[2]), dtype=fields.dtype(default.dtype), **values)
    spec = replace(spec, fp8_edge=_fp8_edge(component, fields, spec))
    rope, theta = DIT_WHOLES["rope_freqs"][column], 6 * spec.rope_freqs
    fields.need(
        theta <= spec.head_dim,
        rope,
        f"3 axes x 2 x {spec.rope_freqs} = {theta} exceeds attention_head_dim {spec.head_dim}",
    )
    fields.need(
        spec.freq_dim % 2 == 0, DIT_WHOLES["freq_dim"][column], f"an even number is needed, got {spec.freq_dim}"
    )
    fields.need(spec.dtype != "float16", "dtype", "float16 is refused: the DiT's residual passes 65,504")
    for name, factor in (("adaln_out_features", 18), ("final_adaln_out_features", 2)):
        got = fields.whole(name, factor * spec.hidden)
        fields.need(
            got == factor * spec.hidden, name, f"{factor} x hidden_size = {factor * spec.hidden} is needed, got {got}"
        )
    return spec


def dit_config(spec: DiTSpec, layout: str) -> dict[str, Any]:
    """The config that `dit_spec` reads `spec` from, in either layout."""
    column = 0 if layout == ORIGINAL else 1
    sizes = {names[column]: getattr(spec, key) for key, names in DIT_WHOLES.items()}
    reals = {name: getattr(spec, name) for name in DIT_REALS}
    # the public classes know no dtype: it stands there only where it is not the release's
    stored = {} if spec.dtype == DiTSpec().dtype else {"dtype": spec.dtype}
    return {"_class_name": DIT_CLASSES[column], **sizes, **reals, "patch_size": list(spec.patch), **stored}


def _fp8_edge(component: Component, fields: Fields, spec: DiTSpec) -> int | None:
    """The `blocks` of what `twinreel quantize` writes: `"_twinreel_fp8": {"schema_version": 1, "blocks": 2}`."""
    if FP8 not in fields.data:
        return None
    block = fields.block(FP8)
    fields.need(component.layout == ORIGINAL, FP8, "only the original layout has quantized weights")
    block.whole("schema_version", 0, low=1, high=1)
    most = (spec.layers - 1) // 2
    return block.whole("blocks", -1, low=0, high=most)


def _twinreel(checkpoint: Checkpoint) -> Fields:
    """The `_twinreel` blocks of all index files as one; two partitions may repeat a value, never contradict."""
    merged: dict[str, Any] = {}
    first = checkpoint.indexes[0] if checkpoint.indexes else checkpoint.path / "model_index.json"
    for path in checkpoint.indexes:
        block = Fields(path).block("_twinreel")
        for name, value in block.data.items():
            block.need(name in WORLD_FIELDS, name, f"unknown; known are {', '.join(WORLD_FIELDS)}")
            block.need(
                merged.setdefault(name, value) == value, name, f"{value!r} contradicts {merged[name]!r} of {first}"
            )
    return Fields(first, merged, "_twinreel.")


def _world(checkpoint: Checkpoint, block: Fields) -> World:
    default = World()

    def seconds(name: str, given: float) -> float:
        return block.real(name, given, 1 / FPS, LONGEST)

    shortest, longest = seconds("min_seconds", default.min_seconds), seconds("max_seconds", default.max_seconds)
    world = World(
        short_edge=block.whole("short_edge", default.short_edge, high=SHARPEST),
        area_cap=block.whole("area_cap", default.area_cap, high=SHARPEST**2),
        reference_edge=block.whole("reference_edge", default.reference_edge, high=SHARPEST),
        min_seconds=shortest,
        max_seconds=longest,
        min_clip_seconds=seconds("min_clip_seconds", min(default.min_clip_seconds, shortest)),
        max_clip_seconds=seconds("max_clip_seconds", min(default.max_clip_seconds, longest)),
        shifts=_shifts(checkpoint, default.shifts),
    )
    for name, low, high in (
        ("seconds", world.min_seconds, world.max_seconds),
        ("clip_seconds", world.min_clip_seconds, world.max_clip_seconds),
    ):
        block.need(low <= high, f"min_{name}", f"{low} exceeds max_{name} {high}")
    return world


def _shifts(checkpoint: Checkpoint, default: tuple[float, float]) -> tuple[float, float]:
    """Sigma shifts (video, audio): `_minimax_h3.sigma_shift_scales`, or a diffusers root's two scheduler configs. An index
    with neither says nothing of them."""
    found: tuple[float, float] | None = None
    for path in checkpoint.indexes:
        scales = Fields(path).block("_minimax_h3").block("sigma_shift_scales")
        scales.known("video", "audio")
        if schedulers := [Fields(config) for config in scheduler_configs(path)]:
            for scheduler in schedulers:
                scheduler.fixed(_class_name="MiniMaxH3Scheduler")
            pairs = zip(schedulers, ("shift", "shift"), default, strict=True)
        elif scales.data:
            pairs = zip((scales, scales), ("video", "audio"), default, strict=True)
        else:
            continue
        video, audio = (fields.real(name, shift, 0.01, 1000) for fields, name, shift in pairs)
        scales.need(
            found in (None, (video, audio)),
            "video",
            f"({video}, {audio}) contradicts {found} of another partition",
        )
        found = (video, audio)
    return found or default


def scheduler_configs(index: Path) -> tuple[Path, ...]:
    """The configs of a diffusers root that sigma shifts are read from: two, or none."""
    folders = [index.parent / name for name in SCHEDULERS]
    if Fields(index).block("_minimax_h3").block("sigma_shift_scales").data or not any(map(Path.is_dir, folders)):
        return ()
    return tuple(folder / "scheduler_config.json" for folder in folders)


def _check_together(checkpoint: Checkpoint, spec: Spec) -> None:
    """Rules between components: each names the file and field that does not fit."""
    dit = Fields(next(iter(checkpoint.dits.values())).config)
    column = 0 if next(iter(checkpoint.dits.values())).layout == ORIGINAL else 1
    parts = checkpoint.components
    for field, got, wanted, kind in (
        ("text_dim", spec.dit.text_dim, spec.text.hidden, "text_encoder"),
        ("video_channels", spec.dit.video_channels, spec.video.latent_channels, "video_vae"),
        ("audio_channels", spec.dit.audio_channels, spec.audio.latent_channels, "audio_vae"),
    ):
        dit.need(got == wanted, DIT_WHOLES[field][column], f"{got}, but {parts[kind].folder} has {wanted}")
    vision = Fields(parts["text_encoder"].config).block("vision_config")
    for name, value in (
        ("patch_size", spec.processor.patch),
        ("temporal_patch_size", spec.processor.temporal_patch),
        ("spatial_merge_size", spec.processor.merge),
    ):
        vision.need(spec.text.vision[name] == value, name, f"{spec.text.vision[name]}, but the processor has {value}")
    hop = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
    audio = Fields(parts["audio_vae"].config)
    audio.need(spec.audio.hop == hop, "encoder_rates", f"a hop of {hop} samples is needed, got {spec.audio.hop}")
    index = Fields(checkpoint.indexes[0] if checkpoint.indexes else checkpoint.path / "model_index.json", {})
    for name in ("short_edge", "reference_edge"):
        got = getattr(spec.world, name)
        index.need(got >= spec.multiple, f"_twinreel.{name}", f"at least {spec.multiple} is needed, got {got}")
    least = spec.multiple**2
    index.need(spec.world.area_cap >= least, "_twinreel.area_cap", f"at least {least}, got {spec.world.area_cap}")
