"""The JSON shapes of the API, and the examples of its documentation, which the tests run as they stand.

The body of `POST /v1/videos` is checked by `intake` and `request.check_request`, so that its errors are the same as
everywhere else; what is modelled here are the answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from .intake import FIRST, LAST, PRIORITIES, REFERENCE

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
FRAMES = (*FIRST, LAST)


class Failure(BaseModel):
    """Why a request or a job failed; `field` is the JSON path of the field at fault, such as `conditions[0].uri`."""

    type: str = Field(examples=["request_error"])
    message: str
    field: str | None = None
    code: str | None = Field(None, description="the class of the error, such as RequestError or EngineLost")


class Failed(BaseModel):
    """The body of every answer from 400 on."""

    error: Failure


class Progress(BaseModel):
    """Where a running job is: `done` of `total` units of `stage` (denoise: steps; decode: frames), `eta` seconds left.

    `preview` is the address of the newest preview picture and changes with each; None while there is none.
    """

    stage: str = Field(examples=["denoise"])
    done: int
    total: int
    eta: float | None = None
    note: str = ""
    preview: str | None = None


class Input(BaseModel):
    """One medium of a request. `label` is what the prompt calls a reference by; `url` returns the medium itself."""

    label: str | None = Field(None, examples=["Picture 1"])
    role: str
    type: str
    frame_index: int | None = None
    url: str


class Video(BaseModel):
    """One job: a superset of OpenAI's video object. `steps` are points of the sigma grid, `calls` the model calls.

    `progress` is 0 to 100 over the whole job. `position` counts the jobs ahead of a queued one (0: next). `links` hold
    `content`, `events`, `self`; `group` is shared by the variants of one request, `variants` lists them in the answers
    to POST and to GET of one job.
    """

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int = 0
    created_at: int
    started_at: int | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    prompt: str
    task: str
    size: str = Field(examples=["1344x768"])
    seconds: str = Field(examples=["5.17"], description="exact length of the picture")
    frames: int
    seed: int
    steps: int
    calls: int
    policy: str
    priority: int = 0
    group: str
    variants: list[str] = []
    position: int | None = None
    cancelling: bool = False
    retried: int = 0
    running: Progress | None = None
    preview: str | None = None
    warnings: list[str] = []
    inputs: list[Input] = []
    request: dict[str, Any] = Field(description="the request as JSON, media named by their addresses on this server")
    files: dict[str, int] = Field({}, description="bytes of each variant of the content that can be fetched")
    sha256: dict[str, str] = {}
    took: float | None = Field(None, description="seconds from start to end")
    error: Failure | None = None
    links: dict[str, str] = {}


class Videos(BaseModel):
    """A page of jobs; go on with `after=last_id`."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
    counts: dict[str, int] = Field({}, description="jobs by status, of the whole server")


class Deleted(BaseModel):
    """The answer to a DELETE of a job that had ended."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class Policy(BaseModel):
    """A step policy or preset by the text that a request names it with; `calls` of the model at 50 steps."""

    name: str
    calls: int
    note: str = ""


class Model(BaseModel):
    """The loaded weights: their partitions and tasks, the limits of a request, presets, policies.

    `ready` says that the engine runs; `engine` is what it chose (after the first start), `seconds_per_call` the mean of
    the last jobs. `preview` says whether previews of the forming video can be made, and `preview_note` why not.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "twinreel"
    bundled: bool
    ready: bool
    partitions: dict[str, list[str]]
    tasks: list[str]
    limits: dict[str, Any]
    defaults: dict[str, Any]
    policies: list[Policy]
    sizes: list[str] = Field(description="canvases of the named ratios at the default short edge, WIDTHxHEIGHT")
    preview: bool
    preview_note: str = ""
    seconds_per_call: float | None = None
    engine: dict[str, Any] | None = None
    request_schema: dict[str, Any] = Field(description="JSON schema of the request body (SPEC 11 part)")


