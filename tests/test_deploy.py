"""The Dockerfile and the systemd unit: what they call exists, and they keep the promises of docs/serving.md."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from twinreel.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {f"--{item.name.replace('_', '-')}" for item in fields(ServeOptions)}
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
INSTRUCTIONS |= {"CMD", "ENTRYPOINT"}


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_dockerfile() -> None:
    found = dockerfile()
    given = dict(found)
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    assert re.search(r":\d", given["FROM"]) and "latest" not in given["FROM"]
    assert given["USER"] not in ("root", "0") and given["STOPSIGNAL"] == "SIGTERM"
    words = json.loads(given["ENTRYPOINT"])
    assert words[:2] == ["twinreel", "serve"] and {word for word in words if word.startswith("--")} <= FLAGS
    assert "--api-key-file" in words and "8188" in given["HEALTHCHECK"] and given["EXPOSE"] == str(ServeOptions.port)
    json.loads(given["HEALTHCHECK"].partition("CMD ")[2])
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert all(f"!{word}" in ignored for word in copied), "the build would not see what it copies"


def test_systemd_unit() -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy" / "twinreel.service")
    assert set(parser) - {"DEFAULT"} == {"Unit", "Service", "Install"}
    service = parser["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[1] == "serve" and {word for word in words if word.startswith("--")} <= FLAGS
    assert service["KillMode"] == "mixed" and service["NoNewPrivileges"] == "yes" and service["DynamicUser"] == "yes"
    # finishing the job, ending it at a step, ending the engine
    assert int(service["TimeoutStopSec"]) > ServeOptions.drain_seconds + 35 + 10


def test_systemd_verifies_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ROOT / "deploy" / "twinreel.service").read_text().replace("/opt/twinreel/.venv/bin/twinreel", "/bin/true")
    (tmp_path / "twinreel.service").write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "twinreel.service"], capture_output=True, text=True)
    assert done.returncode == 0 and "Unknown" not in done.stderr, done.stderr
