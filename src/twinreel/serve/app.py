"""The routes. Each is thin: `Service` knows, `views` shows, and one table turns errors into answers."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .. import __version__
from ..errors import RequestError
from ..limits import counted, shown
from ..request_json import parse_object
from ..schema import request_schema
from . import views
from .answers import Gate, Route, Stored, add_errors, answer, known_query, methods_at, missing
from .intake import Order, from_form, from_json
from .jobs import ENDED, QUEUED, RUNNING, Job, QueueFull
from .preview import PICTURE
from .results import TYPES
from .security import COOKIE, PAGE_POLICY, SESSION_SECONDS, Refusal
from .service import ONCE_CHARACTERS, Service
from .shapes import Deleted, Failed, Health, Models, Ready, Video, Videos, body_schema, examples, form_schema
from .uploads import JSON_BYTES, UTF8, TooLarge, charset_of, read_form, read_whole

log = logging.getLogger("twinreel.serve")
PAGE = Path(__file__).with_name("page")
BEAT = 15.0  # seconds between comments on a silent event stream, which show whether the reader is still there
SHORTEST_GAP = 0.05  # between two events of a stream: what happens in between is one event
DATA_SHARE = 4 / 3  # base64
IN_MEMORY = 32 << 20  # bytes of a JSON body with its data: addresses; uploads go to files
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Failed} for code in (401, 403, 404, 408, 409, 413, 415, 422, 429, 503)
}
Variant = Literal["video", "audio", "frames", "latents", "report"]


def build_app(service: Service) -> FastAPI:
    """The application of one server."""
    app = FastAPI(
        title="twinreel",
        version=__version__,
        summary="Video with its stereo sound",
        responses=ERRORS,
        dependencies=[Depends(known_query)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.router.route_class = Route
    add_errors(app, service)
    app.add_middleware(Gate, service=service)
    add_creation(app, service)
    add_reading(app, service)
    add_content(app, service)
    add_server(app, service)
    add_page(app)
    return app


def add_creation(app: FastAPI, service: Service) -> None:
    """POST /v1/videos."""
    spec, most = service.weights.spec, service.options.max_variants
    schema = body_schema(request_schema(spec), service.weights.name, most)
    bodies = {"schema": schema, "examples": examples(views.model(service).sizes[1], spec.tasks)}
    content = {"application/json": bodies, "multipart/form-data": {"schema": form_schema(schema)}}
    key = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": ONCE_CHARACTERS}}
    described = {"requestBody": {"content": content, "required": True}, "parameters": [key]}

    @app.post("/v1/videos", status_code=201, response_model=Video, openapi_extra=described)
    async def create(request: Request) -> Any:
        """Queue a request. Checked whole before it is queued; see docs/serving.md for fields, uploads and variants."""
        service.check_open()
        once = request.headers.get("idempotency-key")
        if once is not None and not 1 <= len(once) <= ONCE_CHARACTERS:
            raise RequestError("Idempotency-Key", f"has {len(once)} characters; 1 to {ONCE_CHARACTERS}")
        if once is None and await run_in_threadpool(service.is_full):
            raise QueueFull  # before a large body is taken in for nothing
        folder = await run_in_threadpool(service.incoming)
        try:
            order = await receive(request, service, folder)
            # reading media may take a minute: in turns, so that whatever is quick finds a thread
            run = service.checks.run if order.body.get("conditions") else run_in_threadpool
            jobs, new = await run(service.submit, order, folder, once)
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            await run_in_threadpool(service.discard, folder)
        if new:
            words = repr(jobs[0].prompt) if service.options.log_prompts else jobs[0].task
            log.info("job %s queued, %s: %s", jobs[0].id, counted(len(jobs), "variant"), words)
        made = await run_in_threadpool(views.video, service, jobs[0], [job.id for job in jobs])
        headers = {"location": f"/v1/videos/{jobs[0].id}"}
        return JSONResponse(made.model_dump(mode="json"), 201 if new else 200, headers)


def check_coding(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not what its bytes say. Raises HTTPException 415."""
    coding = headers.get("content-encoding", "identity").strip()
    if coding.lower() not in ("identity", ""):
        raise HTTPException(415, f"Content-Encoding {shown(coding)} is not taken; send the body as it is")
    kind = headers.get("content-type", "")
    charset = charset_of(kind)
    if not kind.lower().startswith("multipart/") and charset not in UTF8:
        raise HTTPException(415, f"the character set {shown(charset)} is not taken; send UTF-8")


