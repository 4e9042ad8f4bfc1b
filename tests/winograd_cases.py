"""The video encoder's convolutions by Winograd in fp32, against definitions; the interpreter's and a GPU's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import op_cases as cases
from op_model import Counting
from twinreel.models.video_encoder import VideoEncoder
from twinreel.ops import frames, winograd
from twinreel.spec import VideoVAESpec

# clips, frames, height, width, channels in and out
CONVOLUTIONS = (
    (1, 1, 4, 4, 32, 32),
    (2, 5, 7, 6, 32, 48),
    (1, 4, 5, 9, 16, 256),
    (1, 17, 6, 6, 64, 64),
    (1, 2, 3, 3, 256, 32),
)
STRIPS = 1, 5, 9, 6, 32, 48  # five rows of tiles
# What four inputs are to products, and four products to outputs.
INPUTS = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float64)
OUTPUTS = torch.tensor([[1, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float64)
# Relative L2 to fp64. Seen: 3.5e-7 here, where PyTorch's own is 1.4e-7 to 5.0e-7; 5.4e-7 with 1,024 channels.
BOUND = 8e-7
SPEC = VideoVAESpec(channels=(32, 32, 32, 64, 64, 64), resnets=1)


def make(case: tuple[int, ...], device: str) -> tuple[nn.Conv3d, Tensor]:
    """A convolution with drawn weights, and frames that are padded for it."""
    clips, count, height, width, inputs, outputs = case
    conv = nn.Conv3d(inputs, outputs, 3).to(device).requires_grad_(False)
    conv.weight.copy_(cases.draw(*conv.weight.shape, seed=1, dtype=torch.float32, device=device) / (27 * inputs) ** 0.5)
    conv.bias.copy_(cases.draw(outputs, seed=2, dtype=torch.float32, device=device))
    x = F.silu(cases.draw(clips, inputs, count, height, width, seed=3, dtype=torch.float32, device=device))
    return conv, frames.PLAIN.padded(x, None, (1, 1)).contiguous(memory_format=torch.channels_last_3d)


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check_convolution(case: tuple[int, ...], device: str) -> None:
    """No further from fp64 than `BOUND`, in every value; the stored weight is gone."""
    conv, x = make(case, device)
    exact = F.conv3d(x.double(), conv.weight.double(), conv.bias.double())
    winograd.prepare(conv)
    assert conv.weight is None and list(conv.state_dict()) == ["bias"]
    with Counting() as seen:
        found = winograd.convolve(x, conv)
    assert seen.counts == {"winograd": 1} and found.dtype == torch.float32
    assert found.shape == exact.shape and found.is_contiguous(memory_format=torch.channels_last_3d)
    assert apart(found, exact) < BOUND
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=5e-6 * float(exact.abs().max()))


def check_strips(case: tuple[int, ...], device: str) -> None:
    """Strips of one or two rows of tiles give the bits of the whole, where products do not depend on their row count."""
    conv, x = make(case, device)
    winograd.prepare(conv)
    heights: list[int] = []
    tiles = -(-case[2] // 2), -(-case[3] // 2)

    def multiply(v: Tensor, taps: Tensor, m: Tensor, whole: int, more: int) -> None:
        end = winograd.FIRST * whole
        first = v[: end * case[4]].view(winograd.FIRST, whole, -1).double() @ taps[: winograd.FIRST].double()
        last = v[end * case[4] :].view(-1, whole + more, case[4]).double() @ taps[winograd.FIRST :].double()
        m.copy_(torch.cat([first.flatten(), last.flatten()]))
        heights.append(more // tiles[1])

    row = 4 * winograd.products(case[1]) * sum(case[4:]) * tiles[1]
    made = []
    with mock.patch.object(winograd, "multiply", multiply):
        for rows in (tiles[0], 2, 1):
            with mock.patch.object(winograd, "BUDGET", rows * row):
                made.append(winograd.convolve(x, conv))
    assert heights == [tiles[0], 2, 2, 1, *[1] * tiles[0]]
    assert all(torch.equal(strips, made[0]) for strips in made[1:])


def transform(x: Tensor, matrix: Tensor) -> Tensor:
    """`matrix` along each of the last three dims."""
    return torch.einsum("ai,bj,ck,...ijk->...abc", matrix, matrix, matrix, x)


def check_kernels(case: tuple[int, ...], device: str) -> None:
    """What the products are given, and what is made of what they give, against the definition in fp64."""
    conv, x = make(case, device)
    clips, count, height, width, inputs, outputs = case
    pairs, rows, across = count // 2, -(-height // 2), -(-width // 2)
    winograd.prepare(conv)
    calls: list[tuple[Tensor, Tensor]] = []

    def multiply(v: Tensor, taps: Tensor, m: Tensor, whole: int, more: int) -> None:
        assert (whole, more) == (pairs * rows * across, rows * across)
        m.copy_(cases.draw(m.numel(), seed=4 + len(calls), dtype=torch.float32, device=device))
        calls.append((v, m))

    with mock.patch.object(winograd, "multiply", multiply):
        found = winograd.convolve(x, conv)
    # a frame before the two that are zeros, so that pairs come out even; what lies behind the edges is zeros too
    whole = F.pad(x.double(), (0, 2 * across - width, 0, 2 * rows - height, 1, 2 * pairs + 1 - count))
    tiles = whole.unfold(2, 4, 2).unfold(3, 4, 2).unfold(4, 4, 2)  # clip, channel, pair, row, column, 4, 4, 4
    assert len(calls) == clips
    for clip, (v, m) in enumerate(calls):
        wanted = transform(tiles[clip], INPUTS.to(device)).permute(4, 5, 6, 1, 2, 3, 0).flatten(0, 2).float()
        together = torch.cat([wanted[: winograd.FIRST, 1:].flatten(), wanted[winograd.FIRST :].flatten()])
        torch.testing.assert_close(v, together, rtol=0, atol=4e-6)
        products = torch.zeros(64, pairs + 1, rows, across, outputs, dtype=torch.float64, device=device)
        end = winograd.FIRST * pairs * rows * across * outputs
        products[: winograd.FIRST, 1:] = m[:end].double().view(winograd.FIRST, pairs, rows, across, outputs)
        products[winograd.FIRST :] = m[end:].double().view(-1, pairs + 1, rows, across, outputs)
        cubes = products.unflatten(0, (4, 4, 4)).permute(6, 3, 4, 5, 0, 1, 2)
        made = torch.einsum("ai,bj,ck,ofyxijk->ofaybxc", *[OUTPUTS.to(device)] * 3, cubes)
        made = made.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, 1 : 1 + count, :height, :width]
        exact = made + conv.bias.double().view(-1, 1, 1, 1)
        torch.testing.assert_close(found[clip].double(), exact, rtol=0, atol=2e-5)


def drawn(encoder: VideoEncoder) -> VideoEncoder:
    """`encoder` with weights that keep a forward's variance, by their names."""
    for index, (name, p) in enumerate(sorted(encoder.named_parameters())):
        noise = cases.draw(*p.shape, seed=index, dtype=torch.float32, device=str(p.device))
        norm = ".norm" in name and name.endswith("weight")
        p.data.copy_(1 + 0.1 * noise if norm else noise * (0.3 if p.ndim == 1 else p[0].numel() ** -0.5))
    return encoder


