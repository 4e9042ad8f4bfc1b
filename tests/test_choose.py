"""Which residency, AdaLN and row chunk a request gets, and which it is refused: from sizes and free memory alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import twinreel.memory.choose as choosing
from twinreel.config import MOST_ROWS, ROW_UNIT
from twinreel.errors import ConfigError
from twinreel.limits import PROMPT_CHARACTERS, REFERENCES_IN_ALL, REFERENCES_OF_A_KIND, max_frames
from twinreel.memory.choose import GIB, Asked, Free, admit, choose, refusals, usual
from twinreel.memory.estimate import Setting, estimate
from twinreel.plan import latent_frames, sound_latents
from twinreel.precision import Fp8
from twinreel.spec import Spec
from twinreel.weights import locate, read_spec


@pytest.fixture(scope="module")
def h3(release: Path) -> Spec:
    parts = {name: release / "FL2VA" / name for name in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    return read_spec(locate(None, parts | {"tokenizer": release / "tokenizer"}, weights=False))


GPU = Setting("cuda", 2, 2, 4, "all", ops="triton")
CPU_H3 = Setting("cpu", 2, 4, 1, "all")


@pytest.mark.parametrize(
    ("device", "host", "residency", "adaln"),
    [
        (139, 120, "all", "live"),
        (120, 120, "all", "precompute"),
        (80, 120, "conditioner", "precompute"),
        (80, 16, "stages", "precompute"),
        (48, 120, "layers", "precompute"),
        (24, 120, "layers", "precompute"),
        (24, 16, "mapped", "precompute"),
        (None, None, "all", "live"),
        (None, 140, "all", "live"),
        (None, 115, "all", "precompute"),
        (None, 60, "stages", "precompute"),
        (None, 16, "mapped", "precompute"),
    ],
)
def test_auto_takes_the_first_that_fits(
    h3: Spec, device: int | None, host: int | None, residency: str, adaln: str
) -> None:
    free = Free(None if device is None else device * GIB, None if host is None else host * GIB, given=device is None)
    setting = GPU if device is not None else replace(CPU_H3, ops="reference")
    choice = admit(choose(Asked(), *usual(h3), h3, setting, free), Asked(), free)
    assert (choice.residency, choice.adaln, choice.row_chunk) == (residency, adaln, 0)
    assert choice.why["residency"].startswith("auto")
    if device is not None:
        assert f"{device:.1f} GiB free" in choice.why["residency"]
        assert choice.device_bytes * choosing.NEAR <= device * GIB
    elif host is not None:
        assert f"{host:.1f} GiB given" in choice.why["residency"] and "device" not in choice.why["residency"]
        assert choice.host_bytes * choosing.NEAR <= host * GIB


@pytest.mark.parametrize(
    ("device", "given", "residency", "field"),
    [
        (24, True, "auto", "host_memory"),
        (139, True, "auto", "host_memory"),
        (139, True, "all", "residency"),
        (24, True, "mapped", "residency"),
        (24, False, "layers", "residency"),  # page-locked memory that is not there
        (24, False, "auto", None),
        (24, False, "mapped", None),
        (None, True, "auto", "host_memory"),
        (None, True, "stages", "residency"),
    ],
)
def test_memory_that_was_given_is_a_bound(
    h3: Spec, device: int | None, given: bool, residency: str, field: str | None
) -> None:
    free = Free(None if device is None else device * GIB, 2 * GIB, given)
    asked = Asked(residency)
    choice = choose(asked, *usual(h3), h3, CPU_H3 if device is None else GPU, free)
    with pytest.raises(ConfigError, match=f"^{field}: ") if field else nullcontext():
        admit(choice, asked, free)
    assert ("so it is refused" in choice.why["residency"]) is (given and residency == "auto")


def test_chunks_come_after_everything_else(h3: Spec) -> None:
    plan, rows = usual(h3)
    long = {**rows, "video": 107_856}
    choice = choose(Asked(), plan, long, h3, GPU, Free(16 * GIB, 120 * GIB))
    assert choice.residency == "layers" and choice.row_chunk % 8192 == 0 < choice.row_chunk < sum(long.values())
    assert "16.0 GiB free" in choice.why["row_chunk"]
    whole = choose(Asked(row_chunk=0), plan, long, h3, GPU, Free(16 * GIB, 120 * GIB))
    assert whole.row_chunk == 0 and whole.device_bytes > choice.device_bytes
    assert "nothing fits" in whole.why["residency"]


@pytest.mark.parametrize(("asked", "made"), [(8192, 8192), (32_768, 32_768), (40_960, 0), (MOST_ROWS, 0), (0, 0)])
def test_a_chunk_that_holds_all_rows_is_none(h3: Spec, asked: int, made: int) -> None:
    plan, rows = usual(h3)
    assert sum(rows.values()) == 38_010
    choice = choose(Asked(row_chunk=asked), plan, rows, h3, CPU_H3, Free(None, None))
    assert choice.row_chunk == made
    assert (choice.why["row_chunk"] == "asked for") is (made == asked)
    assert made == asked or f"asked for {asked:,} at a time, and all 38,010" in choice.why["row_chunk"]


def test_no_request_has_the_most_rows_that_a_chunk_may_have(h3: Spec) -> None:
    world, unit = h3.world, h3.multiple**2
    tokens = int(PROMPT_CHARACTERS.high) * 4 + 20 * REFERENCES_IN_ALL  # a token a byte; labels
    frames = latent_frames(max_frames(h3), h3.video)
    target = frames * -(-world.area_cap // unit) + 2 * sound_latents(max_frames(h3))
    # a picture of 4:1 as rows and as the conditioner's tokens; all clips together are as long as the longest target
    pictures = REFERENCES_OF_A_KIND["image"] * (4 * world.reference_edge**2 // unit) * 2
    clips = target + REFERENCES_OF_A_KIND["video"] * h3.processor.video_max_pixels // unit
    most = tokens + target + pictures + clips + 2 * sound_latents(max_frames(h3))
    assert most < MOST_ROWS < 2 * most and MOST_ROWS % ROW_UNIT == 0


def test_refused_modes_are_not_taken(h3: Spec) -> None:
    free = Free(60 * GIB, 120 * GIB)
    several = Asked(ranks=2, refused=refusals(None, h3, 2))
    assert choose(several, *usual(h3), h3, GPU, free).residency == "stages"
    stepwise = refusals(Fp8(steps=2), h3, 1)
    assert set(stepwise) == {"layers", "mapped"} and set(refusals(Fp8(), h3, 1)) == {"mapped"}
    with pytest.raises(ConfigError, match="^residency: layers runs one DiT"):
        choose(Asked("layers", refused=stepwise), *usual(h3), h3, GPU, free)


def test_predictions_of_the_modes(h3: Spec) -> None:
    plan, rows = usual(h3)

    def peak(residency: str, **values: object) -> dict[str, float]:
        stages = estimate(plan, rows, h3, replace(GPU, residency=residency, **values))  # type: ignore[arg-type]
        return {f"{stage} {name}": facts[name] / GIB for stage, facts in stages.items() for name in ("device", "host")}

    tables, live = (peak("stages", adaln=adaln)["denoise device"] for adaln in ("precompute", "live"))
    assert tables == pytest.approx(42.59 + 0.64, rel=0.02)  # measured at this size, with 0.64 of the driver
    assert live == pytest.approx(66.08 + 0.64, rel=0.02)
    reference = peak("stages", adaln="precompute", ops="reference")["denoise device"]
    assert reference == pytest.approx(43.62 + 0.64, rel=0.02)
    by_layers = peak("layers", adaln="precompute")
    assert by_layers["denoise device"] < 10 and 36 < by_layers["denoise host"] < 40
    conditioner = peak("conditioner", adaln="precompute")
    assert all(46 < conditioner[f"{stage} host"] < 50 for stage in ("encode", "denoise", "decode"))  # nothing evicts it
    mapped = peak("mapped", adaln="precompute")
    assert mapped["denoise device"] == by_layers["denoise device"] and mapped["denoise host"] < 6
