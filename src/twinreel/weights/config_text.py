"""Sizes of the conditioner and its processors from their config files (SPEC 3.3-3.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..spec import ProcessorSpec, TextSpec
from .fields import Fields

VISION_WHOLES = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
MOST_PIXELS = 2**27
# What a processor's config may say of its own steps; ours has these and no switch for them.
PIXEL_STEPS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": (False, None),
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def text_spec(path: Path, hidden_layer: int) -> TextSpec:
    """Conditioner sizes and special token ids from its `config.json` (SPEC 3.4, 3.5)."""
    top = Fields(path)
    text, default = top.block("text_config"), TextSpec()
    top.fixed(model_type="qwen3_vl")
    text.fixed(model_type="qwen3_vl_text", hidden_act="silu", attention_bias=False)
    rope = _rope(text)
    section = rope.wholes("mrope_section", default.mrope_section)
    head_dim = text.whole("head_dim", default.head_dim)
    # h and w take every third frequency, so no section of theirs may be longer than a third
    fits = len(section) == 3 and sum(section) * 2 == head_dim and max(section[1:]) * 6 <= head_dim
    rope.need(
        fits,
        "mrope_section",
        f"3 numbers with sum head_dim / 2 = {head_dim / 2:g}, the last two at most a third of it, are needed, "
        f"got {list(section)}",
    )
    spec = TextSpec(
        hidden=text.whole("hidden_size", default.hidden),
        intermediate=text.whole("intermediate_size", default.intermediate),
        layers=text.whole("num_hidden_layers", default.layers),
        hidden_layer=hidden_layer,
        heads=text.whole("num_attention_heads", default.heads),
        kv_heads=text.whole("num_key_value_heads", default.kv_heads),
        head_dim=head_dim,
        vocab=text.whole("vocab_size", default.vocab),
        norm_eps=text.real("rms_norm_eps", default.norm_eps),
        rope_theta=(rope if "rope_theta" in rope.data else text).real("rope_theta", default.rope_theta),
        mrope_section=(section[0], section[1], section[2]),
        tied_embeddings=top.truth("tie_word_embeddings", text.truth("tie_word_embeddings", default.tied_embeddings)),
        vision=_vision(top),
        image_token=top.whole("image_token_id", default.image_token, low=0),
        video_token=top.whole("video_token_id", default.video_token, low=0),
        vision_start_token=top.whole("vision_start_token_id", default.vision_start_token, low=0),
        vision_end_token=top.whole("vision_end_token_id", default.vision_end_token, low=0),
        dtype=text.dtype(top.dtype(default.dtype)),
    )
    _check_text(top, text, spec)
    return spec


def _rope(text: Fields) -> Fields:
    """The rotary block under its newer or its older name; a file may repeat it under both."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.block(name)
        rope.fixed(rope_type="default", type=("default", "mrope"), mrope_interleaved=True, partial_rotary_factor=1.0)
        for field, value in text.block("rope_scaling").data.items():
            rope.need(rope.data.get(field, value) == value, field, "contradicts rope_scaling")
    return text.block("rope_parameters" if text.data.get("rope_parameters") else "rope_scaling")


def _check_text(top: Fields, text: Fields, spec: TextSpec) -> None:
    text.need(
        spec.heads % spec.kv_heads == 0, "num_key_value_heads", f"{spec.kv_heads} do not divide {spec.heads} heads"
    )
    text.need(spec.head_dim % 2 == 0, "head_dim", f"an even number is needed, got {spec.head_dim}")
    text.need(
        spec.hidden_layer <= spec.layers,
        "num_hidden_layers",
        f"{spec.layers} layers, but layer {spec.hidden_layer}'s output is used; "
        "a smaller model sets _twinreel.hidden_layer in model_index.json",
    )
    taken: list[int] = []
    for name in ("image_token", "video_token", "vision_start_token", "vision_end_token"):
        value = getattr(spec, name)
        top.need(value < spec.vocab, f"{name}_id", f"{value} is outside of vocab_size {spec.vocab}")
        top.need(value not in taken, f"{name}_id", f"{value} is the id of another vision token too")
        taken.append(value)
    _check_vision(top.block("vision_config"), spec)


