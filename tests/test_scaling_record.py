"""The files of `bench scaling`: one run at a time has them, and those of other settings stay as they are."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twinreel.errors import ConfigError
from twinreel.noise import Rows
from twinreel.tools import bench_scaling
from twinreel.tools.bench import main
from twinreel.tools.scaling_cases import Bench
from twinreel.tools.scaling_record import base_path, check_same, parse_case, read_base, write_base
from twinreel.tools.targets import write_whole

WORDS = "--shape tiny --device cpu --frames 22 --text 5 --only".split()
ALIKE = {"shape": "tiny", "frames": 22}
ROWS = {"video": (4, 3), "audio": (2, 2)}


class Measured:
    """Stands for `Pool`, and remembers what was to be measured on how many cards."""

    runs: list[tuple[str, int]] = []
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, world: int, cards: int, settings: bench_scaling.Settings) -> None:
        self.world, self._cards = world, cards

    def run(self, case: bench_scaling.Case, limit: float) -> tuple[list[Any], str | None]:
        cards = self._cards if case.each else self.world
        self.runs.append((case.name, cards))
        type(self).meanwhile()
        return [{"line": "measured", "seconds": 1.0, "decode": 1.0}] * cards, None

    def close(self) -> None:
        pass


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> type[Measured]:
    monkeypatch.setattr(bench_scaling, "Pool", Measured)
    monkeypatch.setattr(Measured, "runs", [])
    return Measured


def tensors(changed: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.ones(shape) for name, shape in ROWS.items()} | changed


@pytest.mark.parametrize(
    ("locks", "found"),
    [
        (True, {"a.json": (3, 1), "a": (3, 1), "b.json": (0, 2)}),  # the first two have one file of velocities
        (False, {"b.json": (0, 2)}),
    ],
)
def test_a_second_run_on_a_record_is_refused_at_the_door(
    locks: bool, found: dict[str, tuple[int, int]], measured: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its code, and what had been begun by then; of a file system that knows no locks too."""
    out, codes = tmp_path / "a.json", dict[str, tuple[int, int]]()

    def meanwhile() -> None:
        monkeypatch.setattr(measured, "meanwhile", staticmethod(lambda: None))
        for name in found:
            codes[name] = main(["scaling", str(tmp_path / name), *WORDS, "sp1"]), len(measured.runs)

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", unknown)
    monkeypatch.setattr(measured, "meanwhile", staticmethod(meanwhile))
    assert main(["scaling", str(out), *WORDS, "sp1,sp1:vae"]) == 0 and codes == found
    assert list(json.loads(out.read_text())["cases"]) == ["sp1", "sp1:vae"]
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 * locks
    if locks:
        assert "cannot work: out" in lines[0] and lines[2] == "  wait for that run, end it, or name another file"
        assert f"another run is measuring into {out}" in lines[1] and "one at a time may" in lines[1]


