"""A dead stderr changes nothing; a dead stdout changes the exit code of what went well, and nothing else."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from twinreel.errors import ConfigError
from twinreel.outlets import Outlet, Outlets
from twinreel.progress import Lines
from twinreel.stopping import Stopping, stoppable
from twinreel.watch import Event


class Broken(io.StringIO):
    """A pipe whose reader is gone: the kind of error that `where` meets."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self.where, self.error = where, error

    def write(self, text: str) -> int:
        if self.where == "write":
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.where == "flush":
            raise self.error


def full() -> TextIO:
    return open("/dev/full", "w", buffering=1)  # noqa: SIM115


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


DEAD: dict[str, Callable[[], TextIO | None]] = {
    "full": full,
    "closed": closed,
    "never there": lambda: None,
    "left while writing": lambda: Broken("write", BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "left while flushing": lambda: Broken("flush", BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "gone terminal": lambda: Broken("write", OSError(errno.EIO, "Input/output error")),
}


@pytest.mark.parametrize("name", DEAD)
@pytest.mark.parametrize("code", [0, 3])
def test_a_dead_stderr_changes_nothing(name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.stderr", DEAD[name]())
    with Outlets() as outlets:
        with Lines(sys.stderr, silence=0.01) as progress:
            progress(Event("denoise", 0, 1, 0.0))
        print("progress", file=sys.stderr, flush=True)
        print("result")
        assert outlets.settle(code) == code
    assert capsys.readouterr().out == "result\n"


@pytest.mark.parametrize("name", DEAD)
@pytest.mark.parametrize(("code", "wanted"), [(0, 1), (2, 2), (5, 5), (130, 130)])
def test_a_dead_stdout_is_the_exit_code_of_what_went_well(
    name: str, code: int, wanted: int, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr("sys.stdout", DEAD[name]())
    with Outlets() as outlets:
        print("result")
        assert outlets.settle(code) == wanted
    told = capsys.readouterr().err
    assert ("could not be written to stdout" in told) == (code == 0 and not name.startswith("left")), told


def test_a_name_that_is_no_text_is_written_all_the_same():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    outlet = Outlet(stream)
    print("\udcff é", file=outlet)
    outlet.flush()
    assert outlet.fault is None and stream.buffer.getvalue() == b"\\udcff \\xe9\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["write", "flush"])
def test_a_signal_in_the_middle_of_a_write_cancels_and_loses_its_words_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    """Python's buffers refuse a second writer on the same thread, and stderr may be blocked for long."""
    reentrant, cancelled = Broken(where, RuntimeError("reentrant call inside <_io.BufferedWriter>")), []
    monkeypatch.setattr("sys.stderr", reentrant)
    with Outlets() as outlets:
        with stoppable(), Stopping(lambda: cancelled.append(True)):
            os.kill(os.getpid(), signal.SIGTERM)
        reentrant.where = "nowhere"
        print("later words", file=sys.stderr)
        assert cancelled and outlets.settle(0) == 0 and outlets.err.fault is None
    assert reentrant.getvalue().endswith("later words\n")


def test_streams_come_back_after_an_error():
    before = sys.stdout, sys.stderr
    with pytest.raises(ConfigError), Outlets():
        raise ConfigError("no")
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (">/dev/full", 1),
        (">&-", 1),
        ("2>&-", 0),
        (">&- 2>&- <&-", 1),
        (">/dev/full 2>/dev/full", 1),
        ("2>/dev/full", 0),
    ],
)
def test_a_process_whose_streams_are_gone(ends: str, code: int, tmp_path: Path):
    """Also: no file that is opened later gets the number of a stream that is closed."""
    script = "import sys; from twinreel import cli, outlets; before = outlets.Outlet.flush\n"
    script += "def flush(self): open('number', 'w').write(str(open('other', 'w').fileno())); before(self)\n"
    script += "outlets.Outlet.flush = flush; sys.exit(cli.main(['--version']))"
    (tmp_path / "s.py").write_text(script)
    shell = f"{sys.executable} s.py {ends}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert int((tmp_path / "number").read_text()) > 2