class Models(BaseModel):
    """The list OpenAI clients expect; there is one model, with one or two partitions."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """`ok` while HTTP and the queue answer; `ready` has its own path."""

    status: str = "ok"
    version: str


class Ready(BaseModel):
    """Whether the engine runs and jobs are taken: `engine` is starting, ready, restarting, failed or stopped."""

    ready: bool
    engine: str
    queued: int
    cause: str | None = None


EXAMPLES: dict[str, dict[str, Any]] = {
    "t2va": {
        "summary": "A sentence",
        "value": {
            "task": "t2va",
            "prompt": "A red ball bounces across a wooden floor; each bounce is a dull knock.",
            "conditions": [],
            "target": {"aspect_ratio": "16:9", "duration_seconds": 5},
            "seed": 0,
        },
    },
    "fl2va": {
        "summary": "A first frame (the picture may also come as an upload: see multipart/form-data)",
        "value": {
            "task": "fl2va",
            "prompt": "The sun sinks into the sea. Small waves hiss on the sand.",
            "conditions": [{"type": "image", "uri": "PICTURE", "role": "keyframe", "frame_index": 0}],
            "target": {"aspect_ratio": "auto", "duration_seconds": 5},
            "seed": 0,
            "num_inference_steps": 50,
        },
    },
    "ref2va": {
        "summary": "A reference, named in the prompt",
        "value": {
            "prompt": "The woman of <Picture 1> walks along a beach. Waves roll in; she hums.",
            "conditions": [{"type": "image", "uri": "PICTURE", "role": "reference"}],
            "target": {"aspect_ratio": "16:9", "duration_seconds": 5},
        },
    },
    "variants": {
        "summary": "Three seeds, one after another, ahead of other jobs, fewer calls",
        "value": {"prompt": "Rain on a tin roof.", "n": 3, "priority": 5, "seed": 7, "policy": "forecast:balanced"},
    },
    "openai": {
        "summary": "The fields of OpenAI's API",
        "value": {"prompt": "A slow pan over a quiet harbour.", "seconds": "5", "size": "SIZE"},
    },
}
# The task of an example that is not called by it.
EXAMPLE_TASKS = {"variants": "t2va", "openai": "t2va"}
# A plain 96x64 PNG, so that the documented example runs as it stands.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAGAAAABACAIAAABqVuVZAAAAaklEQVR42u3QMQEAMAgAoLlcBjOisUzg7wERiK587L4C"
    "QYIECRIkSJAgBAkSJEiQIEGCECRIkCBBggQJQpAgQYIECRIkSBCCBAkSJEiQIEEIEiRIkCBBggQhSJAgQYIECRIkCEGCBAm6ZwCcJwH89D4EAwAAAABJ"
    "RU5ErkJggg=="
)


def examples(size: str, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The documented bodies of these tasks, with a picture and a canvas that the loaded weights take."""
    text = json.dumps({name: item for name, item in EXAMPLES.items() if EXAMPLE_TASKS.get(name, name) in tasks})
    made = json.loads(text.replace("PICTURE", PICTURE).replace("SIZE", size))
    return dict(made)


def body_schema(request: dict[str, Any], model: str, variants: int) -> dict[str, Any]:
    """JSON schema of a POST's body: that of a `request`, and what only a server takes."""
    number = {"type": "number"}, {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
    frame = {"type": "string", "description": "data: address, upload:PART or, where allowed, http(s)"}
    more: dict[str, Any] = {
        "n": {"type": "integer", "minimum": 1, "maximum": variants, "default": 1, "description": "seed, seed + 1, ..."},
        "priority": {"type": "integer", "minimum": PRIORITIES[0], "maximum": PRIORITIES[1], "default": 0},
        "model": {"const": model},
        "seconds": {"anyOf": list(number), "description": "target.duration_seconds"},
        "size": {"type": "string", "pattern": r"^\d{1,5}x\d{1,5}$", "description": "target.width x target.height"},
        "first_frame": frame,
        "input_reference": frame | {"description": "OpenAI's name of first_frame"},
        "last_frame": frame,
    }
    return {**request, "title": "POST /v1/videos", "properties": {**request["properties"], **more}}


def form_schema(body: dict[str, Any]) -> dict[str, Any]:
    """Schema of a POST as multipart/form-data: a part `request` with the JSON, or flat fields; and files."""
    properties = body["properties"] | body["properties"]["target"]["properties"]
    flat = {name: item for name, item in properties.items() if name not in ("conditions", "target", *FRAMES)}
    file = {"type": "string", "format": "binary"}
    files = dict.fromkeys(FRAMES, file) | {REFERENCE: {"type": "array", "items": file}}
    whole = {"type": "string", "description": "the JSON body; files then have the names its upload:PART addresses give"}
    return {"type": "object", "properties": {"request": whole, **flat, **files}}