def test_a_killed_run_holds_nothing(measured: Any, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    script = "import sys; from pathlib import Path; from twinreel.tools.scaling_record import held\n"
    script += "with held(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, str(out)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert main(["scaling", str(out), *WORDS, "sp1"]) == 3 and not measured.runs
        other.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["a.in-use"]
    assert main(["scaling", str(out), *WORDS, "sp1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("length", [240, 250])
def test_a_name_with_no_room_for_what_stands_beside_it(length: int, measured: Any, tmp_path: Path) -> None:
    assert main(["scaling", str(tmp_path / ("x" * length)), *WORDS, "sp1"]) == 3
    assert not measured.runs and not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_what_is_no_lock_stays(kind: str, measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "a.in-use"
    make: dict[str, Callable[[], object]] = {
        "file": lambda: lock.write_text("mine"), "folder": lock.mkdir, "link": lambda: lock.symlink_to("nowhere"),
        "pipe": lambda: os.mkfifo(lock),
    }  # fmt: skip
    make[kind]()
    before = lock.lstat()
    assert main(["scaling", str(tmp_path / "a.json"), *WORDS, "sp1"]) == 3 and not measured.runs
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and f"{lock}, which is to be locked while a.json is written, cannot be (" in lines[1]
    assert os.listdir(tmp_path) == ["a.in-use"] and os.path.samestat(before, lock.lstat())


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ("sp1", []),
        ("sp1,sp1:vae", [("sp1:vae", 1)]),
        ("sp1,tp2", [("sp1", 2), ("tp2", 2)]),  # on more cards than it had
        ("tp2", [("tp2", 2)]),
    ],
)
def test_what_is_measured_again(more: str, again: list[tuple[str, int]], measured: Any, tmp_path: Path) -> None:
    words = ["scaling", str(tmp_path / "a.json"), *WORDS]
    assert main([*words, "sp1"]) == 0 and measured.runs == [("sp1", 1)]
    measured.runs.clear()
    assert main([*words, more]) == 0 and measured.runs == again


def test_records_that_differ_have_velocities_that_do() -> None:
    names = "q.json", "q.1", "q.2", "q.1.json.json", "q.JSON", ".json"
    paths = [base_path(Path("/x") / name) for name in names]
    assert len({*paths}) == len(names) and paths[0] == Path("/x/q.one.safetensors")


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"frames": 22, "size": None}, None),
        ({"frames": "22", "size": None}, "has figures of frames '22', and this run has frames 22"),
        ({"frames": 22.0, "size": None}, "has figures of frames 22.0, and this run has frames 22"),
        ({"frames": True, "size": None}, "has figures of frames True, and this run has frames 22"),
        ({"frames": 22}, "has figures of no size, and this run has size None"),
        (
            {"frames": 22, "size": "None", "a\nb": 1},
            "of size 'None', 'a\\nb' 1, and this run has size None, no 'a\\nb'",
        ),
        ({"frames": 22, "size": "x" * 999}, "... (1001 characters), and this run has size None"),
    ],
)
def test_settings_that_differ_look_different(there: dict[str, Any], told: str | None) -> None:
    here = {"frames": 22, "size": None}
    if told is None:
        check_same(Path("a.json"), "figures", there, here, "name another")
        return
    with pytest.raises(ConfigError) as caught:
        check_same(Path("a.json"), "figures", there, here, "name another")
    assert told in str(caught.value) and str(caught.value).endswith("; name another") and len(str(caught.value)) < 500


FOREIGN: list[tuple[dict[str, Any], str, str]] = [
    ({}, '{"shape": "tiny", "frames": "22"}', "has velocities of frames '22', and this run has frames 22"),
    ({}, '{"shape": "tiny"}', "has velocities of no frames, and this run has frames 22"),
    ({}, '["shape"]', "cannot be read as such (its settings have no names)"),
    ({}, "[" * 9999, "cannot be read as such ("),
    ({"video": torch.ones(4, 2)}, "", "video velocities torch.float32 [4, 2], and this run makes torch.float32 [4, 3]"),
    ({"audio": torch.ones(4)}, "", "audio velocities torch.float32 [4], and this run makes torch.float32 [2, 2]"),
    ({"audio": torch.ones(2, 2).half()}, "", "audio velocities torch.float16 [2, 2], and this run makes torch.float32"),
    ({"video": torch.full((4, 3), torch.nan)}, "", "has video velocities that are not finite"),
]


@pytest.mark.parametrize(("changed", "settings", "told"), FOREIGN)
def test_velocities_of_others_are_neither_compared_nor_replaced(
    changed: dict[str, Any], settings: str, told: str, tmp_path: Path
) -> None:
    base = tmp_path / "a.one.safetensors"
    save_file(tensors(changed), base, metadata={"scaling": settings or json.dumps(ALIKE)})
    before = base.read_bytes()
    with pytest.raises(ConfigError) as caught:
        read_base(base, ALIKE, ROWS)
    assert told in str(caught.value) and str(base) in str(caught.value)
    assert str(caught.value).endswith("; move it, or give the record another name")
    rank, (case,) = (
        SimpleNamespace(rank=0, settings=SimpleNamespace(base=base, alike=ALIKE, rows=ROWS)),
        parse_case("sp1"),
    )
    with pytest.raises(ConfigError):  # it came after the door
        Bench._compared(rank, case, Rows(**tensors({})))  # type: ignore[arg-type]
    assert base.read_bytes() == before


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_velocities_have_the_mode_of_every_file(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_base(tmp_path / "a", tensors({}), ALIKE)
        write_whole(tmp_path / "b", "{}")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o666 & ~mask] * 2


