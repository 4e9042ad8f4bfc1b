"""`twinreel.Client`: the same `Request` objects, run by a server. Standard library only; loads no torch."""

from __future__ import annotations

import errno
import http.client
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

from ..errors import RequestError, TwinreelError
from ..limits import shown
from ..media.addresses import files_of
from ..output import OutputOptions, check_output, sidecar_path
from ..output.placing import give_free_name, place_output, replace, unfinished
from ..request import Request
from ..request_json import named_in_request, request_to_json
from ..watch import Event, Watch, ignore
from .client_answers import (
    EXPECTED,
    Answer,
    ServerError,
    is_list,
    is_models,
    is_named,
    is_video,
    read_answer,
    read_events,
    refusal,
    stranger,
)
from .client_arguments import (
    PATIENCE,
    TIMEOUT,
    check_filters,
    check_order,
    check_watch,
    headers_of,
    place_of,
    route_of,
    seconds_of,
    target_of,
)
from .client_media import Medium, medium_of

ENDED = ("completed", "failed", "cancelled")
BLOCK = 1 << 18
TRIES = 4  # of a call whose connection breaks, however short the patience
LONGEST_PAUSE = 30.0
UNREACHABLE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET)
PASSING = (429, 502, 503, 504)  # a full server, one that restarts, and what a proxy says of it then
# What a call may fail with that may pass; RemoteDisconnected is an OSError, too.
_FAULTS = (OSError, http.client.HTTPException, ServerError)


class _Patience:
    """Whether a call that failed is tried again. It begins anew with `fresh`, whenever something has come."""

    def __init__(self, seconds: float, host: str, job: str | None = None) -> None:
        self._seconds, self._host, self._name = seconds, host, "" if job is None else f"{job}: "
        self._most = 0
        self.fresh()

    def fresh(self) -> None:
        """The server has done something: count from its next failure on."""
        self._tries, self._end = 0, -1.0

    def reached(self, size: int) -> None:
        """So many bytes have come; only what goes beyond all that came before is something done."""
        if size > self._most:
            self._most = size
            self.fresh()

    def wait(self, error: Exception) -> None:
        """Sleep before the next try, or raise what `error` means."""
        if self._end < 0:
            self._end = time.monotonic() + self._seconds
        self._tries += 1
        if not isinstance(error, ServerError) and not _of_connection(error):
            raise error  # of a file of this machine: one that is sent, or the one that is written
        if isinstance(error, ServerError):
            pause = min(error.wait or 1.0, LONGEST_PAUSE)
            again = error.status in PASSING and time.monotonic() + pause <= self._end
        else:
            pause = min(0.1 * 2**self._tries, LONGEST_PAUSE)
            again = self._tries < TRIES or _passes(error) and time.monotonic() + pause <= self._end
        if not again:
            raise self._named(error) from None
        time.sleep(pause)

    def _named(self, error: Exception) -> TwinreelError:
        """The error as it is told, with the job it is about."""
        if isinstance(error, ServerError):
            told = str(error)
            return error if not self._name or self._name[:-2] in told else _like(error, f"{self._name}{told}")
        why = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError | http.client.IncompleteRead):
            return ServerError(0, f"{self._name}{self._host} is no twinreel server: it answered {why}; {EXPECTED}")
        return ServerError(0, f"{self._name}{self._host} does not answer: {why}; check that it runs there")


