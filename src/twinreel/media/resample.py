"""The one resampler: windowed-sinc polyphase to 32 kHz, bit-equal to torchaudio's default `Resample` (SPEC 4.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..spec import SAMPLE_RATE

if TYPE_CHECKING:
    import torch

ZEROS = 6  # zero crossings of the sinc on each side
ROLLOFF = 0.99  # cutoff as a share of the lower Nyquist frequency
MOST_WEIGHTS = 4_000_000  # a filter bank above this is evaluated tap by tap: 44,101 Hz would need 1.4e9 weights
OUTPUTS_AT_ONCE = 16_384


def resample(waveform: torch.Tensor, rate: int, new_rate: int = SAMPLE_RATE) -> torch.Tensor:
    """Change the sample rate.

    Args:
        waveform: fp32 `[c, n]` at `rate` samples per second.
        rate, new_rate: whole samples per second.

    Returns:
        fp32 `[c, ceil(n * new_rate / rate)]`; `waveform` itself when the rates agree.
    """
    if rate == new_rate:
        return waveform
    common = math.gcd(rate, new_rate)
    old, new = rate // common, new_rate // common
    if new * (old + 2 * _reach(old, new)) > MOST_WEIGHTS:
        return _by_taps(waveform, old, new)
    return _by_filter_bank(waveform, old, new)


def _reach(old: int, new: int) -> int:
    """Input samples on each side that an output sample sees."""
    return math.ceil(ZEROS * old / (min(old, new) * ROLLOFF))


def _weights(offset: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """The windowed sinc at fp64 `offset`, in periods of the reduced rates; fp32 only at the end, as torchaudio."""
    import torch

    cutoff = min(old, new) * ROLLOFF
    t = (offset * cutoff).clamp_(-ZEROS, ZEROS)
    window = torch.cos(t * math.pi / ZEROS / 2) ** 2
    t = t * math.pi
    sinc = torch.where(t == 0, torch.ones((), dtype=t.dtype), t.sin() / t)
    return (sinc * (window * (cutoff / old))).to(torch.float32)


def _by_filter_bank(waveform: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """All `new` phases as output channels of one strided convolution."""
    import torch

    reach = _reach(old, new)
    taps = torch.arange(-reach, reach + old, dtype=torch.float64)[None, None] / old
    # phases are divided in fp32 and only then widened by the addition: part of torchaudio's arithmetic
    phases = torch.arange(0, -new, -1)[:, None, None] / new
    bank = _weights(phases + taps, old, new)
    padded = torch.nn.functional.pad(waveform, (reach, reach + old))
    phased = torch.nn.functional.conv1d(padded[:, None], bank, stride=old)
    length = -(-new * waveform.shape[1] // old)
    return phased.transpose(1, 2).reshape(waveform.shape[0], -1)[:, :length].contiguous()


def _by_taps(waveform: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """The same filter gathered per output sample, for rates whose reduced ratio makes the bank too large."""
    import torch

    reach = _reach(old, new)
    length = -(-new * waveform.shape[1] // old)
    padded = torch.nn.functional.pad(waveform, (reach, reach + 1))
    taps = torch.arange(-reach, reach + 1)
    parts = []
    for first in range(0, length, OUTPUTS_AT_ONCE):
        position = torch.arange(first, min(first + OUTPUTS_AT_ONCE, length)) * old
        whole, rest = position // new, position % new
        offset = taps.double()[None] / old - rest.double()[:, None] / (old * new)
        seen = padded[:, whole[:, None] + taps[None] + reach]
        parts.append((seen * _weights(offset, old, new)).sum(-1))
    return torch.cat(parts, dim=1) if parts else waveform.new_zeros(waveform.shape[0], 0)
