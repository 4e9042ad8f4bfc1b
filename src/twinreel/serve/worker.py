"""The engine's process: orders come in as JSON lines, events go out; `runner.EngineRunner` holds the other end."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Cancelled, ConfigError, RequestError, is_fatal
from ..request_json import request_from_json
from ..watch import Event
from .child import Voice
from .preview import Previewer
from .results import Results, saved_latents
from .runner import outcome_file
from .warm import warm_request

if TYPE_CHECKING:
    from ..engine import Engine

LOCK_SECONDS = 60.0  # for the engine of a server that was killed to let go of the folder
TOLD_EVERY = 0.2  # seconds between events of one stage


def main(words: Sequence[str] | None = None) -> int:
    """Serve orders until the server closes the line; `words` holds the settings as one JSON object."""
    settings = json.loads((sys.argv[1:] if words is None else words)[0])
    voice = Voice()
    orders = Orders(voice)
    threading.Thread(target=orders.listen, daemon=True).start()
    try:
        _hold(Path(settings["lock"]))
        engine = build(settings)
        for text in settings["warm"]:
            warm_up(engine, text, voice)
        voice.say(event="ready", engine=engine.describe())
    except Exception as error:  # the edge of the process: the server is told why there is no engine
        traceback.print_exc()
        voice.say(event="failed", message=f"{type(error).__name__}: {error}")
        return 1
    while True:
        order = orders.next()
        say = partial(voice.say, turn=order["turn"])  # so that it is not taken for another job's
        try:
            perform(engine, order, orders, say)
        except Cancelled:
            say(event="cancelled")
        except Exception as error:  # the edge of the job: it ends with its cause, the engine goes on
            if not isinstance(error, RequestError):
                traceback.print_exc()
            told, last = {"kind": type(error).__name__, "message": str(error)}, is_fatal(error)
            say(event="failed", **told, field=getattr(error, "field", None), last=last)
            if last:
                return 1


class Orders:
    """Reads orders in the background: jobs wait their turn, a cancel is heard at once."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled = 0

    def listen(self) -> None:
        """Read until the server is gone, then end this process and whatever it started."""
        for order in self._voice.orders():
            if order["do"] == "cancel":
                self._cancelled = order["turn"]
            else:
                self._jobs.put(order)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    def next(self) -> dict[str, Any]:
        """The next job, when there is one."""
        return self._jobs.get()

    def is_cancelled(self, turn: int) -> bool:
        """Whether the server asked for the end of this job."""
        return turn == self._cancelled


def _hold(lock: Path) -> None:
    file = lock.open("w")
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError(f"another engine works in {lock.parent}; end it first") from None
            time.sleep(0.05)
    _held.append(file)


_held: list[Any] = []  # the lock lasts as long as its open file, which is as long as the process


def build(settings: dict[str, Any]) -> Engine:
    """The engine of the settings, with a conditioning cache when it was given memory."""
    from ..conditioning import ConditionCache
    from ..config import EngineConfig
    from ..engine import Engine

    limit = settings["cache_mib"] << 20
    return Engine(EngineConfig(**settings["engine"]), cache=ConditionCache(limit) if limit else None)


def perform(engine: Engine, order: dict[str, Any], orders: Orders, say: Callable[..., None]) -> None:
    """Run one job to its outcome, which `say` tells: from saved latents that can be read, otherwise from its request."""
    folder, request = Path(order["folder"]), request_from_json(order["body"])
    results = Results(folder, order["options"])
    teller = Teller(partial(orders.is_cancelled, order["turn"]), engine, say, results)
    target, output = results.target, results.output
    saved = saved_latents(folder, engine.spec)
    if saved is not None:
        report = engine.decode(saved, target, output, teller)
        teller.say("done", outcome=results.finish(report, resumed=True))
        return
    outcome_file(folder).unlink(missing_ok=True)
    sizes = order["options"]["sizes"]
    previewer = Previewer(engine, folder, sizes, lambda name: teller.say("preview", file=name))

    def boundary(name: str, values: Any, part: int = 0, parts: int = 1) -> None:
        results.boundary(name, values)
        previewer.boundary(name, values, part)

    # from several ranks every boundary travels between processes: worth it for a preview, not for the waveform alone
    single = engine.describe().get("topology", {}).get("ranks", 1) == 1
    follow = boundary if single or previewer.active else None
    report = engine.render(request, target, output, teller, follow)
    teller.say("done", outcome=results.finish(report, resumed=False))


class Teller:
    """The watch of a running job: tells the server, and hears it."""

    def __init__(
        self, is_cancelled: Callable[[], bool], engine: Engine, say: Callable[..., None], results: Results
    ) -> None:
        self._is_cancelled, self._engine, self._say, self._results = is_cancelled, engine, say, results
        self._last = ("", 0.0)

    def __call__(self, event: Event) -> None:
        """Pass the event on, unless one of the same stage has just been; cancel when the server asked for it."""
        if self._is_cancelled():
            self._engine.cancel()
        if event.stage == "decode":
            self._results.keep_latents()
        now = time.monotonic()
        stage, told = self._last
        if event.stage != stage or now - told >= TOLD_EVERY or event.done == event.total:
            self._last = event.stage, now
            self.say("progress", stage=event.stage, done=event.done, total=event.total, eta=event.eta, note=event.note)

    def say(self, kind: str, **values: Any) -> None:
        """An event of this job."""
        self._say(event=kind, **values)


def warm_up(engine: Engine, text: str, voice: Voice) -> None:
    """Run what `text` names (`t2va@1344x768x5`). Raises ConfigError."""

    def tell(event: Event) -> None:
        voice.say(event="progress", stage=f"warm-up {event.stage}", done=event.done, total=event.total)

    try:
        engine.generate(warm_request(text), tell)
    except RequestError as error:
        raise ConfigError(f"--warm: {text}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