class Client:
    """A server at `url`, such as `http://127.0.0.1:8188`; `key` is its API key if it asks for one.

    Jobs are the JSON objects of the API (`docs/serving.md`). Methods raise RequestError for arguments that mean nothing,
    before anything is sent or written, and for what the server refuses in a request, ServerError for the rest; the class
    itself raises ConfigError. `timeout` is how many seconds an answer may be silent; `patience` is how many a full,
    restarting or unreachable server is waited for, each time anew, by `submit`, `events`, `wait`, `download` and the
    short questions. Neither is more than a week, 604,800 s.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, patience: float = 0.0) -> None:
        self._secure, self._host, self._base = place_of(url)
        self._headers = headers_of(key)
        self._timeout = seconds_of("timeout", timeout, TIMEOUT)
        self._patience = seconds_of("patience", patience, PATIENCE)

    def submit(self, request: Request, *, n: int = 1, priority: int = 0, once: str | None = None) -> Answer:
        """Queue `request` as `n` variants (seed, seed + 1, ...): the first job, `variants` names all.

        `once` is the idempotency key, a random one by default: a call that is repeated after a broken connection
        queues nothing twice. Media in memory and files are uploaded.
        """
        numbers = check_order(request, n=n, priority=priority, once=once)
        try:
            return self._submit(request, numbers, once)
        except RequestError as error:
            raise named_in_request(error, request) from None

    def _submit(self, request: Request, numbers: Answer, once: str | None) -> Answer:
        body, media = request_to_json(request), {}
        sources = [item.image for item in request.keyframes] + [item.source for item in request.references]
        for i, source in enumerate(sources):
            medium = medium_of(source, f"conditions[{i}].uri")
            if isinstance(medium, str):
                body["conditions"][i]["uri"] = medium
            else:
                body["conditions"][i]["uri"] = f"upload:medium-{i}"
                media[f"medium-{i}"] = medium
        body |= numbers
        headers = {"Idempotency-Key": secrets.token_hex(16) if once is None else once}
        return self._upload(body, media, headers)

    def get(self, job: str) -> Answer:
        """One job as it is now."""
        return self._json("GET", route_of(job), is_video, job=job)

    def list(self, **filters: Any) -> Answer:
        """A page of jobs: `limit`, `after`, `order`, `status`, `task`, `q`."""
        check_filters(filters)
        return self._json("GET", f"/v1/videos?{urlencode(filters)}", is_list)

    def model(self) -> Answer:
        """The weights the server runs, their limits and policies."""
        answer = self._json("GET", "/v1/models", is_models)
        return dict(answer["data"][0])

    def cancel(self, job: str) -> Answer:
        """End a job that has not ended."""
        return self._json("POST", f"{route_of(job)}/cancel", is_video, job=job)

    def remove(self, job: str) -> Answer:
        """Remove a job that has ended, with its files."""
        return self._json("DELETE", route_of(job), is_named, job=job)

    def events(self, job: str) -> Iterator[tuple[str, Answer]]:
        """(name, job) at every change, from its present state to its end; goes on over broken connections."""
        route, patience = f"{route_of(job)}/events", _Patience(self._patience, self._host, job)
        while True:
            told = False
            try:
                with self._open("GET", route) as answer:
                    for name, state in read_events(answer, self._host):
                        told = True
                        patience.fresh()
                        yield name, state
                        if name in ENDED:
                            return
                if not told:
                    raise http.client.IncompleteRead(b"")
                time.sleep(0.2)  # it shuts down, and ends its streams first
            except _FAULTS as error:
                patience.wait(error)

    def wait(self, job: str, watch: Watch = ignore) -> Answer:
        """The job when it is complete, with progress to `watch`. ServerError when it failed or was cancelled."""
        check_watch(watch)
        stage, start = "", time.monotonic()
        for name, state in self.events(job):
            if (running := state.get("running")) is not None:
                if running["stage"] != stage:
                    stage, start = running["stage"], time.monotonic()
                done, total, note = running["done"], running["total"], running["note"]
                watch(Event(stage, done, total, time.monotonic() - start, running["eta"], note))
            elif name == "queued":
                place = state["position"]
                watch(Event("queue", 0, 0, 0.0, None, f"{place} ahead" if place else "next in line"))
            if name == "failed":
                error = state["error"]
                if error.get("code") == "RequestError":
                    raise RequestError(error.get("field") or "request", error["message"])
                raise ServerError(0, f"{job} failed: {error['message']}")
            if name == "cancelled":
                raise ServerError(0, f"{job} was cancelled")
            if name == "completed":
                return state
        raise ServerError(0, f"{job} is gone")

    def download(
        self, job: str, path: str | os.PathLike[str], variant: str = "video", *, overwrite: bool = False
    ) -> Path:
        """Write one of a finished job's files to `path`, whole or not at all; goes on after a broken connection.

        Returns its name: `path`, or its next number where that was taken meanwhile. Raises RequestError for a path that
        no file can have, and for a file that exists, unless `overwrite` says so.
        """
        route_of(job)
        target = target_of(path, variant, overwrite)
        with unfinished(target) as temporary:
            self._fetch(job, temporary, variant)
            if not overwrite:
                return give_free_name(temporary, target)
            replace(temporary, target)
            return target

    def _fetch(self, job: str, temporary: Path, variant: str) -> None:
        address = f"{route_of(job)}/content?variant={quote(variant, '')}"
        patience = _Patience(self._patience, self._host, job)
        with temporary.open("wb") as file:
            while True:
                headers = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
                try:
                    with self._open("GET", address, headers=headers) as answer:
                        if self._take(answer, file, patience):
                            return
                    raise http.client.IncompleteRead(b"")
                except _FAULTS as error:
                    patience.wait(error)

    def _take(self, answer: http.client.HTTPResponse, file: BinaryIO, patience: _Patience) -> bool:
        """Write what comes behind what has come; whether that is all of it."""
        if answer.status == 200 and file.tell():  # the whole again
            file.seek(0)
            file.truncate()
        size = answer.headers.get("Content-Length", "")
        if answer.status not in (200, 206) or not size.isdecimal():
            raise stranger(answer, self._host, answer.read(BLOCK))
        end = file.tell() + int(size)
        while block := answer.read(BLOCK):
            file.write(block)
            patience.reached(file.tell())
        return file.tell() == end

    def generate(
        self,
        request: Request,
        path: str | os.PathLike[str],
        watch: Watch = ignore,
        *,
        priority: int = 0,
        overwrite: bool = False,
    ) -> Answer:
        """Queue, wait, download: the MP4 at `path`, its report beside it; returns the finished job with the `path`.

        Raises RequestError before anything is queued where a file would be replaced: one that exists, unless
        `overwrite` says so, or one of the request's own media. What takes the name while the job waits or runs stays:
        the result is `NAME-2.mp4` then, and `path` says so.
        """
        check_order(request, priority=priority)
        check_watch(watch)
        target = check_output(path, OutputOptions(overwrite=overwrite), needed=files_of(request))
        if target.suffix.lower() != ".mp4":
            raise RequestError("output", f"got {shown(str(path))}; a server makes MP4 files, so the name ends in .mp4")
        job = self.submit(request, priority=priority)
        try:
            job = self.wait(job["id"], watch)
        except KeyboardInterrupt as stop:
            try:
                self._json("POST", f"{route_of(job['id'])}/cancel", is_video, patience=0.0)
            except TwinreelError as error:
                stop.add_note(f"{job['id']} may still run: {error}")
            raise
        with unfinished(target) as video, unfinished(sidecar_path(target)) as report:
            self._fetch(job["id"], video, "video")
            self._fetch(job["id"], report, "report")
            name = place_output(video, target, overwrite)
            (replace if overwrite and name == target else give_free_name)(report, sidecar_path(name))
        if name != target:
            job["warnings"] = [*job.get("warnings", ()), f"{target} was taken meanwhile and is kept; see {name}"]
        return job | {"path": str(name)}

    def _upload(self, body: Answer, media: Mapping[str, Medium], headers: dict[str, str]) -> Answer:
        data: Any = json.dumps(body).encode()
        headers = {**headers, "Content-Type": "application/json", "Content-Length": str(len(data))}
        if not media:
            return self._json("POST", "/v1/videos", is_video, data, headers)
        mark = secrets.token_hex(16)
        parts = [(_part_head(mark, "request"), Medium(data=data))]
        parts += [(_part_head(mark, name, "file"), medium) for name, medium in media.items()]
        end = f"--{mark}--\r\n".encode()
        headers["Content-Type"] = f"multipart/form-data; boundary={mark}"
        headers["Content-Length"] = str(sum(len(head) + medium.size() + 2 for head, medium in parts) + len(end))

        def stream() -> Iterator[bytes]:
            for head, medium in parts:
                yield head
                yield from medium.blocks()
                yield b"\r\n"
            yield end

        return self._json("POST", "/v1/videos", is_video, stream, headers)

    def _json(
        self,
        method: str,
        path: str,
        good: Callable[[Any], bool],
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        job: str | None = None,
        patience: float | None = None,
    ) -> Answer:
        waits = _Patience(self._patience if patience is None else patience, self._host, job)
        while True:
            try:
                with self._open(method, path, data() if callable(data) else data, headers) as answer:
                    return read_answer(answer, good, self._host)
            except _FAULTS as error:
                waits.wait(error)

    def _open(self, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None) -> _Answered:
        if self._secure:
            context = ssl.create_default_context()
            connection: Any = http.client.HTTPSConnection(self._host, timeout=self._timeout, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, timeout=self._timeout)
        try:
            connection.request(method, f"{self._base}{path}", data, {**self._headers, **(headers or {})})
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses a body answers before it has all of it: the answer says why
        kept = False
        try:
            answer = connection.getresponse()
            if answer.status >= 300:
                raise refusal(answer, self._host)
            kept = True
        finally:
            if not kept:
                connection.close()
        return _Answered(connection, answer)


class _Answered:
    """An answer whose connection closes with the block."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection, self._answer = connection, answer

    def __enter__(self) -> http.client.HTTPResponse:
        return self._answer

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def _part_head(mark: str, name: str, file: str | None = None) -> bytes:
    shown = "" if file is None else f'; filename="{file}"'
    return f'--{mark}\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'.encode()


def _of_connection(error: Exception) -> bool:
    kinds = ConnectionError | TimeoutError | socket.gaierror | ssl.SSLError | http.client.HTTPException
    return isinstance(error, kinds) or isinstance(error, OSError) and error.errno in UNREACHABLE


def _passes(error: Exception) -> bool:
    """Whether time may mend it: a name that nobody has, a certificate or a server of another kind stays as it is."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError | http.client.IncompleteRead)


def _like(error: ServerError, message: str) -> ServerError:
    return ServerError(error.status, message, error.wait)
