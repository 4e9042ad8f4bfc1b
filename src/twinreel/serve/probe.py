"""Reads the media of a request in a process of its own, before the request is queued: what a client sends is decoded
neither by the server nor, unless it can be run, by the engine.

The process has limits of memory and time; a medium that takes it down is refused, and the next request gets a new one.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..launch import module
from ..plan import condition_labels, describe_plan, make_plan
from ..policy_options import format_policy, parse_policy
from ..request import Request, check_request
from ..request_json import request_from_json
from ..spec import Spec
from .child import Child, ChildLost, Voice
from .security import pathless

MEMORY_BYTES = 8 << 30
SECONDS = 60.0
STOPPED = "the server is shutting down; send it again"


def facts_of(request: Request, spec: Spec, sources: Sequence[Any] = ()) -> dict[str, Any]:
    """What is known of a job before it runs: its plan, the labels of its media, its policy. Raises RequestError."""
    plan = make_plan(request, spec, sources)
    facts = describe_plan(plan)
    facts["labels"] = [" ".join(names) for _, names in condition_labels(plan.conditions)]
    del facts["conditions"]
    facts["policy"] = format_policy(parse_policy(request.policy))
    return facts


class Probe:
    """Asks the reading process; started when first needed. One question at a time."""

    def __init__(self, command: Sequence[str] | None = None, seconds: float = SECONDS) -> None:
        self._command = list(command or module("twinreel.serve.probe"))
        self._seconds = seconds
        self._turn = threading.Lock()
        self._child: Child | None = None
        self._stopped = False

    def check(self, body: dict[str, Any], spec: Spec, model: dict[str, Any]) -> dict[str, Any]:
        """`facts_of` a request whose media are files. Raises RequestError."""
        request = request_from_json(body)
        check_request(request, spec)
        answer = self._ask({"do": "check", "body": body, "model": model})
        return dict(answer["facts"])

    def frames(self, video: Path, target: Path) -> None:
        """Write every frame of a finished video into the ZIP `target` as PNG. Raises RequestError."""
        self._ask({"do": "frames", "video": str(video), "target": str(target)})

    def stop(self) -> None:
        """End the process, whatever it reads; who waits for it is told so."""
        self._stopped, child = True, self._child
        if child is not None:
            child.stop(0.0)
        with self._turn:
            self._end()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            if self._stopped:
                raise RequestError("conditions", STOPPED)
            try:
                if self._child is None or not self._child.alive:
                    self._child = Child(self._command)
                self._child.send(order)
                end = time.monotonic() + self._seconds
                while (answer := self._child.receive(0.5)) is None:
                    # `stop` ends the process that it knows of; this one may have been started meanwhile
                    if self._stopped or time.monotonic() > end:
                        self._end(0.0)
                        late = f"reading the media took more than {self._seconds:g} s"
                        raise RequestError("conditions", STOPPED if self._stopped else late)
            except ChildLost as error:
                self._end(0.0)
                lost = f"the media cannot be read: the reader ended ({pathless(str(error))})"
                raise RequestError("conditions", STOPPED if self._stopped else lost) from None
        if "field" in answer:
            raise RequestError(answer["field"], answer["message"])
        return answer

    def _end(self, seconds: float = 2.0) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop(seconds)


def main() -> int:
    """Answer questions until the server closes the line."""
    voice = Voice()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    specs: dict[str, Spec] = {}
    for order in voice.orders():
        try:
            if order["do"] == "frames":
                write_frames(Path(order["video"]), Path(order["target"]))
                voice.say(done=True)
            else:
                voice.say(facts=check(order, specs))
        except RequestError as error:
            voice.say(field=error.field, message=error.message)
        except MemoryError:
            voice.say(field="conditions", message="need more memory to be read than is given; send smaller media")
    return 0


def check(order: dict[str, Any], specs: dict[str, Spec]) -> dict[str, Any]:
    """Read the media of one request as the engine will, and plan it. Raises RequestError."""
    from ..media.read import read_sources

    spec = _spec(order["model"], specs)
    request = request_from_json(order["body"])
    return facts_of(request, spec, read_sources(request, spec, look=True))


def _spec(model: dict[str, Any], specs: dict[str, Spec]) -> Spec:
    from ..weights import locate, read_spec

    key = json.dumps(model, sort_keys=True)
    if key not in specs:
        specs[key] = read_spec(locate(model["path"], model["components"]))
    return specs[key]


def write_frames(video: Path, target: Path) -> None:
    """A ZIP of the video's frames as `frame-00000.png`, whole or not at all. Raises RequestError."""
    import io

    import av

    from ..output import FRAME_NAME
    from ..output.placing import replacing

    try:
        with replacing(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            with av.open(str(video)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    data = io.BytesIO()
                    frame.to_image().save(data, "PNG", compress_level=3)
                    archive.writestr(zipfile.ZipInfo(FRAME_NAME.format(number)), data.getvalue())
    except (av.FFmpegError, OSError) as error:
        # the cause alone: the whole text may name the folder
        raise RequestError("frames", str(getattr(error, "strerror", None) or type(error).__name__)) from None


if __name__ == "__main__":
    sys.exit(main())
