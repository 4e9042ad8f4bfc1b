"""Signals outside a run: the command ends where it stands, with words and a code; a second one is not held up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinreel import cli
from twinreel.stopping import Stopped, Stopping, stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_and_the_next_one_kills(number: signal.Signals):
    before = signal.getsignal(number)
    with stoppable():
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), number)
        assert caught.value.signal == number and signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


# An import in which a signal comes: it swallows everything, and ends after a while or not at all.
LATE = """import os, signal, sys, time
try:
    os.kill(os.getpid(), {number})
    time.sleep({seconds})
except BaseException as error:
    print("swallowed", repr(error), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGINT, 0.1), (signal.SIGTERM, 0.1), (signal.SIGINT, 60), (signal.SIGTERM, 60)]
)
@pytest.mark.parametrize("redirected", [False, True])
def test_a_signal_in_an_import_waits_for_its_end_but_not_for_ever(
    number: signal.Signals, seconds: float, redirected: bool, tmp_path: Path
):
    (tmp_path / "slow.py").write_text(LATE.format(number=int(number), seconds=seconds))
    script = "import io, sys, contextlib\nfrom twinreel import cli, stopping\nstopping.PATIENCE = 0.3\n"
    script += "def perform(command):\n"
    script += f"    with contextlib.redirect_stdout(sys.stderr if {redirected} else sys.stdout):\n"
    script += "        import slow\n    while True: pass\n"
    script += "cli.perform = perform; sys.argv[1:] = ['doctor', '--json']; sys.exit(cli.main())"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + number and json.loads(done.stdout)["exit"] == 128 + number
    assert done.stderr.startswith("twinreel: stopped by") and len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize("step", ["understand", "perform", "complain"])
@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, "the keyboard"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_anywhere_is_one_line_of_json_and_its_code(
    step: str, number: signal.Signals, by: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(cli, step, lambda *given: os.kill(os.getpid(), number))
    words = ["generate", "A cat.", "--json", "--size", "none"]  # an error is on its way, too
    assert cli.main(words) == 128 + number
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["ok"], said["error"], said["exit"]) == (False, "Interrupted", 128 + number)
    assert err.startswith(f"twinreel: stopped by {by}\n") and len(err.splitlines()) == 3


def test_a_run_that_had_nothing_left_to_stop_says_so(capsys):
    with stoppable(), Stopping(lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "stopping at the next step" in told[0] and told[1].endswith("is finished")


def test_a_signal_after_everything_is_done_changes_nothing():
    script = "import os, signal, sys, twinreel.__main__ as it; sys.argv[1:] = ['--version']; code = it.main()\n"
    script += "[os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGINT)]; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("twinreel ")


def test_ctrl_c_while_the_command_is_being_loaded_is_no_traceback():
    script = "import sys, os, signal, runpy\n"
    script += "class Late:\n    def find_spec(self, name, *more):\n"
    script += "        if name == 'twinreel.cli': os.kill(os.getpid(), signal.SIGINT)\n"
    script += "sys.meta_path.insert(0, Late()); runpy.run_module('twinreel', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