def _vision(top: Fields) -> dict[str, Any]:
    """What the vision tower is built from: every size and the activation, and nothing else of the block."""
    fields = top.block("vision_config")
    fields.fixed(hidden_act="gelu_pytorch_tanh", model_type=("qwen3_vl", "qwen3_vl_vision"))
    block: dict[str, Any] = {name: fields.whole(name, default) for name, default in VISION_WHOLES.items()}
    block["deepstack_visual_indexes"] = list(fields.wholes("deepstack_visual_indexes", (8, 16, 24), low=0, most=64))
    block["out_hidden_size"] = fields.whole("out_hidden_size", TextSpec.hidden)
    return block | {"hidden_act": "gelu_pytorch_tanh"}


def _check_vision(fields: Fields, spec: TextSpec) -> None:
    vision = spec.vision
    indexes, depth, width, heads = (
        vision["deepstack_visual_indexes"],
        vision["depth"],
        vision["hidden_size"],
        vision["num_heads"],
    )
    fields.need(width % heads == 0, "num_heads", f"{heads} does not divide hidden_size {width}")
    fields.need(width // heads % 4 == 0, "num_heads", f"a head of {width // heads} is no multiple of 4 (2-D rotary)")
    fields.need(max(indexes) < depth, "deepstack_visual_indexes", f"{indexes} reach beyond depth {depth}")
    fields.need(indexes == sorted(set(indexes)), "deepstack_visual_indexes", f"{indexes}: ascending is needed")
    fields.need(
        len(indexes) <= spec.hidden_layer,
        "deepstack_visual_indexes",
        f"{len(indexes)} features, but {spec.hidden_layer} decoder layers are run",
    )
    out = vision["out_hidden_size"]
    fields.need(out == spec.hidden, "out_hidden_size", f"{out} is not text_config.hidden_size {spec.hidden}")
    count = vision["num_position_embeddings"]
    fields.need(round(count**0.5) ** 2 == count, "num_position_embeddings", f"a square number is needed, got {count}")
    fields.need(vision["in_channels"] == 3, "in_channels", f"3 is needed, got {vision['in_channels']}")


def processor_spec(folder: Path) -> ProcessorSpec:
    """The conditioner's pixel budgets from `preprocessor_config.json`, `video_preprocessor_config.json` (SPEC 3.3)."""
    default = ProcessorSpec()
    image = Fields(folder / "preprocessor_config.json")
    video = Fields(folder / "video_preprocessor_config.json")
    kinds = "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"
    image.fixed(image_processor_type=kinds, **PIXEL_STEPS)
    video.fixed(video_processor_type="Qwen3VLVideoProcessor", **PIXEL_STEPS)
    size = image.block("size")
    video_size = video.block("size")
    lowest = {"image_mean": -1e6, "image_std": 1e-6}
    mean, std = (
        (image.reals(name, 3, lowest[name]) if name in image.data else fallback)
        for name, fallback in (("image_mean", default.mean), ("image_std", default.std))
    )

    def pixels(block: Fields, name: str, older: int) -> int:
        return block.whole(name, older, high=MOST_PIXELS)

    spec = ProcessorSpec(
        patch=image.whole("patch_size", default.patch),
        temporal_patch=image.whole("temporal_patch_size", default.temporal_patch),
        merge=image.whole("merge_size", default.merge),
        image_min_pixels=pixels(size, "shortest_edge", pixels(image, "min_pixels", default.image_min_pixels)),
        image_max_pixels=pixels(size, "longest_edge", pixels(image, "max_pixels", default.image_max_pixels)),
        video_min_pixels=pixels(video_size, "shortest_edge", pixels(video, "min_pixels", default.video_min_pixels)),
        video_max_pixels=pixels(video_size, "longest_edge", pixels(video, "max_pixels", default.video_max_pixels)),
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
    )
    size.need(spec.image_min_pixels <= spec.image_max_pixels, "shortest_edge", "exceeds longest_edge")
    video_size.need(spec.video_min_pixels <= spec.video_max_pixels, "shortest_edge", "exceeds longest_edge")
    for name, value in (
        ("patch_size", spec.patch),
        ("temporal_patch_size", spec.temporal_patch),
        ("merge_size", spec.merge),
    ):
        video.need(video.whole(name, value) == value, name, f"{value} as in preprocessor_config.json is needed")
    for name, triple in (("image_mean", spec.mean), ("image_std", spec.std)):
        video.need(
            name not in video.data or video.reals(name, 3) == triple, name, "must equal preprocessor_config.json's"
        )
    return spec