def test_velocities_are_refused_before_there_are_ranks(
    measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the shapes that the plan says, of which no model has to be built."""
    _, settings, _ = bench_scaling.prepare(bench_scaling.parser().parse_args([str(tmp_path / "a"), *WORDS, "sp1"]))
    base = Path(settings.base)
    write_base(base, {name: torch.zeros(shape) for name, shape in settings.rows.items()}, settings.alike)
    assert main(["scaling", str(tmp_path / "a"), *WORDS, "sp1"]) == 0 and measured.runs == [("sp1", 1)]
    write_base(base, {name: torch.zeros(1, *shape) for name, shape in settings.rows.items()}, settings.alike)
    capsys.readouterr()
    assert main(["scaling", str(tmp_path / "a"), *WORDS, "sp1,tp2"]) == 3 and measured.runs == [("sp1", 1)]
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 3 and "has video velocities torch.float32 [1, " in told.err and not told.out
    base.unlink()
    assert main(["scaling", str(tmp_path / "a"), *WORDS, "tp2"]) == 0
    assert f"velocities of sp1 are gone from {base}; calls are not compared" in capsys.readouterr().out


CASES = {
    "sp1": [
        "{}",
        '{"seconds": 1.0}',
        '{"seconds": 1, "line": "1 s"}',
        '{"seconds": 1, "line": "1 s", "took": "1"}',
        '{"seconds": 1, "line": 5, "took": 1}',
        *(
            f'{{"seconds": {value}, "line": "1 s", "took": 1}}'
            for value in ('"1"', "0", "-1", "NaN", "Infinity", "1e-320", "1e400", "true", "null", f"1{'0' * 400}")
        ),
        *(
            f'{{"seconds": 1, "line": "1 s", "took": 1, "cards": {value}}}'
            for value in ("5", '"xx"', '["1"]', "[0]", "[NaN]", "null", "{}")
        ),
    ],
    **dict.fromkeys(
        ("tp2", "sp2:share", "sp2:plain:whole", "sp2:vae", "sp2:vae:"), ["{}", '{"line": "1 s", "took": 1}']
    ),
    **dict.fromkeys(("sp2", "7", "sp01", "tp2sp2", ""), ['{"seconds": 1, "line": "1 s", "took": 1}']),
}
ERRORS = {"sp1": ["5", "null", '""', "{}"], **dict.fromkeys(("sp2", "7", ""), ['"it broke"'])}
NOBODYS = [("cases", name, text) for name, texts in CASES.items() for text in texts]
NOBODYS += [("errors", name, text) for name, texts in ERRORS.items() for text in texts]


@pytest.mark.parametrize(("part", "name", "text"), NOBODYS)
def test_a_record_of_nobodys_is_refused_before_there_are_ranks(
    part: str, name: str, text: str, measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    parts = {"settings": "{}", "cases": "{}", "errors": "{}", part: f'{{"{name}": {text}}}'}
    out.write_text(f"{{{', '.join(f'{json.dumps(key)}: {value}' for key, value in parts.items())}}}")
    before = out.read_bytes()
    assert main(["scaling", str(out), *WORDS, "sp1"]) == 3 and not measured.runs
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "is no record of this bench" in lines[1] and len(lines[1]) < 500
    assert out.read_bytes() == before


def test_a_record_of_ours_is_taken(measured: Any, tmp_path: Path) -> None:
    words = ["scaling", str(tmp_path / "a.json"), *WORDS]
    assert main([*words, "sp1,sp1:vae"]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(record | {"errors": {"tp2": "rank 0: it broke"}}))
    measured.runs.clear()
    assert main([*words, "sp1,sp1:vae"]) == 0 and not measured.runs
