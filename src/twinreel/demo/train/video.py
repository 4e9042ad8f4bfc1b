"""The video VAE: encoder and decoder together on single decoding windows, then the decoder alone on kept latents."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.video_decoder import Rope, VideoDecoder, lead_frames, rope_table, tail_frames
from ...models.video_encoder import VideoEncoder
from ...spec import VideoVAESpec
from ..data import EVALUATION_SEED, WindowPool, denormalise, encode_video, normalise
from ..fast_encoder import moments
from ..recipe import Recipe, VideoRecipe
from .loop import Piece, Run, Weights, load_means

STEM, DECODER_STEM = "video", "video-decoder"
NOISE = 0.12  # the posterior's deviation, fixed: what the decoder is to bear, in units in which means are free to grow


class VideoVAE(nn.Module):
    """Encoder and decoder over windows of 22 frames, as `VideoDecoder.clips` cuts them."""

    def __init__(self, spec: VideoVAESpec, device: torch.device) -> None:
        super().__init__()
        cuda = device.type == "cuda"
        self.spec = spec
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.encoder = VideoEncoder(spec)
        self.decoder = VideoDecoder(spec, self.dtype)
        start(self)
        self.encoder.to(self.dtype)
        self.to(device)

    def encode(self, pixels_BFHWC: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 windows -> mean and log variance [B, C, 7, h, w] float32."""
        x = normalise(pixels_BFHWC, self.dtype)
        parts = (x[:, : self.spec.clip], x[:, self.spec.clip :])
        mean, logvar = torch.cat([moments(self.encoder, part) for part in parts], dim=2).chunk(2, dim=1)
        return mean, logvar

    def decode(self, z_BCThw: Tensor, rope: Rope) -> Tensor:
        """Latents of a window -> its 22 frames [B, 3, 22, H, W] in [0, 1], padding frames dropped."""
        spec, decoder = self.spec, self.decoder
        x = decoder.decoder(decoder.post_quant_conv(z_BCThw), rope)
        period, lead = spec.clip_latents * spec.time, lead_frames(spec)
        return denormalise(torch.cat([x[:, :, lead:period], x[:, :, period + lead :]], dim=2))


def start(vae: VideoVAE) -> None:
    """First values: residual branches quiet, the decoder's branch scales small instead of zero."""
    for name, p in vae.named_parameters():
        if name.endswith(("scale1", "scale2")):
            nn.init.constant_(p, 0.2)
        elif name.endswith("register_tokens"):
            nn.init.normal_(p, std=0.02)
        elif name.endswith("conv2.weight"):
            p.data.mul_(0.5)


