"""The video VAE's decoder: a ViT over 7-latent windows and 256-pixel tiles, streamed clip by clip (SPEC 1.5, 8.2, 8.3).

Shapes: `B` batch (of tiles), `C` channels, `T`, `h`, `w` latents, `N` tokens of a tile, `D` width, `H` heads,
`d` head dim, `R` rotated dims of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinreel.ops.vit import PLAIN, VitOps
from twinreel.parallel import Axis
from twinreel.parallel.tiles import TileGrid, cross_fade, map_tiles, split_canvas, stitch
from twinreel.spec import VideoVAESpec

PIXEL_CHANNELS = 3
Rope = tuple[Tensor, Tensor]
Tiling = tuple[TileGrid, Rope]


class ComputeLinear(nn.Linear):
    """A linear layer whose product runs in `compute`; its weights are cast at use, or once by `freeze`."""

    def __init__(self, inputs: int, outputs: int, compute: torch.dtype) -> None:
        super().__init__(inputs, outputs)
        self.compute = compute

    def freeze(self) -> None:
        """Keep the weights in the dtype of the product: the bits of a cast at use, without its time or memory."""
        self.to(self.compute)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.compute), self.weight.to(self.compute), self.bias.to(self.compute))


class Attention(nn.Module):
    """Full attention over the tokens of a tile; q and k are normalised per head in float32, then rotated."""

    def __init__(self, spec: VideoVAESpec, compute: torch.dtype, ops: VitOps) -> None:
        super().__init__()
        self.ops = ops
        self.head_dim, self.eps = spec.decoder_head_dim, spec.decoder_norm_eps
        width = spec.decoder_heads * spec.decoder_head_dim
        self.to_qkv = ComputeLinear(width, 3 * width, compute)
        self.to_out = ComputeLinear(width, width, compute)

    def forward(self, x_BND: Tensor, rope: Rope) -> Tensor:
        qkv_BNH3d = self.to_qkv(x_BND).unflatten(2, (-1, 3, self.head_dim))
        qk_BNH2d = F.rms_norm(qkv_BNH3d[:, :, :, :2].float(), (self.head_dim,), eps=self.eps)
        q, k = self.ops.rotate_heads(qk_BNH2d, rope)
        q, k, v = (y.transpose(1, 2) for y in (q, k, qkv_BNH3d[:, :, :, 2]))
        out_BHNd = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out_BHNd.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU; `w1` holds the gate's rows first, then the value's."""

    def __init__(self, width: int, inner: int, compute: torch.dtype, ops: VitOps) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = ComputeLinear(width, 2 * inner, compute)
        self.w2 = ComputeLinear(inner, width, compute)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.w2(self.ops.swiglu(self.w1(x_BND)))


class Block(nn.Module):
    """Pre-norm transformer block with a learnt scale on each branch. The residual stays float32."""

    def __init__(self, spec: VideoVAESpec, compute: torch.dtype, ops: VitOps) -> None:
        super().__init__()
        self.ops = ops
        width = spec.decoder_heads * spec.decoder_head_dim
        self.norm1 = nn.RMSNorm(width, eps=spec.decoder_norm_eps)
        self.attn = Attention(spec, compute, ops)
        self.scale1 = nn.Parameter(torch.zeros(width))
        self.norm2 = nn.RMSNorm(width, eps=spec.decoder_norm_eps)
        self.ff = FeedForward(width, spec.decoder_ffn_mult * width, compute, ops)
        self.scale2 = nn.Parameter(torch.zeros(width))

    def forward(self, x_BND: Tensor, rope: Rope) -> Tensor:
        x_BND = self.ops.scale_add(x_BND, self.attn(self.norm1(x_BND), rope), self.scale1)
        return self.ops.scale_add(x_BND, self.ff(self.norm2(x_BND)), self.scale2)


