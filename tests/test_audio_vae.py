from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from twinreel.models.audio_decoder import Activation, AudioDecoder, lowpass_filter
from twinreel.models.audio_encoder import AudioEncoder, CausalAttention, Snake
from twinreel.models.convolution import NormedConv, NormedConvTransposed
from twinreel.spec import AudioVAESpec

TINY = AudioVAESpec(encoder_dim=4, latent_dim=64, decoder_dim=128, attention_heads=2)
H3 = AudioVAESpec()


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_stored_names_and_shapes_of_the_released_model() -> None:
    with torch.device("meta"):
        encoder, decoder = AudioEncoder(H3), AudioDecoder(H3)
    shapes = {name: tuple(t.shape) for module in (encoder, decoder) for name, t in module.state_dict().items()}
    assert all(t.device.type == "meta" for module in (encoder, decoder) for t in module.state_dict().values())
    expected = {
        "encoder.block.0.weight_g": (64, 1, 1),
        "encoder.block.0.weight_v": (64, 1, 7),
        "encoder.block.1.block.2.block.0.alpha": (1, 64, 1),
        "encoder.block.1.block.2.block.1.weight_v": (64, 64, 7),
        "encoder.block.5.block.4.weight_v": (2048, 1024, 10),
        "encoder.block.6.alpha": (1, 2048, 1),
        "encoder.block.7.weight_v": (2048, 2048, 3),
        "pre_block.attn.qkv.weight": (6144, 2048),
        "pre_block.attn.zero_k_bias": (2048,),
        "pre_block.attn.proj.weight": (32, 32),
        "pre_block.proj.weight": (32, 2048),
        "pre_block.mlp.w0.weight": (64, 32),
        "pre_block.mlp.norm.bias": (32,),
        "mean_proj.weight": (32, 32, 1),
        "dec_in_proj.weight": (2048, 32, 1),
        "decoder.conv_pre.weight_v": (1024, 2048, 7),
        "decoder.ups.0.0.weight_g": (1024, 1, 1),
        "decoder.ups.0.0.weight_v": (1024, 512, 9),
        "decoder.ups.6.0.bias": (8,),
        "decoder.resblocks.20.convs1.2.weight_v": (8, 8, 11),
        "decoder.resblocks.0.activations.5.act.beta": (512,),
        "decoder.resblocks.0.activations.0.upsample.filter": (1, 1, 12),
        "decoder.activation_post.downsample.lowpass.filter": (1, 1, 12),
        "decoder.conv_post.weight_v": (1, 8, 7),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert "decoder.conv_post.bias" not in shapes and not any("logs_proj" in name for name in shapes)
    assert "pre_block.attn.qkv.bias" not in shapes


@pytest.mark.parametrize("kind", [NormedConv, NormedConvTransposed])
def test_the_norm_runs_over_all_dims_but_the_first(kind: type[NormedConv]) -> None:
    conv = kind(3, 5, 4, stride=2)
    with torch.no_grad():
        conv.weight_g.copy_(noise(0, *conv.weight_g.shape))
    assert conv.weight_g.shape[0] == (3 if conv.transposed else 5)
    expected = conv.weight_v * (conv.weight_g / conv.weight_v.flatten(1).norm(dim=1).view(-1, 1, 1))
    conv.freeze()
    torch.testing.assert_close(conv.weight.data, expected.detach())
    assert set(conv.state_dict()) == {"weight", "bias"} and not conv.weight.requires_grad


@pytest.mark.parametrize("samples,latents", [(1, 1), (800, 1), (801, 2), (4000, 5)])
def test_encoded_lengths(samples: int, latents: int) -> None:
    encoder = AudioEncoder(TINY)
    mean = encoder.encode(noise(1, 2, samples))
    assert mean.shape == (2, 32, latents) and mean.dtype == torch.float32 and not mean.requires_grad


@pytest.mark.parametrize("latents", [1, 2, 7])
def test_decoded_lengths_and_range(latents: int) -> None:
    decoder = AudioDecoder(TINY)
    with torch.no_grad():
        decoder.decoder.conv_post.weight_g.fill_(1e4)
    sound = decoder.decode(noise(2, 2, 32, latents))
    assert sound.shape == (2, 800 * latents) and sound.dtype == torch.float32 and not sound.requires_grad
    assert sound.abs().max() == 1.0


def test_the_two_channels_do_not_mix() -> None:
    decoder, z = AudioDecoder(TINY), noise(3, 2, 32, 3)
    changed = z.clone()
    changed[1] = 0
    assert torch.equal(decoder.decode(z)[0], decoder.decode(changed)[0])


def test_encoder_fills_up_with_zeros() -> None:
    encoder, sound = AudioEncoder(TINY), noise(4, 2, 1000)
    assert torch.equal(encoder.encode(sound), encoder.encode(nn.functional.pad(sound, (0, 600))))


def test_attention_looks_back_only() -> None:
    attention = CausalAttention(TINY)
    x = noise(5, 1, 6, TINY.latent_dim)
    changed = x.clone()
    changed[:, 4:] = 0
    with torch.no_grad():
        before, after = attention(x), attention(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_the_stored_filter_is_used() -> None:
    activation, x = Activation(3), noise(6, 1, 3, 20)
    with torch.no_grad():
        before = activation(x)
        activation.downsample.lowpass.filter.mul_(2)
        torch.testing.assert_close(activation(x), 2 * before)
        activation.upsample.filter.zero_()
        assert before.abs().max() > 0 and (activation(x) == 0).all()


def test_filter_of_the_spec() -> None:
    filter_ = lowpass_filter()
    assert filter_.shape == (1, 1, 12) and torch.equal(filter_, filter_.flip(-1))
    assert filter_.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_snake_leaves_its_input_alone() -> None:
    snake, x = Snake(3), noise(7, 1, 3, 20)
    kept = x.clone()
    with torch.no_grad():
        y = snake(x)
    assert torch.equal(x, kept)
    torch.testing.assert_close(y, x + torch.sin(x) ** 2)


def test_meta_construction_needs_nothing_but_the_stored_tensors() -> None:
    for kind, value in ((AudioEncoder, noise(8, 2, 900)), (AudioDecoder, noise(9, 2, 32, 2))):
        made = kind(TINY)
        with torch.device("meta"):
            loaded = kind(TINY)
        loaded.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, assign=True)
        loaded.freeze()
        run = "encode" if kind is AudioEncoder else "decode"
        assert torch.equal(getattr(loaded, run)(value), getattr(made, run)(value))
