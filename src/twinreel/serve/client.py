"""`twinreel.Client`: the same `Request` objects, run by a server. Standard library only; loads no torch."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ..errors import ConfigError, RequestError, TwinreelError
from ..limits import shown
from ..media.addresses import files_of
from ..output import OutputOptions, check_output, sidecar_path
from ..output.report import replacing
from ..request import Request
from ..request_json import named_in_request, request_to_json
from ..watch import Event, Watch, ignore
from .client_media import Medium, medium_of

ENDED = ("completed", "failed", "cancelled")
BLOCK = 1 << 18
TRIES = 4  # of a call whose connection breaks
Answer = dict[str, Any]


class ServerError(TwinreelError):
    """The server did not do what was asked: HTTP `status` (0: no answer), the reason, `wait` seconds if it said so."""

    def __init__(self, status: int, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.status, self.wait = status, wait


class Client:
    """A server at `url`, such as `http://127.0.0.1:8188`; `key` is its API key if it asks for one.

    Jobs are the JSON objects of the API (`docs/serving.md`). Methods raise RequestError for what the server refuses in
    a request, ServerError for the rest. `patience` is how many seconds a full or restarting server is waited for.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, patience: float = 0.0) -> None:
        self._secure, self._host, self._base = _place_of(url)
        self._timeout, self._patience = timeout, patience
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ConfigError("key: an API key is one or more printable ASCII characters; ask whoever runs the server")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def submit(self, request: Request, *, n: int = 1, priority: int = 0, once: str | None = None) -> Answer:
        """Queue `request` as `n` variants (seed, seed + 1, ...): the first job, `variants` names all.

        `once` is the idempotency key, a random one by default: a call that is repeated after a broken connection
        queues nothing twice. Media in memory and files are uploaded.
        """
        try:
            return self._submit(request, n, priority, once)
        except RequestError as error:
            raise named_in_request(error, request) from None

    def _submit(self, request: Request, n: int, priority: int, once: str | None) -> Answer:
        body, media = request_to_json(request), {}
        sources = [item.image for item in request.keyframes] + [item.source for item in request.references]
        for i, source in enumerate(sources):
            medium = medium_of(source, f"conditions[{i}].uri")
            if isinstance(medium, str):
                body["conditions"][i]["uri"] = medium
            else:
                body["conditions"][i]["uri"] = f"upload:medium-{i}"
                media[f"medium-{i}"] = medium
        body |= {"n": n, "priority": priority}
        headers = {"Idempotency-Key": once or secrets.token_hex(16)}
        end = time.monotonic() + self._patience
        while True:
            try:
                return self._upload(body, media, headers)
            except ServerError as error:
                wait = min(error.wait or 1.0, 30.0)
                if error.status not in (429, 503) or time.monotonic() + wait > end:
                    raise
                time.sleep(wait)

    def get(self, job: str) -> Answer:
        """One job as it is now."""
        return self._json("GET", f"/v1/videos/{quote(job)}")

    def list(self, **filters: Any) -> Answer:
        """A page of jobs: `limit`, `after`, `order`, `status`, `task`, `q`."""
        return self._json("GET", f"/v1/videos?{urlencode(filters)}")

    def model(self) -> Answer:
        """The weights the server runs, their limits and policies."""
        answer = self._json("GET", "/v1/models")
        return dict(answer["data"][0])

    def cancel(self, job: str) -> Answer:
        """End a job that has not ended."""
        return self._json("POST", f"/v1/videos/{quote(job)}/cancel")

    def remove(self, job: str) -> Answer:
        """Remove a job that has ended, with its files."""
        return self._json("DELETE", f"/v1/videos/{quote(job)}")

    def events(self, job: str) -> Iterator[tuple[str, Answer]]:
        """(name, job) at every change, from its present state to its end; goes on over broken connections."""
        broken = 0
        while True:
            try:
                with self._open("GET", f"/v1/videos/{quote(job)}/events") as answer:
                    for name, state in _events(answer):
                        broken = 0
                        yield name, state
                        if name in ENDED:
                            return
            except (OSError, http.client.HTTPException) as error:
                broken += 1
                if broken >= TRIES:
                    raise ServerError(0, f"{self._host} does not answer: {error}") from None
            time.sleep(min(0.2 * 2**broken, 5.0))

    def wait(self, job: str, watch: Watch = ignore) -> Answer:
        """The job when it is complete, with progress to `watch`. ServerError when it failed or was cancelled."""
        stage, start = "", time.monotonic()
        for name, state in self.events(job):
            if (running := state.get("running")) is not None:
                if running["stage"] != stage:
                    stage, start = running["stage"], time.monotonic()
                done, total, note = running["done"], running["total"], running["note"]
                watch(Event(stage, done, total, time.monotonic() - start, running["eta"], note))
            elif name == "queued":
                watch(Event("queue", 0, 0, 0.0, None, f"{state['position']} ahead"))
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

    def download(self, job: str, path: str | os.PathLike[str], variant: str = "video") -> Path:
        """Write one of a finished job's files to `path`, whole or not at all; goes on after a broken connection."""
        target, address = Path(path).absolute(), f"/v1/videos/{quote(job)}/content?variant={quote(variant)}"
        with replacing(target) as temporary, temporary.open("wb") as file:
            size: int | None = None
            for attempt in range(TRIES):
                headers = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
                try:
                    with self._open("GET", address, headers=headers) as answer:
                        size = file.tell() + int(answer.headers["Content-Length"]) if size is None else size
                        while block := answer.read(BLOCK):
                            file.write(block)
                except (OSError, http.client.HTTPException):
                    time.sleep(0.2 * 2**attempt)
                if size is not None and file.tell() == size:
                    break
            else:
                raise ServerError(0, f"{self._host} does not answer; {file.tell()} bytes of {variant} came")
        return target

    def generate(
        self,
        request: Request,
        path: str | os.PathLike[str],
        watch: Watch = ignore,
        *,
        priority: int = 0,
        overwrite: bool = False,
    ) -> Answer:
        """Queue, wait, download: the MP4 at `path`, its report beside it; returns the finished job.

        Raises RequestError before anything is queued where a file would be replaced: one that exists, unless
        `overwrite` says so, or one of the request's own media.
        """
        target = check_output(path, OutputOptions(overwrite=overwrite), needed=files_of(request))
        if target.suffix.lower() != ".mp4":
            raise RequestError("output", f"got {shown(str(path))}; a server makes MP4 files, so the name ends in .mp4")
        job = self.submit(request, priority=priority)
        try:
            job = self.wait(job["id"], watch)
        except KeyboardInterrupt:
            self.cancel(job["id"])
            raise
        self.download(job["id"], target)
        self.download(job["id"], sidecar_path(target), "report")
        return job

    def _upload(self, body: Answer, media: Mapping[str, Medium], headers: dict[str, str]) -> Answer:
        data: Any = json.dumps(body).encode()
        headers = {**headers, "Content-Type": "application/json", "Content-Length": str(len(data))}
        if not media:
            return self._json("POST", "/v1/videos", data, headers)
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

        return self._json("POST", "/v1/videos", stream, headers)

    def _json(self, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        for attempt in range(TRIES):
            try:
                with self._open(method, path, data() if callable(data) else data, headers) as answer:
                    made = json.loads(answer.read() or b"{}")
                    assert isinstance(made, dict)
                    return made
            except (OSError, http.client.HTTPException) as error:
                fault = error
                if attempt + 1 < TRIES:
                    time.sleep(0.2 * 2**attempt)
        raise ServerError(0, f"{self._host} does not answer: {fault}")

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
            if answer.status >= 400:
                raise _error(answer)
            kept = True
        finally:
            if not kept:
                connection.close()
        return _Answered(connection, answer)


def _place_of(url: Any) -> tuple[bool, str, str]:
    """(https, host and port, path before the routes) of a server's address. Raises ConfigError, which repeats no secret
    that may stand in the address."""
    how = "write http://HOST:PORT"
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.query or parts.fragment
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
    except (ValueError, TypeError, AttributeError):  # half an IPv6 address, a port beyond 65535, no text
        raise ConfigError(f"server: {_harmless(url)} is not an address; {how}") from None
    if secret:
        raise ConfigError(
            f"server: an address holds no user, password, ? or #; {how} (and the key by --server-key-file)"
        )
    if not good or not url.isprintable() or " " in url:
        raise ConfigError(f"server: {_harmless(url)} is not the address of a server; {how}")
    return parts.scheme == "https", parts.netloc, parts.path.rstrip("/")


def _harmless(url: Any) -> str:
    return "what was given" if "@" in str(url) else shown(url)


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


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Answer]]:
    name = ""
    while line := answer.readline():
        word, _, rest = line.decode("utf-8").rstrip("\r\n").partition(": ")
        if word == "event":
            name = rest
        elif word == "data":
            yield name, json.loads(rest)


def _error(answer: http.client.HTTPResponse) -> TwinreelError:
    try:
        error = json.loads(answer.read())["error"]
        message, field = str(error["message"]), error.get("field")
    except (ValueError, KeyError, TypeError):
        message, field = f"answered {answer.status} {answer.reason}", None
    if answer.status == 422:
        return RequestError(field or "request", message)
    wait = answer.headers.get("Retry-After", "")
    return ServerError(answer.status, f"{answer.status}: {message}", float(wait) if wait.isdecimal() else None)
