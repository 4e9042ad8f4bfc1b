"""Hashes and the report beside a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from twinreel.output.placing import replacing
from twinreel.output.report import (
    FrameHasher,
    hash_frames,
    hash_waveform,
    sidecar_path,
    versions,
    write_report,
)


def test_frames_hash_alike_however_they_are_split():
    frames = np.random.default_rng(0).integers(0, 256, (9, 4, 6, 3), dtype=np.uint8)
    hasher = FrameHasher()
    passed = list(hasher.through(frames[i : i + 4] for i in range(0, 9, 4)))
    assert np.array_equal(np.concatenate(passed), frames) and hasher.frames == 9
    assert hasher.hexdigest() == hash_frames(frames) == hashlib.sha256(frames.tobytes()).hexdigest()
    assert hash_frames(frames[::-1]) != hash_frames(frames)


def test_waveform_hash_is_of_little_endian_floats():
    samples = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    expected = hashlib.sha256(samples.astype("<f4").tobytes()).hexdigest()
    assert hash_waveform(samples) == hash_waveform(np.asfortranarray(samples)) == expected


def test_report_lies_beside_the_file_and_adds_what_it_can(tmp_path: Path):
    path = tmp_path / "out.mp4"
    path.write_bytes(b"video")
    target = write_report(path, {"seed": 1, "sha256": {"frames": "f"}})
    assert target == sidecar_path(path) == tmp_path / "out.json"
    report = json.loads(target.read_text())
    assert report["sha256"] == {"frames": "f", "file": hashlib.sha256(b"video").hexdigest()}
    assert report["file"] == "out.mp4" and report["seed"] == 1 and report["versions"].keys() == versions().keys()
    assert {"python", "torch", "av", "transformers", "twinreel"} <= report["versions"].keys()


def test_a_file_whose_hash_is_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.mp4"
    path.write_bytes(b"video")
    monkeypatch.setattr("twinreel.output.report.hash_file", lambda path: "read again")
    target = write_report(path, {"sha256": {"file": "known"}})
    assert json.loads(target.read_text())["sha256"]["file"] == "known"


def test_a_report_that_is_no_json_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "out.mp4"
    path.write_bytes(b"video")
    write_report(path, {"seed": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_report(path, {"seed": float("nan")})
    assert json.loads((tmp_path / "out.json").read_text())["seed"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "out.mp4"]


def test_replacing_keeps_the_old_file_on_failure(tmp_path: Path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
