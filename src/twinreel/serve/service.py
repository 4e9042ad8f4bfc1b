"""A server's parts, put together once, and what can be asked of them; `app` translates it into HTTP."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig, check_config
from ..errors import RequestError
from ..launch import module
from ..limits import SEEDS, shown
from ..policy_options import parse_policy
from ..request import check_request
from ..request_json import request_from_json
from ..spec import Spec
from ..weights import locate, read_spec
from .dispatch import Dispatcher
from .fetch import Fetcher
from .folder import claim, new_incoming, open_queue, sync
from .hub import Hub
from .intake import Order, Placer, kind_of_file
from .jobs import ENDED, RUNNING, Draft, Job, new_id
from .metrics import Metrics
from .options import GIB, MIB, ServeOptions, check_options
from .probe import Probe, facts_of
from .runner import EngineRunner, Runner
from .security import Guard, pathless
from .turns import Turns
from .uploads import Limits, make_room
from .warm import check_warm

BUNDLED = "twinreel-bundled"
ONCE_CHARACTERS = 200
EXTRACT_SECONDS = 600.0
CHECKS, WAITING = 4, 32  # requests whose media are fetched and read at once, and that wait for it


class Unavailable(Exception):
    """Not now; the message says why, `wait` (seconds) when trying again makes sense."""

    def __init__(self, message: str, wait: int | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class Weights:
    """The weights being served: their public name, where they lie, their sizes."""

    name: str
    path: Path | None
    components: Mapping[str, str]
    spec: Spec
    bundled: bool

    def where(self) -> dict[str, Any]:
        """What a process of ours needs to find them."""
        return {"path": None if self.path is None else str(self.path), "components": dict(self.components)}


def find_weights(config: EngineConfig) -> Weights:
    """The weights `config` names, or the bundled ones. Raises ConfigError, CheckpointError."""
    check_config(config)
    bundled = config.model is None and not config.components
    if bundled:
        from ..demo import bundled_model

        path: Path | None = bundled_model()
    else:
        path = None if config.model is None else Path(config.model).absolute()
    components = {name: str(Path(folder).absolute()) for name, folder in config.components.items()}
    spec = read_spec(locate(path, components))
    return Weights(BUNDLED if bundled else (path.name if path else "components"), path, components, spec, bundled)


def worker_command(config: EngineConfig, options: ServeOptions, weights: Weights, folder: Path) -> list[str]:
    """What starts the engine's process."""
    engine = asdict(replace(config, model=None if weights.path is None else str(weights.path), allow_remote=False))
    engine["components"] = dict(weights.components)
    settings = {"engine": engine, "warm": options.warm, "cache_mib": options.cache_mib}
    settings["lock"] = str(folder / "engine.lock")
    return module("twinreel.serve.worker", json.dumps(settings))


