"""Our resampler against torchaudio's golden values, and what any resampler must keep."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from twinreel.media import resample as module
from twinreel.media.resample import resample

GOLDEN = json.loads((Path(__file__).parent / "golden" / "resample.json").read_text())


@pytest.mark.parametrize("rate", sorted(map(int, GOLDEN["rates"])))
def test_equals_torchaudio(rate: int):
    generator = torch.Generator().manual_seed(GOLDEN["seed"])
    out = resample(torch.randn(2, GOLDEN["samples"], generator=generator) * 0.3, rate)
    golden = GOLDEN["rates"][str(rate)]
    assert out.shape == (2, golden["length"]) and out.dtype == torch.float32
    assert (out[:, ::97] - torch.tensor(golden["every_97th"])).abs().max() <= 1e-6
    assert float((out.double() ** 2).sum()) == pytest.approx(golden["sum_of_squares"], rel=1e-6)
    if torch.__version__.split("+")[0] == GOLDEN["torch"].split("+")[0]:
        same = hashlib.sha256(out.numpy().tobytes()).hexdigest() == golden["sha256"]
        # another CPU may sum a convolution in another order; it may not move a sample by more than rounding
        assert same or float(out.double().sum()) == pytest.approx(golden["sum"], abs=1e-3)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 31_999])
def test_a_440_hz_tone_stays_one(rate: int):
    time = torch.arange(rate, dtype=torch.float64) / rate
    out = resample(torch.sin(2 * math.pi * 440 * time).float()[None], rate)[0]
    assert out.shape == (32_000,)
    expected = torch.sin(2 * math.pi * 440 * torch.arange(32_000, dtype=torch.float64) / 32_000)
    assert (out - expected)[100:-100].abs().max() < 0.01
    spectrum = torch.fft.rfft(out.double()).abs()
    assert int(spectrum.argmax()) == 440


def test_both_ways_of_computing_agree():
    x = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    for old, new in ((441, 320), (3, 2), (1, 4), (441, 640)):
        bank, taps = module._by_filter_bank(x, old, new), module._by_taps(x, old, new)
        # torchaudio divides phases in fp32, which alone moves a sample by some 1e-5
        assert bank.shape == taps.shape and (bank - taps).abs().max() < 1e-4


@pytest.mark.parametrize("samples", [0, 1, 2, 31])
def test_length_is_the_ceiling(samples: int):
    for rate in (44_100, 48_000, 8000, 44_101):
        assert resample(torch.zeros(2, samples), rate).shape == (2, math.ceil(32_000 * samples / rate))


def test_equal_rates_pass_through():
    x = torch.randn(2, 10)
    assert resample(x, 32_000) is x