async def receive(request: Request, service: Service, folder: Path) -> Order:
    """The body, by its content type. Raises RequestError, TooLarge, TooSlow, Unreadable, HTTPException 415."""
    check_coding(request.headers)
    kind = request.headers.get("content-type", "")
    limits, name = service.limits, service.weights.name
    declared = request.headers.get("content-length", "0")
    most = int(limits.bytes * DATA_SHARE) + JSON_BYTES
    if declared.isdecimal() and int(declared) > most:
        raise TooLarge(f"the body is {declared} bytes; at most {most:,} are taken")
    word = kind.partition(";")[0].strip().lower()
    if word == "multipart/form-data":
        return from_form(await read_form(request.stream(), kind, folder, limits), name)
    if word not in ("application/json", ""):
        kinds = "application/json or multipart/form-data"
        raise HTTPException(415, f"content type {word[:60]!r} is not taken; send {kinds}")
    text = await read_whole(request.stream(), limits.idle, min(most, IN_MEMORY))
    return from_json(await run_in_threadpool(parse_object, text), name)


def add_reading(app: FastAPI, service: Service) -> None:
    """Jobs, one and many; cancel and removal."""

    @app.get("/v1/videos", response_model=Videos)
    def listing(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        status: Literal["queued", "in_progress", "completed", "failed", "cancelled"] | None = None,
        task: Literal["t2va", "fl2va", "ref2va"] | None = None,
        q: Annotated[str | None, Query(max_length=200)] = None,
    ) -> Videos:
        """Jobs by age, newest first."""
        if after is not None and service.jobs.get(after) is None:
            raise RequestError("after", f"there is no video {shown(after)}; it may have been removed: begin without it")
        filters = {"status": status, "task": task, "q": q}
        jobs = service.jobs.page(limit + 1, after, order == "desc", filters)
        data = [views.video(service, job) for job in jobs[:limit]]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        counts = service.jobs.counts()
        return Videos(data=data, first_id=ends[0], last_id=ends[1], has_more=len(jobs) > limit, counts=counts)

    @app.get("/v1/videos/{job}", response_model=Video)
    def one(job: str) -> Any:
        """One job."""
        found = service.jobs.get(job)
        if found is None:
            return missing(job)
        return views.video(service, found, [item.id for item in service.jobs.family(found.family)])

    @app.post("/v1/videos/{job}/cancel", status_code=202, response_model=Video)
    def cancel(job: str) -> Any:
        """End a queued job now, a running one within a step."""
        return end(service, job)

    @app.delete("/v1/videos/{job}", response_model=Video | Deleted)
    def delete(job: str) -> Any:
        """Cancel a job that has not ended; remove one that has, with its files."""
        found = service.jobs.get(job)
        if found is not None and found.status in ENDED and service.remove(job):
            return Deleted(id=job)
        made = end(service, job)
        return JSONResponse(made.model_dump(mode="json"), 202) if isinstance(made, Video) else made


def end(service: Service, job: str) -> Any:
    """Cancel a job: its new state, or the answer that it has ended or never was."""
    state = service.cancel(job)
    found = service.jobs.get(job)
    if found is None:
        return missing(job)
    if state is None and found.status not in (QUEUED, RUNNING):
        return answer(409, "conflict", f"the job has ended: {found.status}")
    return views.video(service, found)


def add_content(app: FastAPI, service: Service) -> None:
    """Results, inputs, previews and events."""

    @app.get("/v1/videos/{job}/content", response_class=FileResponse)
    async def content(job: str, variant: Variant = "video", download: bool = False) -> Any:
        """A finished job's MP4, WAV, frames (ZIP of PNG), latents or report; ranges are served."""
        found = await run_in_threadpool(service.jobs.get, job)
        if found is None:
            return missing(job)
        made = variant != "frames" or service.frames_of(found).is_file()
        return await (run_in_threadpool if made else service.extracts.run)(
            content_of, service, found, variant, download
        )

    @app.get("/v1/videos/{job}/inputs/{number}", response_class=FileResponse)
    def medium(job: str, number: int) -> Any:
        """A medium of the request."""
        found = service.jobs.get(job)
        if found is None:
            return missing(job)
        count = len(found.body["conditions"])
        if not 0 <= number < count:
            has = f"it has {count}, from 0 on" if count else "it was made from text alone"
            return answer(404, "not_found", f"this video has no input {shown(number)}; {has}")
        kind = found.facts["files"][number]["what"]
        return Stored(service.jobs.path(job) / f"in-{number}", media_type=kind)

    @app.get("/v1/videos/{job}/preview", response_class=Response)
    def preview(job: str, v: int = 0) -> Any:
        """The newest preview of the forming video: an animated WebP, one pixel a latent. `v` only makes its address new."""
        try:
            # read whole: the next preview may take this one's place between its size and its bytes
            picture = None if service.jobs.get(job) is None else (service.jobs.path(job) / PICTURE).read_bytes()
        except FileNotFoundError:
            picture = None
        if picture is None:
            return answer(404, "not_found", "there is no preview of this job")
        return Response(picture, media_type="image/webp")

    @app.get("/v1/videos/{job}/events", response_class=StreamingResponse)
    async def events(job: str, request: Request) -> Any:
        """Server-sent events until the job has ended; the first is its present state."""
        found = await run_in_threadpool(service.jobs.get, job)
        if found is None:
            return missing(job)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        events = nothing() if request.method == "HEAD" else stream(service, job)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def content_of(service: Service, job: Job, variant: str, download: bool) -> Response:
    """One file of a finished job."""
    name, kind = TYPES[variant]
    outcome = job.outcome or {}
    if not outcome or variant != "frames" and variant not in outcome["files"]:
        why = f"the job is {job.status}" if not outcome else "it was not kept"
        return answer(409, "conflict", f"there is no {variant} of this job: {why}")
    path = service.frames(job) if variant == "frames" else service.jobs.path(job.id) / name
    named = f"{job.id}{path.suffix}" if download else None
    headers = {"cache-control": "private, max-age=86400, immutable"}
    return Stored(path, media_type=kind, filename=named, headers=headers)


