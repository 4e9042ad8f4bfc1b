"""The audio VAE against diffusers' AutoencoderKLMiniMaxH3Audio: equal bits in float32 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from diffusers import AutoencoderKLMiniMaxH3Audio  # noqa: E402

from twinreel.models.audio_decoder import AudioDecoder, lowpass_filter  # noqa: E402
from twinreel.models.audio_encoder import AudioEncoder  # noqa: E402
from twinreel.spec import AudioVAESpec  # noqa: E402

TINY = AudioVAESpec(encoder_dim=4, latent_dim=256, decoder_dim=128, attention_heads=2)


@pytest.fixture(scope="module")
def theirs() -> AutoencoderKLMiniMaxH3Audio:
    model = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=TINY.encoder_dim,
        latent_dim=TINY.latent_dim,
        decoder_dim=TINY.decoder_dim,
        num_attention_heads=TINY.attention_heads,
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("weight_g", "norm.weight", "norm1.weight", "norm2.weight", "norm3.weight")):
                tensor.copy_(0.5 + 0.1 * noise)
            else:
                tensor.copy_(0.1 * noise if tensor.ndim == 1 else noise * tensor[0].numel() ** -0.5)
    return model


@pytest.fixture(scope="module", params=["stored", "folded"])
def ours(theirs: AutoencoderKLMiniMaxH3Audio, request: pytest.FixtureRequest) -> tuple[AudioEncoder, AudioDecoder]:
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    encoder, decoder = AudioEncoder(TINY), AudioDecoder(TINY)
    for module in (encoder, decoder):
        module.load_state_dict({name: tensors.pop(name) for name in module.state_dict()})
        if request.param == "folded":
            module.freeze()
            module.freeze()  # changes nothing
        assert any("weight_g" in name for name in module.state_dict()) == (request.param == "stored")
    assert set(tensors) == {"logs_proj.weight", "logs_proj.bias"}
    return encoder, decoder


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("samples,latents", [(1, 1), (800, 2), (801, 3), (16_000, 33), (165_600, 207)])
def test_encode_and_decode_give_the_same_bits(theirs, ours, samples: int, latents: int) -> None:
    encoder, decoder = ours
    waveform, z = 0.3 * noise(samples, 2, samples), noise(latents, 2, TINY.latent_channels, latents)
    with torch.no_grad():
        mean = theirs.encode(waveform.unsqueeze(1)).latent_dist.mode()
        sound = theirs.decode(z).sample.squeeze(1)
    assert 0.01 < sound.abs().mean() < 0.9  # the clamp at 1 must not hide anything
    assert torch.equal(encoder.encode(waveform), mean)
    assert torch.equal(decoder.decode(z), sound)


def test_the_filter_of_a_new_model_is_theirs() -> None:
    fresh = AutoencoderKLMiniMaxH3Audio(encoder_dim=4, latent_dim=32, decoder_dim=128).decoder.activation_post
    assert torch.equal(lowpass_filter(), fresh.upsample.filter)
    assert torch.equal(lowpass_filter(), fresh.downsample.lowpass.filter)