class ViT(nn.Module):
    """Latents `[B, 24, T, h, w]` to pixels `[B, 3, 4T, 16h, 16w]`, one token a latent."""

    def __init__(self, spec: VideoVAESpec, compute: torch.dtype, ops: VitOps) -> None:
        super().__init__()
        width = spec.decoder_heads * spec.decoder_head_dim
        self.patch = (PIXEL_CHANNELS, spec.time, spec.space, spec.space)
        self.x_embedder = nn.Linear(spec.latent_channels, width)
        self.register_tokens = nn.Parameter(torch.zeros(1, spec.decoder_registers, width))
        self.transformer_blocks = nn.ModuleList(Block(spec, compute, ops) for _ in range(spec.decoder_layers))
        self.norm_out = nn.LayerNorm(width, eps=spec.decoder_norm_eps)
        self.proj_out = nn.Linear(width, math.prod(self.patch))

    def forward(self, z_BCThw: Tensor, rope: Rope) -> Tensor:
        batch, _, *grid = z_BCThw.shape
        x = self.x_embedder(z_BCThw.flatten(2).transpose(1, 2).contiguous())
        num_tokens = x.shape[1]
        # After the latents' tokens: the learnt registers and one token of zeros; none of them becomes pixels.
        x = torch.cat([x, self.register_tokens.expand(batch, -1, -1), torch.zeros_like(x[:, :1])], dim=1)
        for block in self.transformer_blocks:
            x = block(x, rope)
        # The head runs on all tokens: another row count may round unlike the released program.
        x = self.proj_out(self.norm_out(x))[:, :num_tokens]
        x = x.view(batch, *grid, *self.patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return x.reshape(batch, PIXEL_CHANNELS, *(n * p for n, p in zip(grid, self.patch[1:], strict=True)))


def rope_table(grid: tuple[int, int, int], spec: VideoVAESpec) -> Rope:
    """cos and sin, float32 `[N, 1, R]` on the CPU, of a tile of `grid` = (T, h, w) latents (SPEC 8.3).

    Positions are centres in (-1, 1) over the tile's own extent; the appended tokens sit at 0.
    """
    centres = [2.0 * (torch.arange(0.5, n, dtype=torch.float32, device="cpu") / n) - 1.0 for n in grid]
    positions_N3 = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 2)
    positions_N3 = F.pad(positions_N3, (0, 0, 0, spec.decoder_registers + 1))
    rotated = int(spec.decoder_head_dim * spec.decoder_rope_ratio)
    steps = torch.arange(0, 1, 6 / rotated, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / spec.decoder_rope_theta**steps
    # 2 pi times the position is rounded before the frequency multiplies it.
    angles_NR = (2.0 * math.pi * positions_N3[:, :, None] * inv_freq).flatten(1).tile(2)
    return angles_NR.cos().unsqueeze(1), angles_NR.sin().unsqueeze(1)


def num_windows(latents: int, spec: VideoVAESpec) -> int:
    """Decoding windows of `latents` latent frames; 0 means too few to decode (1 or 2)."""
    return -(-(latents + spec.token_drop) // spec.clip_latents) - 1


def num_frames(latents: int, spec: VideoVAESpec) -> int:
    """Frames that `latents` latent frames decode to: 17n + 5 for 5n + 2, in groups of 1, 4, 4, 4, 4 (SPEC 4.2)."""
    return latents * spec.time - -(-latents // spec.clip_latents) * lead_frames(spec)


def lead_frames(spec: VideoVAESpec) -> int:
    """Frames at the start of every 5 latents that stand for the encoder's padding and are dropped (3)."""
    return spec.clip_latents * spec.time - spec.clip


def tail_frames(spec: VideoVAESpec) -> int:
    """Frames by which neighbouring windows overlap, and which the last one adds at the end (5)."""
    return (spec.clip_latents - spec.token_drop) * spec.time - lead_frames(spec)


class VideoDecoder(nn.Module):
    """Decoder with its fixed tiling and windows.

    `compute` is the dtype of the blocks' products and attention. Norms, residual, coordinates, `post_quant_conv`,
    `x_embedder` and `proj_out` are float32 in any case (SPEC 8.5). Tiles are dealt out over `ranks`, and every rank
    gets all frames; `ops` are the passes between the products, of equal bits whichever they are.
    """

    def __init__(
        self,
        spec: VideoVAESpec,
        compute: torch.dtype = torch.float32,
        ranks: Axis | None = None,
        ops: VitOps = PLAIN,
    ) -> None:
        super().__init__()
        assert 0 < spec.token_drop < spec.clip_latents and tail_frames(spec) > 0, spec
        self.spec, self.compute, self.ranks = spec, compute, ranks or Axis("tiles")
        self.post_quant_conv = nn.Conv3d(spec.latent_channels, spec.latent_channels, 1)
        self.decoder = ViT(spec, compute, ops)

    def freeze(self) -> None:
        """Cast the blocks' weights to `compute` once, in place; for after the stored tensors are assigned."""
        for module in self.modules():
            if isinstance(module, ComputeLinear):
                module.freeze()

    @torch.no_grad()
    def clips(
        self, latents_BCThw: Tensor, tile_batch: int = 1, *, first: int = 0, canvas: torch.device | None = None
    ) -> Generator[Tensor, None, None]:
        """Yield the frames in order, float32 `[B, 3, f, H, W]`, ImageNet-normalised: f = 17, at the end 5.

        `latents_BCThw` are de-normalised (SPEC 8.4), B = 1 in practice, T at least 3; other T than 5n + 2 end in
        shorter parts. Memory does not grow with T: one window and the tail of the one before are held. `first` parts
        are left out, and only the window before the next one is decoded of them. `canvas` is the device that holds
        windows, None the decoder's own: the fades are the same roundings on each.
        """
        spec, total, group = self.spec, latents_BCThw.shape[2], self.spec.clip_latents
        windows, period, lead = num_windows(total, spec), group * spec.time, lead_frames(spec)
        assert windows > 0, f"{total} latent frames cannot be decoded; the least is 3"
        length = 2 * group - spec.token_drop
        # The last latent fills up the last window.
        indices = torch.arange(group * windows + length - group, device=latents_BCThw.device).clamp(max=total - 1)
        skipped = max(0, min(first, windows) - 1)

        def window(number: int) -> Tensor:
            start = (skipped + number) * group
            return latents_BCThw.index_select(2, indices[start : start + length])

        pictures = self._windows(window, windows - skipped, tile_batch, canvas)
        remaining, tail = num_frames(total, spec) - skipped * (period - lead), None
        for number in range(skipped, windows):
            pixels = next(pictures)
            part = pixels[:, :, lead:period]
            part = part.clone() if tail is None else cross_fade(tail, part, tail_frames(spec), -3)
            tail = pixels[:, :, period + lead :].clone()
            del pixels
            if number >= first:
                yield part[:, :, :remaining]
            remaining -= part.shape[2]
            del part  # not beside the next window
        if remaining > 0:
            assert tail is not None
            yield tail[:, :, :remaining]

    def decode(self, latents_BCThw: Tensor, tile_batch: int = 1) -> Tensor:
        """All clips in one tensor, float32 `[B, 3, F, H, W]`."""
        return torch.cat(list(self.clips(latents_BCThw, tile_batch)), dim=2)

    def _tiling(self, length: int, height: int, width: int) -> Tiling:
        """What all windows share: the tile grid in pixels and the rotation of a tile's tokens."""
        spec = self.spec
        grid = split_canvas(height * spec.space, width * spec.space, spec.tile, spec.tile_overlap, spec.space)
        tile = (length, grid.rows.size // spec.space, grid.columns.size // spec.space)
        cos, sin = (t.to(self.post_quant_conv.weight.device, self.compute) for t in rope_table(tile, spec))
        return grid, (cos, sin)

    def _windows(
        self, source: Callable[[int], Tensor], count: int, tile_batch: int, canvas: torch.device | None
    ) -> Iterator[Tensor]:
        """Decode windows of 7 latents: tiles of latents in, their pixels blended on the canvas."""
        device = self.post_quant_conv.weight.device
        grid, rope = self._tiling(*source(0).shape[2:])

        def tile(z: Tensor) -> Tensor:
            return self.decoder(self.post_quant_conv(z), rope).to(canvas or z.device)

        def window(number: int) -> Tensor:
            return source(number).to(device, torch.float32)

        tiles = map_tiles(tile, window, count, grid.divided(self.spec.space), tile_batch, self.ranks)
        for _ in range(count):
            yield stitch(tiles, grid)
