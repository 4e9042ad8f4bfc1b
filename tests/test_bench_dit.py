"""`bench dit --against`: the public class has the memory to itself, and gives what ours gives."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest

from twinreel.models.dit import DiT
from twinreel.tools import bench_dit
from twinreel.tools.bench import main


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_diffusers_is_timed_alone_and_equal(
    precision: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    from twinreel.tools import bench_peer

    ours: list[weakref.ref[DiT]] = []
    unfilled, public = bench_dit._unfilled, bench_peer.public_dit

    def remember(*given: Any) -> DiT:
        model = unfilled(*given)
        ours.append(weakref.ref(model))
        return model

    def alone(*given: Any) -> Any:
        assert [model() for model in ours] == [None]
        return public(*given)

    monkeypatch.setattr(bench_dit, "_unfilled", remember)
    monkeypatch.setattr(bench_peer, "public_dit", alone)
    words = "dit --frames 22 --text 12 --ops reference --against diffusers --shape tiny --device cpu --seconds 0.001"
    assert main([*words.split(), "--precision", precision]) == 0
    (peer,) = json.loads(capsys.readouterr().out.splitlines()[-1])["peer"]
    assert peer["distance_to_ours"] == {"video": 0.0, "audio": 0.0} and peer["mode"] == "eager"
    assert peer["times_ours"] > 0 and peer["repeats"] and peer["finite"]
