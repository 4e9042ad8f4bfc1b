"""Looking at media gives the sizes that reading them gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from media_files import flat, tone, write_mp4
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.planner.survey import survey
from twinreel.request import Reference
from twinreel.sources import Clip, Sound, Source
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=64, area_cap=64 * 112))


def facts(source: Source) -> tuple[object, ...]:
    if isinstance(source, Clip):
        sound = None if source.sound is None else facts(source.sound)
        return source.frames.shape, source.cut, sound
    assert isinstance(source, Sound)
    return source.samples.shape[1], source.rate, source.cut


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("survey")
    made = {name: folder / f"{name}.mp4" for name in ("plain", "turned", "odd", "silent", "long")}
    frames = [flat((i, 0, 0), 96, 64) for i in range(72)]
    write_mp4(made["plain"], frames, sound=tone(440, 3, 48_000))
    write_mp4(made["turned"], frames, sound=tone(440, 3, 48_000), turn=90)
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.uniform(0.02, 0.07, 72)).tolist()
    write_mp4(made["odd"], frames, times=times, sound=tone(440, 2, 44_100), rate=44_100)
    write_mp4(made["silent"], frames, fps=30)
    write_mp4(made["long"], [flat((i % 250, 0, 0), 64, 64) for i in range(400)])
    return made


@pytest.mark.parametrize("name", ["plain", "turned", "odd", "silent", "long"])
@pytest.mark.parametrize(("start", "end"), [(None, None), (0.5, None), (0.25, 1.5)])
def test_a_look_agrees_with_reading(files: dict[str, Path], name: str, start: float | None, end: float | None) -> None:
    item = Reference("video", str(files[name]), start, end)
    assert facts(survey(item, SPEC, 362, "references[0]")) == facts(read_source(item, SPEC, 362, "references[0]"))


def test_sounds_and_refusals(files: dict[str, Path], tmp_path: Path) -> None:
    item = Reference("audio", files["plain"], 1.0)
    assert facts(survey(item, SPEC, 362, "r")) == facts(read_source(item, SPEC, 362, "r"))
    (tmp_path / "x.mp4").write_bytes(files["plain"].read_bytes()[:1500])
    for bad in (Reference("video", tmp_path / "x.mp4"), Reference("video_audio", files["silent"])):
        with pytest.raises(RequestError):
            survey(bad, SPEC, 362, "r")
