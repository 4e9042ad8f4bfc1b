"""Rows and states as the shapes that clients see."""

from __future__ import annotations

import re
from typing import Any

from .. import limits
from ..plan import canvas
from ..policy_options import KINDS
from ..request import Request
from ..request_json import json_place
from ..schema import request_schema
from .hub import State
from .jobs import COMPLETED, QUEUED, RUNNING, Job
from .preview import NONE_YET, load_map
from .results import TYPES
from .security import pathless
from .service import Service
from .shapes import Failure, Input, Model, Policy, Progress, Video

# Where the stages lie on the way from 0 to 100; what is not listed stands at the beginning.
SHARES = {"encode": (2, 8), "denoise": (10, 70), "decode": (80, 18), "mux": (98, 1)}
# Of 49. Counting them takes the policies, and with them torch, which this process does not load; a test compares.
PRESET_CALLS = {"gentle": 28, "balanced": 24, "fast": 21}


def video(service: Service, job: Job, variants: list[str] | None = None) -> Video:
    """One job as clients see it."""
    base, facts = f"/v1/videos/{job.id}", job.facts
    state = service.hub.state(job.id) if job.status == RUNNING else None
    preview = f"{base}/preview?v={state.preview}" if state is not None and state.preview else None
    outcome = job.outcome or {}
    return Video(
        id=job.id,
        model=service.weights.name,
        status=job.status,  # type: ignore[arg-type]
        progress=100 if job.status == COMPLETED else percent(state),
        created_at=int(job.created),
        started_at=None if job.started is None else int(job.started),
        completed_at=None if job.ended is None else int(job.ended),
        expires_at=service.expires(job),
        prompt=job.prompt,
        task=job.task,
        size="x".join(map(str, facts["canvas"])),
        seconds=f"{facts['seconds']:.2f}",
        frames=facts["frames"],
        seed=facts["seed"],
        steps=facts["steps"],
        calls=outcome.get("calls", facts["calls"]),
        policy=facts["policy"],
        priority=job.priority,
        group=job.family,
        variants=variants or [],
        position=service.jobs.position(job) if job.status == QUEUED else None,
        cancelling=job.cancelling and job.status == RUNNING,
        retried=job.crashes,
        running=None if state is None else progress(state, preview),
        preview=preview,
        warnings=list(dict.fromkeys([*facts.get("warnings", ()), *outcome.get("warnings", ())])),
        inputs=inputs(job),
        request={**job.body, "conditions": stored_conditions(job)},
        files=file_sizes(service, job),
        sha256=outcome.get("sha256", {}),
        took=service.took(job),
        error=None if job.error is None else failure(job),
        links={"self": base, "events": f"{base}/events"} | ({"content": f"{base}/content"} if outcome else {}),
    )


def progress(state: State, preview: str | None) -> Progress:
    """A running job's state as clients see it."""
    eta = None if state.eta is None else round(state.eta, 2)
    return Progress(stage=state.stage, done=state.done, total=state.total, eta=eta, note=state.note, preview=preview)


def percent(state: State | None) -> int:
    """0 to 99 over the whole job."""
    if state is None:
        return 0
    start, share = SHARES.get(state.stage, (0, 2))
    return min(99, round(start + share * (state.done / state.total if state.total else 0)))


def stored_conditions(job: Job) -> list[dict[str, Any]]:
    """A job's conditions with addresses on this server."""
    return [
        {**item, "uri": f"/v1/videos/{job.id}/inputs/{item['uri'].removeprefix('input:')}"}
        for item in job.body["conditions"]
    ]


def inputs(job: Job) -> list[Input]:
    """A job's media, by the labels a prompt uses."""
    labels = job.facts.get("labels", [])
    made = []
    # labels follow the plan: keyframes before references
    order = sorted(range(len(job.body["conditions"])), key=lambda i: job.body["conditions"][i]["role"] == "reference")
    named = dict(zip(order, labels, strict=False))
    for i, item in enumerate(stored_conditions(job)):
        label = named.get(i) if item["role"] == "reference" else None
        frame = item.get("frame_index")
        made.append(
            Input(label=label or None, role=item["role"], type=item["type"], frame_index=frame, url=item["uri"])
        )
    return made


