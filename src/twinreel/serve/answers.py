"""Errors as answers of one shape, and the gate that every request comes through."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from ..limits import shown
from .jobs import Conflict, QueueFull
from .security import HEADERS, Refusal
from .service import Service, Unavailable
from .shapes import Failed, Failure
from .turns import Busy
from .uploads import TooLarge, TooSlow, Unreadable

log = logging.getLogger("twinreel.serve")
WORDS = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_type"}
BAD_RANGES = {
    400: "the Range header cannot be read; write bytes=FIRST-LAST, or leave it out",
    416: "the range begins behind the file's end; Content-Range says how long the file is",
}


def answer(status: int, kind: str, message: str, field: str | None = None, wait: int | None = None) -> JSONResponse:
    """An error in the one shape that all have."""
    error = Failure(type=kind, message=message, field=field, code=None)
    headers = {} if wait is None else {"retry-after": str(wait)}
    return JSONResponse(Failed(error=error).model_dump(), status, headers)


def missing(job: str) -> JSONResponse:
    """404 for an id that no job has."""
    return answer(404, "not_found", f"there is no video {job[:60]!r}; it may have been removed")


class Stored(FileResponse):
    """A file with its ranges; what is wrong with a range is said in the one shape of errors.

    HTTPException 404 for a file that is not there: a removal may come between a job's row and its files.
    """

    def __init__(self, path: Path, media_type: str | None, **given: Any) -> None:
        try:
            found = path.stat()
        except FileNotFoundError:
            raise HTTPException(404, "this file is not there any more; its video may have been removed") from None
        super().__init__(path, media_type=media_type, stat_result=found, **given)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, a part of it, or why not."""
        told: list[Message] = []

        async def kept_back(message: Message) -> None:
            # Starlette refuses a range in plain text of its own
            if message["type"] == "http.response.start" and message["status"] in BAD_RANGES:
                told.append(message)
            elif not told:
                await send(message)

        await super().__call__(scope, receive, kept_back)
        if told:
            status, headers = told[0]["status"], Headers(raw=told[0]["headers"])
            made = answer(status, "range_error", BAD_RANGES[status], "Range")
            if "content-range" in headers:
                made.headers["content-range"] = headers["content-range"]
            await made(scope, receive, send)


class Route(APIRoute):
    """A route that answers HEAD like GET; the HTTP server leaves the body out. The API's description has GET alone."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether this is the route of a request."""
        found, child = super().matches(scope)
        return (Match.FULL if found is Match.PARTIAL and self._is_head(scope) else found), child

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that matches."""
        await (self.app if self._is_head(scope) else super().handle)(scope, receive, send)

    def _is_head(self, scope: Scope) -> bool:
        return scope["method"] == "HEAD" and "GET" in (self.methods or ())


def methods_at(app: FastAPI, scope: Scope) -> set[str]:
    """The methods that some route takes at this path; the page's own takes every path and does not count."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    taken = {name for route in routes if route.matches(scope)[0] is not Match.NONE for name in route.methods or ()}
    return taken | ({"HEAD"} if "GET" in taken else set())


async def known_query(request: Request) -> None:
    """Refuse parameters of the query that the route does not have, or that stand there twice. Raises RequestError."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not request.scope["path"].startswith("/v1/"):
        return
    known = {field.alias for field in route.dependant.query_params}
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            may = f"known are {', '.join(sorted(known))}" if known else "this address takes none"
            raise RequestError(shown(name)[1:-1], f"is no parameter of the query; {may}")
        if name in seen:
            raise RequestError(name, "stands twice in the query; keep one")
        seen.add(name)


def error_answer(error: Exception, service: Service) -> JSONResponse:
    """What an error means to a client."""
    if isinstance(error, RequestError):
        return answer(422, "request_error", error.message, error.field)
    if isinstance(error, Refusal):
        return answer(error.status, error.kind, error.message)
    if isinstance(error, Unavailable):
        return answer(503, "unavailable", str(error), wait=error.wait)
    if isinstance(error, QueueFull):
        return answer(429, "busy", "the queue is full; try again later", wait=service.wait())
    if isinstance(error, Busy):
        return answer(429, "busy", str(error), wait=error.wait)
    if isinstance(error, Conflict):
        return answer(409, "conflict", "this Idempotency-Key was used for another request", "Idempotency-Key")
    if isinstance(error, TooLarge):
        return answer(413, "too_large", str(error))
    if isinstance(error, TooSlow):
        return answer(408, "timeout", str(error))
    if isinstance(error, Unreadable):
        return answer(422, "request_error", str(error), "body")
    if isinstance(error, HTTPException):
        return answer(error.status_code, WORDS.get(error.status_code, "request_error"), str(error.detail))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return answer(422, "request_error", str(first.get("msg")), ".".join(map(str, first.get("loc", ())[1:])) or None)
    # a full or read-only disk: true until somebody makes room
    log.error("the queue's folder: %s", error)
    return answer(503, "unavailable", "the server cannot write to its disk; the operator has to make room", wait=60)


KNOWN = (RequestError, Refusal, Unavailable, QueueFull, Busy, Conflict, TooLarge, TooSlow, Unreadable, HTTPException)
KNOWN_EDGE = (*KNOWN, RequestValidationError, sqlite3.Error, OSError)


def add_errors(app: FastAPI, service: Service) -> None:
    """One shape for every error."""

    async def told(request: Request, error: Exception) -> Response:
        made = error_answer(error, service)
        if made.status_code == 405:
            made.headers["allow"] = ", ".join(sorted(methods_at(app, request.scope)))
        service.metrics.refused.labels(json.loads(bytes(made.body))["error"]["type"]).inc()
        return made

    async def unforeseen(request: Request, error: Exception) -> Response:
        # the cause goes to the log; it may hold what a client should not see
        service.metrics.refused.labels("internal").inc()
        return answer(500, "internal", "the server made a mistake; its log says which")

    for kind in KNOWN_EDGE:
        app.add_exception_handler(kind, told)
    app.add_exception_handler(Exception, unforeseen)


class Gate:
    """Around the whole application: keys and origins before it, headers and counts after it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's life."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, metrics = Request(scope), self._service.metrics
        path = scope["path"]  # what routes go by; the path of `request.url` may be made of the Host header

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if path.startswith("/v1/"):
                    headers.setdefault("cache-control", "no-store")
                metrics.answers.labels(str(message["status"])).inc()
            await send(message)

        try:
            self._service.guard.check(request.method, path, request.headers, request.cookies)
        except Refusal as error:
            metrics.refused.labels(error.kind).inc()
            await error_answer(error, self._service)(scope, receive, told)
        else:
            await self._app(scope, receive, told)
