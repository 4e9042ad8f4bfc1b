"""Clips leave a CUDA device while it decodes the next one: copies beside work, nothing that waits, the plain way's bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twinreel.decoding import _as_bytes
from twinreel.demo.tiny import tiny_spec
from twinreel.media.landing import Tensors, land
from twinreel.media.pixels import quantise
from twinreel.models.video_decoder import VideoDecoder
from twinreel.ops import vit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLIPS = 6


def work() -> Iterator[Tensors]:
    """Clips of 16 MiB, each after products that take many times as long as its copy."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn_like(x) / 64
    for number in range(CLIPS):
        for _ in range(150):
            x = torch.tanh(x @ weight)
        # the number is written last: a copy that did not wait for the work would not have it
        clip = (x[:1] * 0).to(torch.uint8).expand(4096, -1) + number
        yield clip.contiguous(), (x[0, 0] * 0).long() + number


@torch.inference_mode()
def test_copies_run_beside_the_next_clip() -> None:
    from torch.profiler import ProfilerActivity, profile

    list(land(work()))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        landed = list(land(work()))
        torch.cuda.synchronize()
    assert [int(number) for _, number in landed] == list(range(CLIPS))
    assert all(np.all(pixels == number) for pixels, number in landed), "a clip left before it was made, or is another's"
    device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in device if "DtoH" in event.name or "Device to Host" in event.name]
    copies = [copy for copy in copies if copy.end - copy.start > 50]  # microseconds: a clip, not its number
    kernels = [event.time_range for event in device if "Mem" not in event.name]
    beside = [copy for copy in copies if any(run.start < copy.end and copy.start < run.end for run in kernels)]
    assert len(copies) == CLIPS, [event.name for event in device][:20]
    assert len(beside) >= CLIPS - 2, f"{len(beside)} of {len(copies)} copies ran beside work"  # the last has no next


@pytest.mark.parametrize("passes", ["reference", "triton"])
@torch.inference_mode()
def test_a_decode_never_waits_between_clips_and_repeats_the_plain_bits(passes: str) -> None:
    torch.manual_seed(0)
    device, spec = torch.device("cuda", 0), tiny_spec().video
    decoder = VideoDecoder(spec, torch.float16, ops=vit.choose(passes, device)).to(device)
    for value in decoder.parameters():
        nn.init.normal_(value, std=0.1)
    decoder.freeze()
    latents = torch.randn(1, spec.latent_channels, 22, 20, 36, device=device)

    def clips() -> Iterator[Tensor]:
        return decoder.clips(latents, 4)

    plain = [quantise(clip).cpu().numpy() for clip in clips()]
    source = _as_bytes(clips(), "truncate", lambda: None)
    made = [next(source)]  # the window's tables come from the host
    torch.cuda.set_sync_debug_mode("error")
    try:
        landed = list(land(item for items in (made, source) for item in items))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(landed) == len(plain) == 5
    for (pixels, finite), wanted in zip(landed, plain, strict=True):
        assert np.array_equal(pixels, wanted) and int(finite) == wanted.size
        assert not torch.from_numpy(pixels).is_pinned(), "page-locked memory is for the way alone"
