"""What a server answered, as the client may rely on it: whatever is not twinreel's is a ServerError that says so."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import RequestError, TwinreelError
from ..limits import shown

Answer = dict[str, Any]
LONGEST = 64 << 20  # bytes of an answer that is read whole
LONGEST_LINE = 1 << 20  # of an event
EXPECTED = "give the address of a twinreel server, http://HOST:PORT"


class ServerError(TwinreelError):
    """The server did not do what was asked: HTTP `status` (0: no answer), the reason, `wait` seconds if it said so."""

    def __init__(self, status: int, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait


def is_video(made: Any) -> bool:
    """Whether this is a job as the API describes it, as far as the client looks into it."""
    good = is_named(made) and isinstance(made.get("status"), str) and "running" in made and "position" in made
    running, error = (made.get("running"), made.get("error")) if good else (None, None)
    parts = {"stage": str, "done": int, "total": int, "eta": float | int | None, "note": str}
    runs = running is None or _has(running, parts)
    return good and runs and (error is None or _has(error, {"message": str}))


def is_named(made: Any) -> bool:
    """Whether this is a job, or what is left of one."""
    return _has(made, {"id": str, "object": str}) and made["object"] in ("video", "video.deleted")


def is_list(made: Any) -> bool:
    """Whether this is a page of jobs."""
    return _has(made, {"data": list}) and all(map(is_video, made["data"]))


def is_models(made: Any) -> bool:
    """Whether this describes weights of ours."""
    return (
        _has(made, {"data": list}) and bool(made["data"]) and _has(made["data"][0], {"tasks": list, "partitions": dict})
    )


def _has(made: Any, parts: dict[str, Any]) -> bool:
    return isinstance(made, dict) and all(isinstance(made.get(name), kind) for name, kind in parts.items())


def read_answer(answer: http.client.HTTPResponse, good: Callable[[Any], bool], host: str) -> Answer:
    """The JSON object of an answer. Raises ServerError for one that is not `good`."""
    data = answer.read(LONGEST)
    made = _decoded(data)
    if not good(made):
        raise stranger(answer, host, data)
    assert isinstance(made, dict)
    return made


def read_events(answer: http.client.HTTPResponse, host: str) -> Iterator[tuple[str, Answer]]:
    """(name, job) of each event. Raises ServerError for what is no event of a job."""
    if answer.headers.get_content_type() != "text/event-stream":
        raise stranger(answer, host, answer.read(LONGEST))
    name = ""
    while line := answer.readline(LONGEST_LINE):
        if not line.endswith(b"\n"):
            return  # cut off in the middle
        word, _, rest = line.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
        if word == "event":
            name = rest
        elif word == "data":
            state = _decoded(rest)
            if not is_video(state):
                raise stranger(answer, host, line)
            yield name, state


def refusal(answer: http.client.HTTPResponse, host: str) -> TwinreelError:
    """What an answer from 300 on means: RequestError for a request that the server refuses, else ServerError."""
    made = _decoded(answer.read(LONGEST)) if answer.status >= 400 else None
    error = made.get("error") if isinstance(made, dict) else None
    header = answer.headers.get("Retry-After", "")
    wait = float(header) if header.isdecimal() and len(header) < 10 else None
    if not _has(error, {"message": str}):
        made_of = f"; it points to {shown(answer.headers['Location'])}" if answer.headers.get("Location") else ""
        return ServerError(answer.status, f"{host} answered {_line(answer)}{made_of}; {EXPECTED}", wait)
    assert isinstance(error, dict)
    field = error.get("field")
    if answer.status == 422:
        return RequestError(field if isinstance(field, str) and field else "request", error["message"])
    return ServerError(answer.status, f"{answer.status}: {error['message']}", wait)


def stranger(answer: http.client.HTTPResponse, host: str, data: bytes) -> ServerError:
    """The error for an answer that no twinreel server gives."""
    begins = shown(data[:60].decode("utf-8", "replace")) if data else "nothing"
    kind = shown(answer.headers.get("Content-Type", "no type"))[1:-1]
    return ServerError(
        answer.status, f"{host} is no twinreel server: it answered {_line(answer)} ({kind}) with {begins}; {EXPECTED}"
    )


def _line(answer: http.client.HTTPResponse) -> str:
    return f"{answer.status} {answer.reason}".strip()


def _decoded(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