class Service:
    """Everything one server holds. `runner`, `probe` and `fetcher` may be given instead of the ones of this machine.

    Raises ConfigError and CheckpointError for what cannot be served.
    """

    def __init__(
        self,
        options: ServeOptions,
        config: EngineConfig | None = None,
        *,
        runner: Runner | None = None,
        probe: Probe | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.options = options
        self.guard = Guard(check_options(options), options.host, options.names)
        self.weights = find_weights(config)
        check_warm(options.warm, self.weights.spec)
        self.folder = options.data.absolute()
        self._lock = claim(self.folder)
        self.jobs = open_queue(self.folder)
        self.hub, self.metrics = Hub(), Metrics()
        command = worker_command(config, options, self.weights, self.folder)
        runner = runner or EngineRunner(command, stall_seconds=options.stall_seconds)
        self.dispatcher = Dispatcher(self.jobs, self.hub, runner, self.metrics, options)
        self.metrics.watch(self.jobs.counts, lambda: self.dispatcher.engine == "ready")
        self.probe, self.fetcher = probe or Probe(), fetcher or Fetcher(options.remote_hosts)
        self.extractor = Probe(seconds=EXTRACT_SECONDS)  # of its own, so that nobody's request waits for it
        self.room = make_room(self.folder, options.spare_gib * GIB)
        self.limits = Limits(options.upload_mib * MIB, options.megapixels * 1e6, options.idle_seconds, self.room)
        self.checks, self.extracts = Turns("checks of media", CHECKS, WAITING), Turns("extractions", 1, WAITING)
        self._extracting = threading.Lock()
        self.stopping = False

    def start(self) -> None:
        """Settle the queue and begin."""
        self.dispatcher.start()

    def stop(self) -> None:
        """Finish the running job or put it back, end the engine, let go of the folder."""
        self.refuse_more()
        self.dispatcher.stop()
        self.probe.stop()
        self.extractor.stop()
        self.jobs.close()
        self._lock.close()

    def refuse_more(self) -> None:
        """From here on: no new jobs, and event streams end."""
        self.stopping = True
        self.hub.close()

    def check_open(self, number: int = 1) -> None:
        """Raise Unavailable while new jobs cannot be taken. A full queue is `Jobs.create`'s matter, and `is_full`'s."""
        if self.stopping:
            raise Unavailable("the server is shutting down", 30)
        try:
            self.room()
        except OSError as error:
            full = error.errno == errno.ENOSPC
            told = f"{error.strerror}; old jobs can be removed" if full else f"the queue's folder: {error.strerror}"
            raise Unavailable(told, 600) from None

    def is_full(self) -> bool:
        """Whether the queue takes no further job."""
        return self.jobs.waiting() >= self.options.max_queued

    def wait(self) -> int:
        """Seconds after which a place in the queue is likely to be free."""
        return max(1, min(3600, round(self.dispatcher.seconds_a_job)))

    def incoming(self) -> Path:
        """A new folder for a request that is being received; `discard` it."""
        return new_incoming(self.folder)

    def discard(self, folder: Path) -> None:
        """Remove what was received; a queued job has its own links to it."""
        shutil.rmtree(folder, ignore_errors=True)

    def submit(self, order: Order, folder: Path, once: str | None) -> tuple[list[Job], bool]:
        """Queue an order whose files lie in `folder`: the jobs, and whether they are new.

        Raises RequestError with clients' field names, Unavailable, TooLarge, QueueFull, Conflict, OSError.
        """
        try:
            facts, body, files = self._settle(order, folder)
        except RequestError as error:
            told = order.named(error)
            raise RequestError(told.field, without_paths(told.message, folder)) from None
        drafts = self._drafts(order, body, facts)
        asked = [body, order.n, order.priority, [item["sha256"] for item in files]]
        mark = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if once is not None and (made := self.jobs.made_by(once, mark)):
            return made, False
        folders = [self.jobs.path(draft.id) for draft in drafts]
        new = False
        try:
            for path in folders:
                self._fill(path, folder, len(files))
            jobs = self.jobs.create(drafts, self.options.max_queued, once, mark)
            new = jobs[0].id == drafts[0].id  # or another client was faster with the same key
        finally:
            if not new:  # without a row the folders are nobody's
                for path in folders:
                    shutil.rmtree(path, ignore_errors=True)
        if new:
            self.dispatcher.wake()
        return jobs, new

    def _settle(self, order: Order, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """(facts, body, files) of an order: every check that needs no weight is done here."""
        spec = self.weights.spec
        if not 1 <= order.n <= self.options.max_variants:
            raise RequestError("n", f"got {shown(order.n)}; from 1 to {self.options.max_variants} on this server")
        bare = request_from_json({**order.body, "conditions": _named(order.body.get("conditions"))})
        check_request(bare, spec)  # before any medium is fetched or decoded
        if getattr(parse_policy(bare.policy), "profile", None) is not None:
            raise RequestError("policy", "names a file of the server, which is not read; use another policy")
        if bare.seed + order.n - 1 not in SEEDS:
            raise RequestError("seed", f"got {bare.seed}; with {order.n} variants the last seed would be too large")
        placer = Placer(folder, self.limits, self.fetcher)
        placer.place(order)
        body = order.body
        files = [{"what": kind_of_file(upload.family, upload.what), "sha256": upload.sha256} for upload in placer.made]
        if files:
            local = [{**item, "uri": str(folder / f"condition-{i}")} for i, item in enumerate(order.body["conditions"])]
            facts = self.probe.check({**body, "conditions": local}, spec, self.weights.where())
        else:
            facts = facts_of(request_from_json(body), spec)
        facts["files"] = files
        return facts, body, files

    def _drafts(self, order: Order, body: dict[str, Any], facts: dict[str, Any]) -> list[Draft]:
        seed = facts["seed"]
        return [
            Draft(new_id(), facts["task"], {**body, "seed": seed + i}, {**facts, "seed": seed + i}, order.priority)
            for i in range(order.n)
        ]

    @staticmethod
    def _fill(path: Path, source: Path, number: int) -> None:
        """A job's folder with links to its media, on the disk when this returns."""
        path.mkdir(parents=True)
        for i in range(number):
            os.link(source / f"condition-{i}", path / f"in-{i}")
            sync(path / f"in-{i}")
        sync(path)
        sync(path.parent)

    def cancel(self, job: str) -> str | None:
        """See `Jobs.cancel`."""
        return self.dispatcher.cancel(job)

    def remove(self, job: str) -> bool:
        """See `Jobs.remove`."""
        return self.jobs.remove(job)

    def ready(self) -> tuple[bool, str, str | None]:
        """(a job sent now would be taken and its engine runs, the engine's state in a word, why not)."""
        state, cause = "stopped" if self.stopping else self.dispatcher.engine, self.dispatcher.cause
        try:
            self.check_open()
        except Unavailable as error:
            cause = str(error)
        return state == "ready" and cause is None, state, None if cause is None else pathless(cause)

    def frames_of(self, job: Job) -> Path:
        """Where the ZIP of a finished job's frames lies once it was asked for."""
        return self.jobs.path(job.id) / "frames.zip"

    def frames(self, job: Job) -> Path:
        """The ZIP of a finished job's frames, made when first asked for. Raises Unavailable, OSError.

        It is not there where the job's files are gone.
        """
        target, video = self.frames_of(job), self.jobs.path(job.id) / "video.mp4"
        with self._extracting:
            if target.exists() or not video.exists():
                return target
            self.room()
            try:
                self.extractor.frames(video, target)
            except RequestError as error:
                raise Unavailable(f"the frames cannot be read: {error.message}") from None
            self.jobs.grow(job.id, target.stat().st_size)
        return target

    def expires(self, job: Job) -> int | None:
        """When a finished job is removed for its age."""
        if job.status not in ENDED or job.ended is None:
            return None
        return round(job.ended + self.options.keep_days * 86400)

    def took(self, job: Job) -> float | None:
        """Seconds a job has run."""
        if job.started is None:
            return None
        end = time.time() if job.status == RUNNING else job.ended
        return None if end is None else round(end - job.started, 3)


def _named(conditions: Any) -> Any:
    """The conditions with addresses that say nothing, for checks that look at everything else."""
    if not isinstance(conditions, list):
        return [] if conditions is None else conditions
    return [
        {**item, "uri": "medium"}
        if isinstance(item, dict) and isinstance(item.get("uri"), str) and item["uri"]
        else item
        for item in conditions
    ]


def without_paths(text: str, folder: Path) -> str:
    """A message for clients: files below `folder` are called what they are to them."""
    return re.sub(rf"{re.escape(str(folder))}/[\w.-]+", "the medium", text)
