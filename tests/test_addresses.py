"""What may be opened, and that its kind is judged by content: no name, playlist or script decides."""

from __future__ import annotations

import base64
import os
import socket
from pathlib import Path

import pytest
from PIL import Image

from media_files import flat, tone, write_mp4, write_sound
from twinreel.errors import RequestError
from twinreel.media.addresses import MEDIA, OTHER, files_of, judge, open_address
from twinreel.media.read import read_source
from twinreel.request import Reference, Request
from twinreel.spec import Spec

SCRIPTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{file}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{file}'\n",
    "ffmetadata": ";FFMETADATA1\ntitle=a\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nm=video 5004 RTP/AVP 96\n",
    "dash": '<?xml version="1.0"?><MPD><BaseURL>{file}</BaseURL></MPD>',
    "smil": "<smil><body><video src='{file}'/></body></smil>",
    "svg": '<svg xmlns="http://www.w3.org/2000/svg"><image href="{file}"/></svg>',
    "m3u": "{file}\n",
    "avisynth": 'DirectShowSource("{file}")\n',
    "subtitles": "1\n00:00:00,000 --> 00:00:01,000\nHello\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("suffix", [".mp4", ".m3u8", ".png"])
def test_scripts_are_text_whatever_their_name(tmp_path: Path, name: str, suffix: str):
    real = write_mp4(tmp_path / "real.mp4", [flat((9, 9, 9))] * 2)
    path = tmp_path / f"a{suffix}"
    path.write_text(SCRIPTS[name].format(file=real))
    for kind in ("image", "video", "audio"):
        with pytest.raises(RequestError, match="is text") as caught:
            read_source(Reference(kind, path), Spec(), 24, "references[0]")
        assert caught.value.field == "references[0].source"


@pytest.mark.parametrize(
    "head",
    [
        b"%PDF-1.7\n",
        b"PK\3\4" + bytes(60),
        "tëxt".encode("utf-16"),
        b"\xff\xfe\0\0",
        bytes(5000),
        b"\x7fELF" + bytes(60),
    ],
)
def test_other_bytes_are_no_media(head: bytes):
    assert judge(head)[0] == OTHER and judge(head)[2] is None


def test_the_content_decides_and_not_the_name(tmp_path: Path):
    clip = write_mp4(tmp_path / "a.mp4", [flat((9, 9, 9), 96, 96)] * 2)
    sound = write_sound(tmp_path / "a.wav", tone(440, 0.2, 8000), 8000, "pcm_s16le", "s16")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.bmp")
    for path, kind in ((clip, "video"), (sound, "audio"), (tmp_path / "a.bmp", "image")):
        for name in ("x.m3u8", "x.txt", "x.concat", "x", "x.jpg"):
            (tmp_path / name).write_bytes(path.read_bytes())
            read_source(Reference(kind, tmp_path / name), Spec(), 24)


def test_a_tag_of_titles_hides_nothing(tmp_path: Path):
    tag = b"ID3\4\0\0" + bytes([0, 0, 0x27, 0x10]) + bytes((0x27 << 7) + 0x10)
    flac = write_sound(tmp_path / "a.flac", tone(440, 0.2, 8000), 8000, "flac", "s16").read_bytes()
    (tmp_path / "tagged").write_bytes(tag + flac)
    with open_address(tmp_path / "tagged", "f").stream as stream:
        assert stream.tell() == 0
    assert open_address(tmp_path / "tagged", "f").demuxer == "flac"
    assert read_source(Reference("audio", tmp_path / "tagged"), Spec(), 24).samples.shape == (1, 1600)


def test_transport_packets_of_both_lengths():
    assert judge((b"\x47" + bytes(187)) * 10)[::2] == (MEDIA, "mpegts")
    assert judge((bytes(4) + b"\x47" + bytes(187)) * 10)[::2] == (MEDIA, "mpegts")
    assert judge(b"\x47" + bytes(187) + b"\x47" + bytes(900))[0] == OTHER


def test_what_is_no_file_is_refused_by_name(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = [
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path / "socket", "is a socket"),
        ("/dev/zero", "is a device"),
        (tmp_path / "empty", "empty"),
        (tmp_path / "missing", "no file at"),
        (tmp_path / "empty" / "inside", "no file at|cannot open"),
        (tmp_path / "loop", "no file at|cannot open"),
        ("x" * 5000, "cannot open|no file"),
        ("a\0b", "cannot open|no file"),
        ("", "give a path"),
        ("http://example.com/a.mp4", "download it"),
        ("s3://bucket/a.mp4", "download it"),
        ("concat:a.ts|b.ts", "no file at"),
        ("data:text/plain,abc", ";base64,"),
        ("data:;base64,", "empty"),
        ("DATA:;base64,!!", "not base64"),
        ("file://host/a.png", "host"),
        ("file://[abc/x.png", "no address; use file:///absolute/path"),
        ("FILE://a℀b/x.png", "no address; use file:///absolute/path"),
    ]
    for source, words in cases:
        with pytest.raises(RequestError, match=words) as caught:
            open_address(source, "references[0].source")
        assert caught.value.field == "references[0].source"
    files_of(Request("a", references=tuple(Reference("image", source) for source, _ in cases)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"abc")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(RequestError, match="permission"):
        open_address(tmp_path / "secret", "f")


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RequestError, match="Permission denied.*check its name and permissions"):
        open_address(tmp_path / "a", "f")


def test_data_addresses_take_line_breaks():
    text = base64.encodebytes(b"GIF89a" + bytes(200)).decode()
    assert open_address("data:image/gif;base64," + text, "f").stream.read(6) == b"GIF89a"
