"""The video VAE against diffusers' AutoencoderKLMiniMaxH3: equal bits in float32 on the CPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from diffusers import AutoencoderKLMiniMaxH3  # noqa: E402

from twinreel.models.video_decoder import VideoDecoder  # noqa: E402
from twinreel.models.video_encoder import VideoEncoder  # noqa: E402
from twinreel.spec import VideoVAESpec  # noqa: E402

TINY = VideoVAESpec(
    channels=(32, 32, 32, 64, 64, 64), resnets=1, decoder_layers=2, decoder_heads=4, decoder_head_dim=32
)
RENAMED = (
    (r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block."),
    (r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample."),
    ("conv_shortcut", "nin_shortcut"),
    ("decoder.proj_in", "decoder.x_embedder"),
    (r"attn\.to_out\.0\.", "attn.to_out."),
    (r"ff\.net\.2\.", "ff.w2."),
)


def original_names(tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """diffusers' tensors under the names and in the order that the released original layout gives them."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".to_k." in name or ".to_v." in name:
            continue
        if ".to_q." in name:
            parts = [tensors[name.replace(".to_q.", f".to_{x}.")].unflatten(0, (heads, -1)) for x in "qkv"]
            out[name.replace(".to_q.", ".to_qkv.")] = torch.stack(parts, dim=1).flatten(0, 2)
        elif ".ff.net.0.proj." in name:
            up, gate = tensor.chunk(2)
            out[name.replace("net.0.proj", "w1")] = torch.cat([gate, up])
        else:
            for pattern, replacement in RENAMED:
                name = re.sub(pattern, replacement, name)
            out[name] = tensor.clone()  # both sides own aligned memory: bits may depend on it
    return out


@pytest.fixture(scope="module")
def pair() -> tuple[AutoencoderKLMiniMaxH3, VideoEncoder, VideoDecoder]:
    theirs = AutoencoderKLMiniMaxH3(
        block_out_channels=TINY.channels,
        layers_per_block=TINY.resnets,
        decoder_num_layers=TINY.decoder_layers,
        decoder_num_attention_heads=TINY.decoder_heads,
        decoder_attention_head_dim=TINY.decoder_head_dim,
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in sorted(theirs.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise * (0.3 if tensor.ndim == 1 else tensor[0].numel() ** -0.5))
    tensors = original_names(dict(theirs.state_dict()), TINY.decoder_heads)
    encoder, decoder = VideoEncoder(TINY), VideoDecoder(TINY)
    for module in (encoder, decoder):
        module.load_state_dict({name: tensors.pop(name) for name in module.state_dict()})
    assert not tensors  # every tensor of theirs has one place in ours
    return theirs, encoder, decoder


def pixels(frames: int, height: int, width: int) -> Tensor:
    return torch.randn(1, 3, frames, height, width, generator=torch.Generator().manual_seed(frames))


def latents(length: int, height: int, width: int) -> Tensor:
    return torch.randn(1, 24, length, height, width, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(
    "frames,height,width",
    [(1, 64, 96), (22, 32, 64), (39, 64, 32), (30, 32, 32), (124, 32, 32), (1, 320, 288), (1, 512, 64), (5, 32, 320)],
)
def test_encode_gives_the_same_bits(pair, frames: int, height: int, width: int) -> None:
    theirs, encoder, _ = pair
    x = pixels(frames, height, width)
    with torch.no_grad():
        expected = theirs.encode(x).latent_dist
    mean, std = encoder.encode(x)
    assert torch.equal(mean, expected.mean) and torch.equal(std, expected.std)


@pytest.mark.parametrize(
    "length,height,width",
    [(3, 4, 6), (7, 4, 6), (12, 2, 4), (37, 2, 4), (5, 4, 2), (6, 2, 2), (7, 16, 16), (7, 20, 18), (3, 32, 4)],
)
def test_decode_gives_the_same_bits(pair, length: int, height: int, width: int) -> None:
    theirs, _, decoder = pair
    z = latents(length, height, width)
    with torch.no_grad():
        expected = theirs.decode(z).sample
    assert torch.equal(decoder.decode(z), expected)
