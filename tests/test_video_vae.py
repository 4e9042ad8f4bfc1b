from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from twinreel.models import video_decoder
from twinreel.models.video_decoder import Block, ComputeLinear, VideoDecoder, num_frames, num_windows, rope_table
from twinreel.models.video_encoder import VideoEncoder, num_latents
from twinreel.spec import VideoVAESpec

TINY = VideoVAESpec(
    channels=(32, 32, 32, 64, 64, 64), resnets=1, decoder_layers=2, decoder_heads=4, decoder_head_dim=32
)
H3 = VideoVAESpec()


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in sorted(module.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            norm = "norm" in name and name.endswith("weight")
            scale = 0.3 if tensor.ndim == 1 else tensor[0].numel() ** -0.5
            tensor.copy_(1 + 0.1 * noise if norm else scale * noise)
    return module


def latents(length: int, height: int = 2, width: int = 2) -> Tensor:
    return torch.randn(1, 24, length, height, width, generator=torch.Generator().manual_seed(length))


def test_parameter_counts() -> None:
    modules = VideoEncoder(TINY), VideoDecoder(TINY)
    assert sum(p.numel() for module in modules for p in module.parameters()) == 1_989_208


def test_stored_names_and_shapes_of_the_released_model() -> None:
    with torch.device("meta"):
        encoder, decoder = VideoEncoder(H3), VideoDecoder(H3, torch.float16)
    shapes = {name: tuple(t.shape) for module in (encoder, decoder) for name, t in module.state_dict().items()}
    assert all(t.device.type == "meta" for module in (encoder, decoder) for t in module.state_dict().values())
    assert not list(encoder.buffers()) and not list(decoder.buffers())
    expected = {
        "encoder.conv_in.weight": (128, 3, 3, 3, 3),
        "encoder.down.1.block.0.conv1.weight": (256, 128, 3, 3, 3),
        "encoder.down.1.block.0.nin_shortcut.weight": (256, 128, 1, 1, 1),
        "encoder.down.5.block.1.norm2.bias": (1024,),
        "encoder.down.3.downsample.conv.bias": (512,),
        "encoder.norm_out.weight": (1024,),
        "encoder.conv_out.weight": (48, 1024, 3, 3, 3),
        "quant_conv.weight": (48, 48, 1, 1, 1),
        "post_quant_conv.weight": (24, 24, 1, 1, 1),
        "decoder.x_embedder.weight": (2048, 24),
        "decoder.register_tokens": (1, 4, 2048),
        "decoder.transformer_blocks.35.scale2": (2048,),
        "decoder.transformer_blocks.0.norm1.weight": (2048,),
        "decoder.transformer_blocks.0.attn.to_qkv.weight": (6144, 2048),
        "decoder.transformer_blocks.0.attn.to_out.bias": (2048,),
        "decoder.transformer_blocks.0.ff.w1.weight": (16384, 2048),
        "decoder.transformer_blocks.0.ff.w2.weight": (2048, 8192),
        "decoder.norm_out.bias": (2048,),
        "decoder.proj_out.weight": (3072, 2048),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert {name.split(".")[2] for name in shapes if "nin_shortcut" in name} == {"1", "3", "5"}
    assert {name.split(".")[2] for name in shapes if "downsample" in name} == {"0", "1", "2", "3"}
    per_resnet, per_block = 8, 12
    assert len(shapes) == 4 * 2 + 12 * per_resnet + 3 * 2 + 4 * 2 + 2 + 36 * per_block + 3 + 4


@given(st.integers(0, 60))
def test_frames_and_latents_of_whole_lengths(n: int) -> None:
    assert num_latents(17 * n + 5, H3) == 5 * n + 2
    if n:
        assert num_frames(5 * n + 2, H3) == 17 * n + 5 and num_windows(5 * n + 2, H3) == n


@given(st.integers(3, 400))
def test_every_length_decodes_to_groups_of_one_and_four_fours(latents: int) -> None:
    assert num_frames(latents, H3) == sum(1 if index % 5 == 0 else 4 for index in range(latents))


def test_a_picture_is_one_latent_and_two_latents_are_too_few() -> None:
    assert num_latents(1, H3) == 1
    assert num_windows(3, H3) == 1 and num_windows(2, H3) == num_windows(1, H3) == 0
    with pytest.raises(AssertionError, match="the least is 3"):
        next(VideoDecoder(TINY).clips(latents(2)))


@pytest.mark.parametrize("frames,length", [(1, 1), (5, 2), (22, 7), (40, 12)])
def test_encoded_shapes(frames: int, length: int) -> None:
    mean, std = filled(VideoEncoder(TINY)).encode(torch.zeros(1, 3, frames, 32, 64))
    assert mean.shape == std.shape == (1, 24, length, 2, 4) and num_latents(frames, TINY) == length
    assert mean.dtype == std.dtype == torch.float32 and not mean.requires_grad and not std.requires_grad
    assert (std > 0).all()


@pytest.mark.parametrize("length,parts", [(3, [9]), (7, [17, 5]), (12, [17, 17, 5]), (9, [17, 13]), (11, [17, 17, 1])])
def test_clips_come_in_parts_that_join_to_the_whole(length: int, parts: list[int]) -> None:
    decoder = filled(VideoDecoder(TINY))
    clips = list(decoder.clips(latents(length)))
    assert [clip.shape[2] for clip in clips] == parts and sum(parts) == num_frames(length, TINY)
    assert all(clip.dtype == torch.float32 and not clip.requires_grad for clip in clips)
    assert torch.equal(torch.cat(clips, dim=2), decoder.decode(latents(length)))


def test_an_early_part_does_not_wait_for_later_latents() -> None:
    decoder = filled(VideoDecoder(TINY))
    z = latents(12)
    other = z.clone()
    other[:, :, 7:] = 0.0
    first, changed = next(iter(decoder.clips(z))), list(decoder.clips(other))
    assert torch.equal(first, changed[0])
    assert not torch.equal(list(decoder.clips(z))[1], changed[1])


def test_decoding_memory_does_not_grow_with_length() -> None:
    decoder = filled(VideoDecoder(TINY))

    def most_held(length: int) -> int:
        held = 0
        for clip in decoder.clips(latents(length, 4, 4)):
            del clip
            owned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
            held = max(held, sum(size for size in owned.values() if size > 100_000))
        return held

    def tensors() -> list[Tensor]:
        return [item for item in gc.get_objects() if type(item) is Tensor]

    assert most_held(37) == most_held(12)


@pytest.mark.parametrize("tile_batch", [2, 3])
def test_tile_batches_change_rounding_only(tile_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = video_decoder.ViT.forward

    def counted(self, x, *rest):
        seen.append(x.shape[0])
        return plain(self, x, *rest)

    monkeypatch.setattr(video_decoder.ViT, "forward", counted)
    spec = VideoVAESpec(**{**TINY.__dict__, "tile": 64, "tile_overlap": 16})  # small tiles, for speed
    decoder, z = filled(VideoDecoder(spec)), latents(7, 6, 8)
    single = decoder.decode(z)
    assert seen == [1] * 6
    seen.clear()
    batched = decoder.decode(z, tile_batch)
    assert seen == [tile_batch] * (6 // tile_batch)
    torch.testing.assert_close(single, batched, rtol=1e-4, atol=1e-4)


def test_positions_are_centred_and_the_appended_tokens_stand_still() -> None:
    cos, sin = rope_table((7, 16, 16), H3)
    assert cos.shape == sin.shape == (7 * 16 * 16 + 5, 1, 48) and cos.dtype == torch.float32
    assert (cos[-5:] == 1).all() and (sin[-5:] == 0).all()
    first = 2 * math.pi * (2 * 0.5 / 7 - 1)
    assert sin[0, 0, 0].item() == pytest.approx(math.sin(first), abs=1e-6)
    assert cos[0, 0, 25].item() == pytest.approx(math.cos(first / 100 ** (1 / 8)), abs=1e-6)
    assert torch.equal(cos[..., :24], cos[..., 24:])


def half_decoder(tensors: dict[str, Tensor]) -> VideoDecoder:
    half = VideoDecoder(TINY, torch.float16)
    half.load_state_dict(tensors)
    return half


def test_half_precision_is_close_and_really_half() -> None:
    decoder = filled(VideoDecoder(TINY))
    half, z = half_decoder(decoder.state_dict()), latents(7, 4, 6)
    plain, rough = decoder.decode(z), half.decode(z)
    assert rough.dtype == torch.float32
    error = (rough - plain).abs()
    # fp16 rounds to 2^-12 of a value, a few times a block. Seen: mean 1.5e-4, most 1.4e-3 of the pixels' spread.
    assert 0 < error.mean() < 5e-4 * plain.std() and error.max() < 5e-3 * plain.std()


def test_an_encoder_in_half_precision_is_close_and_says_when_it_is_too_narrow() -> None:
    encoder, half = filled(VideoEncoder(TINY)), VideoEncoder(TINY, compute=torch.float16)
    half.load_state_dict(encoder.state_dict())
    half.freeze()
    assert half.encoder.conv_in.weight.dtype == torch.float16 and half.quant_conv.weight.dtype == torch.float32
    pixels = torch.randn(1, 3, 22, 32, 48, generator=torch.Generator().manual_seed(1))
    (plain, _), (rough, deviation) = encoder.encode(pixels), half.encode(pixels)
    assert rough.dtype == deviation.dtype == torch.float32
    assert 0 < (rough - plain).norm() < 5e-3 * plain.norm()
    with pytest.raises(RuntimeError, match="leave fp16's range .*; use tf32 or fp32"):
        half.encode(pixels * 1e6)


def test_weights_cast_once_give_the_bits_of_weights_cast_at_use() -> None:
    half, z = half_decoder(filled(VideoDecoder(TINY)).state_dict()), latents(7)
    at_use = half.decode(z)
    half.freeze()
    linears = [module for module in half.modules() if isinstance(module, ComputeLinear)]
    assert len(linears) == 8 and all(p.dtype == torch.float16 for linear in linears for p in linear.parameters())
    rest = {id(p) for p in half.parameters()} - {id(p) for linear in linears for p in linear.parameters()}
    assert all(p.dtype == torch.float32 for p in half.parameters() if id(p) in rest)
    assert torch.equal(half.decode(z), at_use)


def test_residual_and_norms_stay_single_in_half_precision() -> None:
    half = half_decoder(filled(VideoDecoder(TINY)).state_dict())
    seen: set[tuple[str, torch.dtype]] = set()
    for module in half.modules():
        if isinstance(module, Block | nn.RMSNorm | nn.LayerNorm | ComputeLinear):
            module.register_forward_hook(lambda m, _, out: seen.add((type(m).__name__, out.dtype)))
    half.decode(latents(7))
    single, double = torch.float32, torch.float16
    assert seen == {("Block", single), ("RMSNorm", single), ("LayerNorm", single), ("ComputeLinear", double)}


def test_meta_construction_needs_nothing_but_the_stored_tensors() -> None:
    made = filled(VideoDecoder(TINY))
    with torch.device("meta"):
        loaded = VideoDecoder(TINY)
    loaded.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, assign=True)
    assert torch.equal(loaded.decode(latents(3)), made.decode(latents(3)))