def check_encoder(spec: VideoVAESpec, clip: tuple[int, int, int], device: str) -> tuple[float, float, float]:
    """A whole encoder engages every kernel, its distance to fp64 is a small multiple of the plain one's. Gives that of
    the plain one, that of Winograd's and the one between the two."""
    plain = drawn(VideoEncoder(spec).to(device))
    passes = frames.choose("triton", "fp32", spec.channels, torch.device(device))
    made = VideoEncoder(spec, passes=passes).to(device)
    made.load_state_dict(plain.state_dict())
    made.freeze()
    made.freeze()  # changes nothing
    x = cases.draw(1, 3, *clip, seed=99, dtype=torch.float32, device=device)
    assert torch.get_float32_matmul_precision() == "highest"
    with torch.no_grad(), torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        wanted = plain.encoder(x)
        with Counting() as seen:
            found = made.encoder(x)
        exact = plain.encoder.double()(x.double())
    convolutions = 2 * spec.resnets * len(spec.channels)
    assert seen.counts == {
        "winograd": convolutions + 1,
        "norm_pad_frames": convolutions + 1,
        "pad_frames": sum(time * space > 1 for time, space in zip(spec.time_down, spec.space_down, strict=True)),
    }
    own, far, between = apart(wanted, exact), apart(found, exact), apart(found, wanted.double())
    assert 0 < far < 3 * own and 0 < between < 4 * own, (own, far, between)
    return own, far, between


def check_what_stays_plain() -> None:
    """Strided, narrow and 1x1x1 convolutions keep their weights, and so do those of other kinds of encode."""
    device = torch.device("cpu")
    passes = frames.choose("triton", "fp32", SPEC.channels, device)
    encoder = VideoEncoder(replace(SPEC, channels=(32, 32, 32, 64, 64, 128)), passes=passes)
    encoder.freeze()
    kept = {name.removeprefix("encoder.") for name, p in encoder.named_parameters() if name.endswith("weight")}
    kept = {name for name in kept if ".norm" not in name and not name.startswith("norm")}
    strided = {f"down.{index}.downsample.conv.weight" for index in range(4)}
    wider = {f"down.{index}.block.0.nin_shortcut.weight" for index in (3, 5)}
    assert kept == {"conv_in.weight", "quant_conv.weight", *strided, *wider}
    for kind, dtype in (("tf32", torch.float32), ("fp16", torch.float16)):
        other: Any = VideoEncoder(SPEC, compute=dtype, passes=frames.choose("triton", kind, SPEC.channels, device))
        other.freeze()
        assert not list(other.buffers()) and other.encoder.conv_out.weight.dtype == dtype
