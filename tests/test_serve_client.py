"""`twinreel.Client` against a server with a stub runner: the same requests, media from memory, broken connections."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from serve_stub import Running, StubRunner, call, content, running, until
from twinreel import Client, Clip, ConfigError, Keyframe, Picture, Reference, Request, RequestError, Sound
from twinreel.cli import main
from twinreel.media.read import read_source
from twinreel.serve import app, service
from twinreel.serve.client import ServerError
from twinreel.serve.client_arguments import ONCE_CHARACTERS, VARIANTS
from twinreel.serve.client_media import clip_bytes, picture_bytes, wav_bytes
from twinreel.spec import Spec
from twinreel.watch import Event

RNG = np.random.default_rng(5)
PICTURE = Picture(RNG.integers(0, 256, (64, 96, 3), dtype=np.uint8))
SOUND = Sound(RNG.uniform(-1, 1, (2, 40_000)).astype(np.float32), 32_000)
CLIP = Clip(RNG.integers(0, 256, (30, 64, 96, 3), dtype=np.uint8), 24.0, SOUND)


@pytest.fixture(scope="module")
def site(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("client") / "data", tiny_original, StubRunner(0.05)) as made:
        until(lambda: call(f"{made.url}/ready")[0] == 200)
        yield made


@pytest.fixture
def client(site: Running) -> Client:
    return Client(site.url)


def test_generate(client: Client, tmp_path: Path) -> None:
    events: list[Event] = []
    job = client.generate(Request("A bell.", duration=1, seed=9), tmp_path / "a.mp4", events.append)
    assert (tmp_path / "a.mp4").read_bytes() == content("A bell.", 9) and job["status"] == "completed"
    assert json.loads((tmp_path / "a.json").read_text()) == {"seed": 9}
    assert events[-1].stage in ("denoise", "decode") and events[-1].total


def test_nothing_is_replaced_unasked(client: Client, site: Running, tmp_path: Path) -> None:
    """Neither a file that exists nor, at all, a medium of the request; and no job is queued for it."""
    before = site.service.jobs.ids()
    taken, picture = tmp_path / "taken.mp4", tmp_path / "picture.json"
    taken.write_bytes(b"mine")
    Image.fromarray(PICTURE.pixels).save(picture, "PNG")
    with pytest.raises(RequestError, match="taken.mp4"):
        client.generate(Request("A bell.", duration=1), taken)
    own = Request("A bell.", keyframes=(Keyframe(picture),), duration=1)
    with pytest.raises(RequestError, match="needs"):
        client.generate(own, tmp_path / "picture.mp4", overwrite=True)
    with pytest.raises(RequestError, match="ends in .mp4"):
        client.generate(own, tmp_path / "other.mkv")
    assert site.service.jobs.ids() == before and taken.read_bytes() == b"mine"
    client.generate(Request("A bell.", duration=1), taken, overwrite=True)
    assert taken.read_bytes() == content("A bell.", 42)


def test_every_field_of_a_request_arrives(client: Client, site: Running) -> None:
    request = Request(
        "p", duration=1, size=(96, 64), steps=7, seed=3, shifts=(5.0, 2.0), noise="sequential", policy="forecast:fast"
    )
    job = client.submit(request, priority=4, n=2)
    stored = site.service.jobs.get(job["id"])
    assert stored is not None and stored.facts["canvas"] == [96, 64] and stored.facts["shifts"] == [5.0, 2.0]
    assert (job["steps"], job["policy"], job["priority"], len(job["variants"])) == (7, "forecast:fast", 4, 2)
    assert client.wait(job["variants"][1])["seed"] == 4


def test_media_of_every_kind_are_uploaded(client: Client, site: Running, tmp_path: Path) -> None:
    Image.fromarray(PICTURE.pixels).save(tmp_path / "a b.png")
    request = Request(
        "<Picture 1> <Video 1> <Audio 1>",
        references=(
            Reference("image", str(tmp_path / "a b.png")),
            Reference("video_audio", CLIP),
            Reference("audio", SOUND),
        ),
        duration=1,
    )
    job = client.wait(client.submit(request)["id"])
    labels = [item["label"] for item in job["inputs"]]
    assert labels == ["Picture 1", "Audio 1 Video 1", "Audio 2"]
    assert call(site.url + job["inputs"][0]["url"])[1] == (tmp_path / "a b.png").read_bytes()
    image = Image.fromarray(PICTURE.pixels)
    job = client.submit(Request("p", keyframes=(Keyframe(PICTURE.pixels), Keyframe(image, -1)), duration=1))
    assert [item["frame_index"] for item in job["inputs"]] == [0, -1]


def test_media_in_memory_arrive_bit_for_bit(tmp_path: Path) -> None:
    spec = Spec()
    for name, data in (("p", picture_bytes(PICTURE, "")), ("s", wav_bytes(SOUND)), ("c", clip_bytes(CLIP))):
        (tmp_path / name).write_bytes(data)
    assert np.array_equal(read_source(Keyframe(str(tmp_path / "p")), spec, 99).pixels, PICTURE.pixels)  # type: ignore[union-attr]
    sound = read_source(Reference("audio", str(tmp_path / "s")), spec, 99)
    assert isinstance(sound, Sound) and sound.rate == 32_000 and np.array_equal(sound.samples, SOUND.samples)
    clip = read_source(Reference("video", str(tmp_path / "c")), spec, 99)
    direct = read_source(Reference("video", CLIP), spec, 99)
    assert isinstance(clip, Clip) and isinstance(direct, Clip) and clip.sound is not None and direct.sound is not None
    assert np.array_equal(clip.frames, direct.frames) and np.array_equal(clip.sound.samples, direct.sound.samples)


def test_errors_are_the_same_as_at_home(client: Client, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        client.submit(Request("p", duration=99))
    assert caught.value.field == "duration"  # as at home; the JSON says target.duration_seconds
    with pytest.raises(RequestError, match="no file"):
        client.submit(Request("p", keyframes=(Keyframe("nowhere.png"),)))
    with pytest.raises(RequestError, match="no address"):
        client.submit(Request("p", keyframes=(Keyframe("file://[abc/x.png"),)))
    with pytest.raises(RequestError, match="text"):
        (tmp_path / "text.png").write_text("words")
        client.submit(Request("p", keyframes=(Keyframe(tmp_path / "text.png"),)))
    with pytest.raises(ServerError, match="not finite"):
        client.generate(Request("fail", duration=1), tmp_path / "x.mp4")
    with pytest.raises(ServerError) as lost:
        client.get("video_none")
    assert lost.value.status == 404
    with pytest.raises(ServerError, match="does not answer"):
        Client("http://127.0.0.1:9").model()


@pytest.mark.parametrize(
    "address",
    ["localhost:80", "ftp://host", "http://", "http://:80", "http://[::1", "http://host:99999", "http://host:x", "",
     "http://a b/", "http://host/\n", "http://host/é", "http://" + "a" * 300, "http://user:secret@host:80",
     "user:secret@host", "http://secret@host", "http://host?key=secret", "http://host/#secret", 5, None, b"http://host"],
)  # fmt: skip
def test_addresses_of_no_server(address: Any) -> None:
    with pytest.raises(ConfigError, match="^server: .*write http://HOST:PORT") as caught:
        Client(address)
    assert "secret" not in str(caught.value)


NUMBERS = ("x", None, math.nan, math.inf, -1, True, 10**400)


@pytest.mark.parametrize(
    ("name", "value"),
    [("key", key) for key in ("", "a\nb", "schlüssel", 5, b"key-of-bytes")]
    + [("timeout", value) for value in (0, 1e9, *NUMBERS)]
    + [("patience", value) for value in NUMBERS],
)
def test_what_no_client_can_be_made_with(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: ") as caught:
        Client("http://127.0.0.1:8188", **{name: value})
    assert name == "key" or "got" in str(caught.value) and "0" in str(caught.value) and len(str(caught.value)) < 300
    Client("http://127.0.0.1:8188", timeout=np.float32(3), patience=0)  # type: ignore[arg-type]


P = Request("p", duration=1)
ODD_REQUESTS: list[tuple[str, Any]] = [("request", None), ("request", "p"), ("request", {"prompt": "p"}),
    ("prompt", Request(5)), ("keyframes", Request("p", keyframes=5)), ("keyframes", Request("p", keyframes=("a.png",))),
    ("size", Request("p", size=5)), ("shifts", Request("p", shifts=5)), ("duration", Request("p", duration=object())),
    ("seed", Request("p", seed=object())), ("policy", Request("p", policy=5))]  # type: ignore[arg-type] # fmt: skip
ODD: list[tuple[str, Callable[[Client], Any]]] = [
    *((name, lambda client, odd=odd: client.submit(odd)) for name, odd in ODD_REQUESTS),
    *((name, lambda client, odd=odd: client.generate(odd, "a.mp4")) for name, odd in ODD_REQUESTS),
    *(("n", lambda client, odd=odd: client.submit(P, n=odd)) for odd in ("x", None, 2.0, True)),
    *(("priority", lambda client, odd=odd: client.submit(P, priority=odd)) for odd in ("x", None, 2.0)),
    *(("once", lambda client, odd=odd: client.submit(P, once=odd)) for odd in ("", "a\nb", "é", " a", 5, "a" * 201)),
    *(
        ("job", lambda client, do=do, odd=odd: do(client)(odd))
        for odd in (None, "", 5, {"id": "video_1"}, "\ud800", "a\0")
        for do in (
            lambda c: c.get,
            lambda c: c.cancel,
            lambda c: c.remove,
            lambda c: c.wait,
            lambda c: lambda job: list(c.events(job)),
            lambda c: lambda job: c.download(job, "a.mp4"),
        )
    ),
    *(
        ("path", lambda client, odd=odd: client.download("video_1", odd, overwrite=True))
        for odd in (None, 5, "", ".", "/", "none/a.mp4", "folder", "file/a.mp4", "link.mp4", "x" * 300, "a\0b")
    ),
    ("path", lambda client: client.download("video_1", "file")),
    *(("variant", lambda client, odd=odd: client.download("video_1", "a", odd)) for odd in (None, "zz", 5)),
    ("overwrite", lambda client: client.download("video_1", "a", overwrite="no")),
    ("overwrite", lambda client: client.generate(P, "a.mp4", overwrite="no")),
    ("watch", lambda client: client.generate(P, "a.mp4", 5)),
    ("watch", lambda client: client.wait("video_1", None)),
    ("priority", lambda client: client.generate(P, "a.mp4", priority="x")),
    ("status", lambda client: client.list(status=None)),
    ("q", lambda client: client.list(q="\ud800")),
]  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(("field", "ask"), ODD)
def test_arguments_that_mean_nothing_are_refused_before_anything_is_sent(
    field: str, ask: Callable[[Client], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("something was about to be sent")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.mp4").symlink_to("file")
    monkeypatch.setattr(Client, "_open", opened)
    with pytest.raises(RequestError) as caught:
        ask(Client("http://127.0.0.1:8188"))
    assert caught.value.field.startswith(field) and len(str(caught.value)) < 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link.mp4"]


def test_what_the_client_allows_is_what_the_server_takes() -> None:
    assert ONCE_CHARACTERS == service.ONCE_CHARACTERS and get_args(app.Variant) == VARIANTS


def test_a_key_of_ones_own_is_used(client: Client) -> None:
    jobs = [client.submit(P, once="mine") for _ in range(2)]
    assert jobs[0]["id"] == jobs[1]["id"]


def test_cancel_list_and_remove(client: Client) -> None:
    job = client.submit(Request("slow", duration=1))
    client.cancel(job["id"])
    with pytest.raises(ServerError, match="cancelled"):
        client.wait(job["id"])
    assert client.list(status="cancelled", limit=5)["data"][0]["id"] == job["id"]
    assert client.remove(job["id"])["deleted"] and client.model()["tasks"]


class Breaking:
    """A way to the server that breaks its first connections after some bytes of the answer."""

    def __init__(self, port: int, breaks: int, after: int) -> None:
        self.wire = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.wire.getsockname()[1]}"
        self.port, self.breaks, self.after, self.broken = port, breaks, after, 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self.wire.accept()
            except OSError:
                return
            threading.Thread(
                target=self._carry, args=(near, socket.create_connection(("127.0.0.1", self.port)))
            ).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
        most = None
        if self.broken < self.breaks:
            self.broken += 1
            most = self.after
        self._pump(far, near, most)
        for wire in (near, far):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)  # a close alone says nothing while the other thread reads
            wire.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, most: int | None) -> None:
        try:
            while data := source.recv(4096):
                data = data if most is None else data[:most]
                target.sendall(data)
                most = None if most is None else most - len(data)
                if most is not None and most <= 0:
                    return
        except OSError:
            pass


def test_broken_connections(site: Running, tmp_path: Path) -> None:
    """A post whose answer is lost queues nothing twice; a download goes on where it broke; events come again."""
    before = len(site.service.jobs.ids())
    way = Breaking(site.port, 2, 0)
    job = Client(way.url).submit(Request("lost answers", duration=1))
    assert way.broken == 2 and len(site.service.jobs.ids()) == before + 1
    for after in (600, 9000):
        way = Breaking(site.port, 2, after)
        Client(way.url).wait(job["id"])
        Client(way.url).download(job["id"], tmp_path / "a.mp4", overwrite=True)
        assert way.broken == 2 and (tmp_path / "a.mp4").read_bytes() == content("lost answers", 42)


def test_a_full_server_is_waited_for(tiny_original: Path, tmp_path: Path) -> None:
    runner = StubRunner()
    runner.gate.clear()
    with running(tmp_path / "data", tiny_original, runner, max_queued=1) as site:
        site.service.dispatcher.seconds_a_job = 0.1
        client = Client(site.url)
        first = client.submit(Request("a", duration=1))
        until(lambda: first["id"] in runner.ran)
        client.submit(Request("b", duration=1))
        with pytest.raises(ServerError) as caught:
            client.submit(Request("c", duration=1))
        assert caught.value.status == 429 and caught.value.wait == 1
        threading.Timer(0.3, runner.gate.set).start()
        patient = Client(site.url, patience=20)
        assert patient.wait(patient.submit(Request("c", duration=1))["id"])["status"] == "completed"


def test_the_command_line(site: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "out.mp4")
    assert (
        main(["generate", "A bell.", "--seed", "2", "--duration", "1", "--server", site.url, "-o", output, "-q"]) == 0
    )
    assert Path(output).read_bytes() == content("A bell.", 2) and "seed 2" in capsys.readouterr().out
    assert main(["generate", "A bell.", "--server", site.url, "-o", output, "-q"]) == 2  # it exists
    assert main(["generate", "A bell.", "--server", site.url, "-o", str(tmp_path / "x.mkv")]) == 2
    assert main(["generate", "A bell.", "--server", site.url, "--device", "cpu", "-o", str(tmp_path / "x.mp4")]) == 3
    assert main(["serve", "--host", "0.0.0.0", "--data", str(tmp_path / "d")]) == 3
    assert "api-key-file" in capsys.readouterr().err


def test_a_launchers_processes_do_not_all_ask_a_server(
    site: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    before = site.service.jobs.ids()
    assert main(["generate", "A bell.", "--server", site.url, "-o", str(tmp_path / "x.mp4")]) == 3
    assert "--server\n  is for one process, and WORLD_SIZE says 2" in capsys.readouterr().err
    assert site.service.jobs.ids() == before
    for words in (["serve", "--data", str(tmp_path / "d")], ["bench", "ops"], ["quantize", "a", "b"], ["validate"]):
        assert main(words) == 3
        assert f"{words[0]}\n  is for one process, and WORLD_SIZE says 2" in capsys.readouterr().err
