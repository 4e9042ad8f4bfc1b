"""What no engine would start with is refused before the server listens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinreel import ConfigError, EngineConfig
from twinreel.serve import door


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"gpus": 5}, "must divide the 2 heads"),
        ({"device": "cuda:77"}, "CUDA devices"),
        ({"ops": "nothing"}, "ops: got 'nothing'"),
        ({"vae_encode": "tf32", "device": "cpu"}, "needs a CUDA device"),
    ],
)
def test_refusals(tiny_all: Path, choice: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main([json.dumps({"model": str(tiny_all), **choice})]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "ConfigError" and words in told["message"]


def test_the_check_runs_beside_this_process(tiny_all: Path, tmp_path: Path) -> None:
    door.check_engine(EngineConfig(model=str(tiny_all), device="cpu"))
    with pytest.raises(ConfigError, match="must divide the 2 heads"):
        door.check_engine(EngineConfig(model=str(tiny_all), gpus=5, device="cpu"))