async def stream(service: Service, job: str) -> AsyncIterator[bytes]:
    """A job's events: its state at once, then at every change the newest, at the end how it ended."""
    last: Video | None = None
    with service.hub.attend(job) as reader:
        while True:
            found = await run_in_threadpool(service.jobs.get, job)
            if found is None:
                return
            now = await run_in_threadpool(views.video, service, found)
            for name in changes(last, now):
                yield f"event: {name}\ndata: {now.model_dump_json()}\n\n".encode()
            last = now
            if now.status in ENDED or service.hub.closed:
                return
            if not await reader.news(BEAT):
                yield b": still here\n\n"
            await asyncio.sleep(SHORTEST_GAP)


async def nothing() -> AsyncIterator[bytes]:
    """No events."""
    for _ in ():
        yield b""


def changes(last: Video | None, now: Video) -> list[str]:
    """The names of what is new: none, or one event, or a step and the preview that came with it."""
    if now.status in ENDED:
        return [str(now.status)]
    if now.status == QUEUED:
        return ["queued"] if last is None or last.status != QUEUED or last.position != now.position else []
    if last is None or last.running is None or now.running is None or last.running.stage != now.running.stage:
        return ["stage"]
    places = [(at.done, at.total, at.eta, at.note) for at in (last.running, now.running)]
    return ["step"] * (places[0] != places[1]) + ["preview"] * (last.preview != now.preview)


def add_server(app: FastAPI, service: Service) -> None:
    """What operators and programs ask about the server itself."""

    @app.get("/v1/models", response_model=Models)
    def models() -> Models:
        """The loaded weights, limits, policies and choices."""
        return Models(data=[views.model(service)])

    @app.post("/v1/session", status_code=204)
    async def login(request: Request) -> Response:
        """Exchange the API key for a browser's cookie: `{"key": "..."}`."""
        check_coding(request.headers)
        body = parse_object(await read_whole(request.stream(), service.limits.idle, JSON_BYTES))
        key = body.get("key", "")
        if not isinstance(key, str) or not service.guard.is_key(key):
            raise Refusal(401, "unauthorized", "the API key is wrong")
        # what a proxy in front speaks is known from where the page came from
        response, secure = Response(status_code=204), request.headers.get("origin", "").startswith("https:")
        response.set_cookie(
            COOKIE, service.guard.session(), SESSION_SECONDS, httponly=True, samesite="strict", secure=secure
        )
        return response

    @app.delete("/v1/session", status_code=204)
    def logout() -> Response:
        """Forget the cookie."""
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    @app.get("/health", response_model=Health)
    def health() -> Health:
        """HTTP and the queue's file answer."""
        service.jobs.waiting()
        return Health(version=__version__)

    @app.get("/ready", response_model=Ready)
    def ready() -> JSONResponse:
        """The engine runs and jobs are taken, though a full queue answers 429."""
        is_ready, engine, cause = service.ready()
        made = Ready(ready=is_ready, engine=engine, queued=service.jobs.waiting(), cause=cause)
        return JSONResponse(made.model_dump(), 200 if is_ready else 503)

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Prometheus figures."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_page(app: FastAPI) -> None:
    """The page: static files, found by exact name."""
    files = {path.relative_to(PAGE).as_posix(): path for path in sorted(PAGE.rglob("*")) if path.is_file()}

    @app.get("/{name:path}", include_in_schema=False)
    def page(name: str, request: Request) -> Response:
        path = files.get(name or "index.html")
        if path is None and methods_at(app, request.scope):
            raise HTTPException(405, "this address is not for reading")
        if path is None:
            if name:
                raise HTTPException(404, "there is nothing here")
            return HTMLResponse(
                "<!doctype html><title>twinreel</title><p>The API: <a href=openapi.json>openapi.json</a>."
            )
        kind = mimetypes.guess_type(path.name)[0]
        headers = {"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
        return Stored(path, media_type=kind, headers=headers)
