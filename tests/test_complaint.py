"""Errors in three lines: what, why, what to do."""

from __future__ import annotations

import pytest

from twinreel import limits
from twinreel.complaint import AGAIN, explain, unknown_command
from twinreel.config import EngineConfig, check_config
from twinreel.errors import Cancelled, CheckpointError, ConfigError, RequestError
from twinreel.spec import World


def test_a_refused_request():
    with pytest.raises(RequestError) as caught:
        limits.durations(World()).check("duration", 99.0)
    assert str(explain(caught.value)).splitlines() == [
        "twinreel: the request cannot be run: duration",
        "  got 99.0",
        "  this model's limit is 4 to 15 s, the nearest is 15",
    ]
    assert "; this model's limit is 4 to 15 s" in str(caught.value), "one line for programs"


def test_what_a_person_wrote_is_named_beside_the_field():
    error = RequestError("references[1].source", "is odd")
    told = explain(error, {"references[1]": "--ref 2"})
    assert told.what == "the request cannot be run: --ref 2 (references[1].source)"
    told = explain(RequestError("a", "x does not exist"), {"a": "A, the first file"}, "compare")
    assert told.what == "compare cannot be run: A, the first file" and "twinreel compare --help" in told.remedy


def test_a_refused_choice():
    with pytest.raises(ConfigError) as caught:
        check_config(EngineConfig(precision="fp16"))
    assert str(explain(caught.value)).splitlines() == [
        "twinreel: this configuration cannot work: precision",
        "  fp16 is refused: the DiT's residual passes 65,504, fp16's largest",
        "  use bf16 or fp32",
    ]
    assert explain(ConfigError("--component x: write NAME=PATH")).what.endswith("work: --component x") is False
    assert explain(ConfigError("threads: got 0; from 1 to 1024")).what.endswith("work: threads")


def test_weights_with_many_problems_stay_readable():
    told = str(explain(CheckpointError("w: 2 problems:\n  a: missing\n  b: missing"))).splitlines()
    assert told[0] == "twinreel: the weights cannot be used"
    assert told[1:4] == ["  w: 2 problems:", "      a: missing", "      b: missing"] and "verify" in told[4]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RequestError("seed", "is odd"), "generate --help"),
        (ConfigError("no"), "doctor"),
        (CheckpointError("no"), "verify"),
        (OSError(28, "No space left on device"), "disk has room"),
        (MemoryError(), "--residency layers"),
        (RuntimeError("CUDA out of memory. Tried"), "--residency layers"),
        (ZeroDivisionError(), "--traceback"),
        (Cancelled(), AGAIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_it_is_three_lines_say_what_to_do(error: BaseException, remedy: str):
    lines = str(explain(error)).splitlines()
    assert len(lines) == 3 and remedy in lines[2] and all(line.strip() for line in lines)


@pytest.mark.parametrize("error", [Cancelled(), KeyboardInterrupt()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("generate", "run it again: the same request and seed make the same file"),
        ("decode", "run it again: the same request and seed make the same file"),
        ("bench", "run it again: bench scaling goes on from what its file holds, another bench begins anew"),
        ("compare", "run it again"),
    ],
)
def test_what_was_stopped_can_be_run_again(error: BaseException, command: str, remedy: str):
    assert explain(error, command=command).remedy == remedy


def test_what_was_kept_is_said():
    error = Cancelled()
    error.signal = 15
    error.add_note("the latents are kept in a; finish with: twinreel decode a")
    lines = str(explain(error)).splitlines()
    assert "SIGTERM" in lines[0] and lines[2] == "  the latents are kept in a; finish with: twinreel decode a"
    full = OSError(28, "No space left on device")
    full.add_note("the latents are kept in a")
    lines = str(explain(full)).splitlines()
    assert "room" in lines[2] and lines[3] == "  the latents are kept in a"


def test_unknown_commands():
    assert unknown_command("verfy", ("verify", "plan")).remedy == "did you mean verify? see twinreel --help"
    assert unknown_command("zzz", ("verify", "plan")).remedy == "see twinreel --help"