def file_sizes(service: Service, job: Job) -> dict[str, int]:
    """Bytes by variant of the content; `frames` is made when asked for and then has some."""
    outcome = job.outcome or {}
    names, sizes = outcome.get("files", {}), outcome.get("sizes", {})
    present = {kind: sizes[names[kind]] for kind in TYPES if kind in names and names[kind] in sizes}
    if "video" not in present:
        return present
    try:
        return {"frames": service.frames_of(job).stat().st_size, **present}
    except OSError:  # not made yet
        return {"frames": 0, **present}


def failure(job: Job) -> Failure:
    """Why a job failed, its field as in the request's JSON."""
    error = job.error or {}
    kind = "request_error" if error.get("kind") == "RequestError" else "engine_error"
    field, message = error.get("field"), error.get("message") or ""
    if field is not None:
        message = message.removeprefix(f"{field}: ")
        field = json_place(field, job.body.get("conditions", []))
    return Failure(type=kind, code=error.get("kind"), field=field, message=pathless(message))


def model(service: Service) -> Model:
    """The loaded weights and what may be asked of them."""
    spec, weights, dispatcher = service.weights.spec, service.weights, service.dispatcher
    preview = weights.path is not None and load_map(weights.path) is not None
    described = None if dispatcher.described is None else dict(dispatcher.described)
    if described is not None:
        described["model"] = weights.name
    return Model(
        id=weights.name,
        created=0,
        bundled=weights.bundled,
        ready=dispatcher.engine == "ready",
        partitions={partition.name: list(partition.tasks) for partition in spec.partitions},
        tasks=list(spec.tasks),
        limits=request_limits(service),
        defaults={
            "steps": Request.steps,
            "seed": Request.seed,
            "duration_seconds": limits.DEFAULT_SECONDS,
            "aspect_ratio": limits.DEFAULT_ASPECT,
            "short_edge": spec.world.short_edge,
            "shifts": list(spec.world.shifts),
            "policy": Request.policy,
            "n": 1,
        },
        policies=policies(),
        sizes=["x".join(map(str, reversed(canvas(*ratio, spec)))) for ratio in limits.ASPECTS.values()],
        preview=preview,
        preview_note="" if preview else NONE_YET,
        seconds_per_call=dispatcher.seconds_a_call or None,
        engine=described,
        request_schema=request_schema(spec),
    )


def request_limits(service: Service) -> dict[str, Any]:
    """Every number a client may check beforehand."""
    spec, options = service.weights.spec, service.options
    seconds, clips, sides = limits.durations(spec.world), limits.clip_seconds(spec.world), limits.sides(spec)
    return {
        "prompt_characters": [limits.PROMPT_CHARACTERS.low, limits.PROMPT_CHARACTERS.high],
        "duration_seconds": [seconds.low, seconds.high],
        "clip_seconds": [clips.low, clips.high],
        "side_pixels": [sides.low, sides.high],
        "multiple": spec.multiple,
        "aspect_ratios": list(limits.ASPECTS),
        "steps": [limits.STEPS.low, limits.STEPS.high],
        "references": dict(limits.REFERENCES_OF_A_KIND) | {"all": limits.REFERENCES_IN_ALL},
        "variants": options.max_variants,
        "queued": options.max_queued,
        "upload_bytes": service.limits.bytes,
        "picture_pixels": int(service.limits.pixels),
        "remote_hosts": list(options.remote_hosts),
    }


def policies() -> list[Policy]:
    """Every step policy and preset by name, with the calls of a request of 50 steps where they are known beforehand."""
    every = Request.steps - 1
    made = [Policy(name="every-step", calls=every, note="the definition; every step calls the model")]
    for name, calls in PRESET_CALLS.items():
        made.append(Policy(name=f"forecast:{name}", calls=calls, note="skipped steps move by a forecast"))
    for name in KINDS:
        if name not in ("every-step", "forecast"):
            text = re.sub(r"\s+", " ", (KINDS[name].__doc__ or "").strip().split("\n\n")[0])
            made.append(Policy(name=name, calls=every, note=text[:200]))
    return made