def window_rope(vae: VideoVAE, canvas: tuple[int, int], device: torch.device) -> Rope:
    """The decoder's rotation for windows of a canvas (width, height), which is one tile."""
    spec = vae.spec
    length = 2 * spec.clip_latents - spec.token_drop
    assert max(canvas) <= spec.tile and lead_frames(spec) + tail_frames(spec) < spec.clip
    cos, sin = rope_table((length, canvas[1] // spec.space, canvas[0] // spec.space), spec)
    return cos.to(device, vae.dtype), sin.to(device, vae.dtype)


def picture_loss(out_BCFHW: Tensor, target_BCFHW: Tensor, recipe: VideoRecipe) -> tuple[Tensor, Tensor]:
    """Loss and the plain mean square error: L1 and squares with weight on coloured pixels, and L1 of differences."""
    error = out_BCFHW - target_BCFHW
    with torch.no_grad():
        # Backgrounds are grey, so colour marks the things; the margin takes their outlines in.
        colour = (target_BCFHW.amax(1) - target_BCFHW.amin(1) > 0.1).to(torch.bfloat16)
        margin = F.max_pool2d(colour, 7, 1, 3).float().unsqueeze(1)
        weight = 1.0 + recipe.emphasis * margin
    square = error.square()
    loss = (weight * (error.abs() + recipe.squares * square)).mean()
    slopes = (error.diff(dim=-1) * weight[..., 1:]).abs().mean() + (
        error.diff(dim=-2) * weight[..., 1:, :]
    ).abs().mean()
    return loss + recipe.edges * slopes, square.mean()


def matrices(weights: Weights) -> list[str]:
    """The decoder blocks' matrices, for Muon."""
    return [name for name, p in weights.masters.items() if "transformer_blocks" in name and p.ndim == 2]


def train(recipe: Recipe, piece: Piece, device: torch.device) -> None:
    """One piece of the joint run; leaves `video.safetensors`, `video-mean.safetensors` and `video.jsonl`."""
    settings = recipe.video
    vae = VideoVAE(recipe.spec.video, device)
    weights = Weights({"vae": vae})
    run = Run(STEM, piece, settings.pace, weights, matrices(weights))
    canvases = tuple(dict.fromkeys(settings.canvases))
    pools = {canvas: WindowPool(canvas, settings.scenes, device, run.total * 10_000) for canvas in canvases}
    ropes = {canvas: window_rope(vae, canvas, device) for canvas in canvases}
    for _ in run:
        canvas = settings.canvases[run.total % len(settings.canvases)]
        pixels = pools[canvas].draw(settings.pace.batch)
        mean, logvar = vae.encode(pixels)
        z = mean + NOISE * torch.randn_like(mean)
        loss, mse = picture_loss(vae.decode(z, ropes[canvas]), pixels.permute(0, 4, 1, 2, 3).float() / 255.0, settings)
        # Kullback-Leibler with a pinned deviation: what is left is the means' size; the stored deviation says the pin.
        size = mean.square().mean()
        pinned = (logvar - 2 * math.log(NOISE)).square().mean()
        run.learn(loss + settings.kl * size + 1e-3 * pinned, mse=mse, size=size)
    weights.use_mean()
    run.log.write(step=run.total, **check(vae, settings, device))


def train_decoder(recipe: Recipe, piece: Piece, device: torch.device) -> None:
    """One piece of the decoder's own run over a frozen encoder: windows and latents are made once and kept."""
    settings = recipe.video
    vae = VideoVAE(recipe.spec.video, device)
    load_means(piece.folder / f"{STEM}-mean.safetensors", "vae/", vae)
    vae.encoder.requires_grad_(False)
    weights = Weights({"decoder": vae.decoder})
    begin = time.monotonic()
    run = Run(DECODER_STEM, piece, settings.decoder_pace, weights, matrices(weights))
    seed = 500_000 + 10 * run.total  # every piece has windows of its own
    shelves = {canvas: _keep(vae, canvas, settings, device, seed) for canvas in dict.fromkeys(settings.canvases)}
    run.hurry(time.monotonic() - begin)
    run.log.write(kept_seconds=time.monotonic() - begin)
    ropes = {canvas: window_rope(vae, canvas, device) for canvas in shelves}
    for _ in run:
        canvas = settings.canvases[run.total % len(settings.canvases)]
        pixels, means = shelves[canvas]
        rows = torch.randint(len(pixels), (settings.decoder_pace.batch,), device=device)
        mean = means[rows].float()
        z = mean + NOISE * torch.randn_like(mean)
        target = pixels[rows].permute(0, 4, 1, 2, 3).float() / 255.0
        loss, mse = picture_loss(vae.decode(z, ropes[canvas]), target, settings)
        run.learn(loss, mse=mse)
    weights.use_mean()
    run.log.write(step=run.total, **check(vae, settings, device))


@torch.no_grad()
def _keep(
    vae: VideoVAE, canvas: tuple[int, int], settings: VideoRecipe, device: torch.device, first_seed: int
) -> tuple[Tensor, Tensor]:
    """Windows uint8 [n, 22, H, W, 3] and their means float16."""
    pool = WindowPool(canvas, settings.scenes, device, first_seed=first_seed)
    size = min(64, settings.kept)
    pixels, means = [], []
    for _ in range(settings.kept * settings.canvases.count(canvas) // size):
        part = pool.draw(size)
        pixels.append(part)
        means.append(encode_video(vae.encoder, part).half())
    return torch.cat(pixels), torch.cat(means)


@torch.no_grad()
def check(vae: VideoVAE, settings: VideoRecipe, device: torch.device) -> dict[str, float]:
    """PSNR of unseen windows, the mean and the tenth percentile over windows, by canvas; and the latents' size."""
    facts: dict[str, float] = {}
    for canvas in dict.fromkeys(settings.canvases):
        count = settings.unseen
        pool = WindowPool(canvas, count, device, EVALUATION_SEED)
        rope, found = window_rope(vae, canvas, device), []
        for _ in range(max(1, count // 32)):
            pixels = pool.draw(min(count, 32))
            mean, _ = vae.encode(pixels)
            out = vae.decode(mean, rope).clamp(0, 1)
            mse = (out - pixels.permute(0, 4, 1, 2, 3).float() / 255.0).square().mean((1, 2, 3, 4))
            found.append(-10 * torch.log10(mse))
        psnr = torch.cat(found)
        name = f"{canvas[0]}x{canvas[1]}"
        facts |= {f"psnr_{name}": float(psnr.mean()), f"psnr10_{name}": float(psnr.quantile(0.1))}
        facts["spread"] = float(mean.std())
    return facts
