"""Files cut short are refused where their own header tells, and read where it says that nobody knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from media_files import flat, id3, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.addresses import after_tag
from twinreel.media.read import read_source
from twinreel.request import Reference
from twinreel.spec import Spec, World

SPEC = Spec(world=World(short_edge=96, area_cap=96 * 168, reference_edge=128))
CLIPS = {"mp4": 90_000, "mov": 90_000, "mkv": 90_000, "avi": 24}
SOUNDS = {
    "wav": ("pcm_s16le", "s16"),
    "aiff": ("pcm_s16be", "s16"),
    "flac": ("flac", "s16"),
    "mp3": ("libmp3lame", "fltp"),
    "m4a": ("aac", "fltp"),
}


def made(folder: Path, suffix: str) -> tuple[str, bytes]:
    path = folder / f"whole.{suffix}"
    if suffix in SOUNDS:
        return "audio", write_sound(path, tone(440, 3, 44_100), 44_100, *SOUNDS[suffix]).read_bytes()
    rng = np.random.default_rng(0)
    frames = list(rng.integers(0, 256, (24, 48, 64, 3), dtype=np.uint8))
    codec = "mpeg4" if suffix == "avi" else "libx264"
    audio = "mp2" if suffix == "avi" else "aac"
    path = write_mp4(path, frames, sound=tone(440, 1, 48_000), codec=codec, audio=audio, ticks=CLIPS[suffix])
    return "video", path.read_bytes()


@pytest.mark.parametrize("suffix", [*CLIPS, *SOUNDS])
def test_a_file_cut_short_is_refused_at_every_length(tmp_path: Path, suffix: str):
    kind, whole = made(tmp_path, suffix)
    path = tmp_path / "a"
    path.write_bytes(whole)
    read_source(Reference(kind, path), SPEC, 362)
    for share in (0.02, 0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(RequestError, match="copy it again|save it again"):
            read_source(Reference(kind, path), SPEC, 362)


COVER = b"\xff\xd8\xff\xe0" + bytes(200)
FLAC_COVER = b"".join(part if isinstance(part, bytes) else part.to_bytes(4, "big") for part in
                      (3, 10, b"image/jpeg", 0, 64, 64, 24, 0, len(COVER), COVER))  # fmt: skip
# what stands before the sound, and how a frame of it begins
BEFORE: dict[str, tuple[bytes, bytes]] = {
    "cover.mp3": (id3({b"APIC": b"\0image/jpeg\0\3\0" + COVER}), b"\xff\xfb"),
    "long tag.mp3": (id3({b"TIT2": b"\0A title", b"PRIV": bytes(8000)}), b"\xff\xfb"),
    "cover.flac": (b"\6" + len(FLAC_COVER).to_bytes(3, "big") + FLAC_COVER, b"\xff\xf8"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_stands_before_a_sound_hides_no_cut(tmp_path: Path, name: str):
    before, frame = BEFORE[name]
    kind, whole = made(tmp_path, name.rpartition(".")[2])
    start = 42 if whole[:4] == b"fLaC" else 0  # behind a FLAC's first block
    data = whole[:start] + before + whole[start or after_tag(whole) :]
    path = tmp_path / "a"
    path.write_bytes(data)
    assert read_source(Reference(kind, path), SPEC, 362).seconds == 3.0
    # between two frames: nothing that is left is broken
    path.write_bytes(data[: data.rfind(frame, 0, len(data) // 2)])
    with pytest.raises(RequestError, match="of 3.00 s, truncated or damaged"):
        read_source(Reference(kind, path), SPEC, 362)


def test_a_title_is_not_taken_for_a_header_with_the_length(tmp_path: Path):
    sound = b""
    for bits in (64_000, 256_000):  # the length that is estimated by the first frame's rate is too long
        whole = write_sound(tmp_path / "a.mp3", tone(440, 3, 44_100), 44_100, *SOUNDS["mp3"], bits=bits).read_bytes()
        sound += whole[whole.index(b"\xff\xfb", whole.index(b"Info")) :]  # without the frame that has it
    for title in (b"\0A title", b"\0Information"):
        (tmp_path / "a").write_bytes(id3({b"TIT2": title}) + sound)
        assert 5.9 < read_source(Reference("audio", tmp_path / "a"), SPEC, 362).seconds < 6.3


def test_bytes_after_the_end_do_no_harm(tmp_path: Path):
    for suffix in ("mp4", "mkv", "wav", "flac", "m4a"):
        kind, whole = made(tmp_path, suffix)
        (tmp_path / "a").write_bytes(whole + bytes(5000))
        read_source(Reference(kind, tmp_path / "a"), SPEC, 362)


def test_a_live_writer_leaves_the_size_open(tmp_path: Path):
    kind, whole = made(tmp_path, "wav")
    live = bytearray(whole)
    live[4:8] = b"\xff\xff\xff\xff"
    at = live.index(b"data")
    live[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    (tmp_path / "a").write_bytes(live)
    assert read_source(Reference(kind, tmp_path / "a"), SPEC, 362).seconds == 3.0
    path = write_mp4(tmp_path / "a.mkv", [flat((9, 9, 9))] * 24)
    data = bytearray(path.read_bytes())
    segment = data.index(b"\x18\x53\x80\x67") + 4
    assert data[segment] == 1, "the test takes it that the size has eight bytes"
    data[segment : segment + 8] = b"\x01" + b"\xff" * 7
    path.write_bytes(data)
    assert len(read_source(Reference("video", path), SPEC, 362).frames) == 24
