"""Setups: an engine's configuration with a step policy and steps, by which `validate` runs the same requests."""

from __future__ import annotations

import gc
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig, check_config
from ..errors import ConfigError, RequestError
from ..limits import TASKS, shown
from ..media.addresses import files_of
from ..planner import Door, look, open_door
from ..policy_options import Plain, format_policy, parse_policy
from ..request import Request, check_request
from ..request_json import named_in_json
from ..small_files import read_small, read_small_json, why
from ..sources import Source
from ..watch import Watch, ignore
from .frozen import Named

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True)
class Setup:
    """`steps` None keeps each request's own."""

    engine: EngineConfig = EngineConfig()
    policy: str = "every-step"
    steps: int | None = None

    def applied(self, request: Request) -> Request:
        """`request` with this policy, and these steps if there are some."""
        return replace(request, policy=self.policy, steps=request.steps if self.steps is None else self.steps)

    def reads(self, requests: Iterable[Named]) -> list[Path]:
        """Files and folders that runs of `requests` read: weights, media, the policy's profile."""
        weights = [folder for folder in (self.engine.model, *self.engine.components.values()) if folder is not None]
        return [*map(Path, weights), *(path for named in requests for path in files_of(self.applied(named.request)))]

    def describe(self) -> dict[str, Any]:
        """What differs from the defaults."""
        given = {item.name: getattr(self.engine, item.name) for item in fields(EngineConfig)}
        default = {item.name: getattr(EngineConfig(), item.name) for item in fields(EngineConfig)}
        values = {name: value for name, value in given.items() if value != default[name]}
        return values | {"policy": self.policy} | ({"steps": self.steps} if self.steps is not None else {})


@dataclass(frozen=True)
class Result:
    """One request under one setup. Frames and waveform lie in a file, so that a whole set fits."""

    name: str
    path: Path
    sha256: Mapping[str, str]
    seconds: float
    denoise_seconds: float
    calls: int
    peak_bytes: float
    policy: Mapping[str, Any]

    def costs(self) -> dict[str, float]:
        """What it took."""
        return {name: getattr(self, name) for name in ("seconds", "denoise_seconds", "calls", "peak_bytes")}

    def media(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Frames uint8 `[F, H, W, 3]` and waveform float32 `[2, n]`."""
        with np.load(self.path) as stored:
            return stored["frames"], stored["waveform"]


def is_file_name(text: str) -> bool:
    """Whether a setup, or a list of requests, is in a file of this name and not made of words."""
    return "=" not in text and Path(text).suffix in (".toml", ".json")


def parse_setup(text: str, base: Setup | None = None) -> Setup:
    """`key=value` words (fields of EngineConfig, `policy`, `steps`), or a `.toml` or `.json` file of them; over `base`.

    Raises ConfigError, and RequestError for a bad policy.
    """
    if is_file_name(text):
        path = Path(text)
        try:
            given = read_small_json(path) if path.suffix == ".json" else tomllib.loads(read_small(path).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{shown(text)}: cannot be read as a setup ({why(error)})") from None
        if not isinstance(given, dict):
            raise ConfigError(f'{shown(text)}: holds no object; write one such as {{"policy": "reuse"}}')
    else:
        pairs = [word.partition("=") for word in text.split()]
        given = {}
        for key, equals, value in pairs:
            if not equals:
                raise ConfigError(
                    f"{shown(text)}: {shown(key)} is not key=value; write words such as precision=bf16 policy=reuse"
                )
            if key in given:
                raise ConfigError(f"{shown(text)}: {shown(key)} stands twice; keep one")
            given[key] = value
    return _build(given, base or Setup(), text)


def _build(given: Mapping[str, Any], base: Setup, text: str) -> Setup:
    hints = get_type_hints(EngineConfig)
    engine: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("policy", "steps"):
            continue
        if key not in hints:
            raise ConfigError(f"{shown(text)}: no field {shown(key)}; known are policy, steps, {', '.join(hints)}")
        engine[key] = _typed(key, value, hints[key], text)
    policy = format_policy(parse_policy(given.get("policy", base.policy)))
    steps = _typed("steps", given["steps"], int, text) if "steps" in given else base.steps
    config = replace(base.engine, **engine)
    check_config(config)  # a file may hold values of any type
    return Setup(config, policy, steps)


def _typed(key: str, value: Any, hint: Any, text: str) -> Any:
    if not isinstance(value, str):
        return value
    for kind, words in ((int, "whole number"), (float, "number")):
        if hint in (kind, kind | None):
            try:
                return kind(value)
            except ValueError:
                raise ConfigError(f"{shown(text)}: {key} is {shown(value)}; a {words} is needed") from None
    if hint is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{shown(text)}: {key} is {shown(value)}; use true or false")
        return value.lower() == "true"
    return value


def check_setups(setups: Iterable[Setup], requests: Sequence[Named]) -> list[Named]:
    """Refuse before the first run what a later one would refuse, down to the media; the requests of tasks that all
    setups' weights do. Raises ConfigError (none is left, too), CheckpointError, RequestError."""
    doors: dict[str, Door] = {}
    pairs = []
    for setup in setups:
        key = repr(setup.engine)
        if key not in doors:
            doors[key] = open_door(setup.engine)
        pairs.append((setup, doors[key]))
    tasks = [task for task in TASKS if all(task in door.spec.tasks for door in doors.values())]
    kept = [named for named in requests if named.request.resolved_task in tasks]
    if not kept:
        raise ConfigError(f"no request left: the weights do {', '.join(tasks) or 'no task in common'}")
    for named in kept:
        _check_own_policy(named)
        seen: dict[str, list[Source]] = {}
        for setup, door in pairs:
            try:
                _check(setup.applied(named.request), door, seen)
            except RequestError as error:
                raise _placed(error, named, setup) from None
    return kept


def _check_own_policy(named: Named) -> None:
    try:
        if parse_policy(named.request.policy) == Plain():
            return
        raise RequestError(
            "policy", "would be replaced by the setup's; leave it out, and say policy= in --base or --test"
        )
    except RequestError as error:
        raise error.under(named.place or named.name) from None


def _check(request: Request, door: Door, seen: dict[str, list[Source]]) -> None:
    """`seen`: media by the sizes of the checkpoint that they were read for; setups mostly share one."""
    check_request(request, door.spec, allow_remote=door.config.allow_remote)
    key = repr(door.spec)
    if key not in seen:
        seen[key] = look(request, door.spec)
    door.check(request, seen[key])


def _placed(error: RequestError, named: Named, setup: Setup) -> RequestError:
    """`error` with the request that it is about; what the setup sets keeps its own name."""
    if named.place is not None and error.field != "policy" and (error.field != "steps" or setup.steps is None):
        return named_in_json(error).under(named.place)
    words = " ".join(f"{name}={value}" for name, value in setup.describe().items())
    error.add_note(f"it is request {named.name} under {words}")
    return error


class Runs:
    """Runs setups one after the other and keeps results in `folder`; one engine lives at a time."""

    def __init__(self, folder: Path, watch: Watch = ignore) -> None:
        self.folder, self.watch = folder, watch
        self._engine: Engine | None = None
        self._count = 0

    def engine(self, config: EngineConfig) -> Engine:
        """An engine of `config`: the last one when it is the same, otherwise a new one after the last was let go."""
        from ..engine import Engine

        if self._engine is None or self._engine.config != config:
            self._engine = None
            gc.collect()
            self._engine = Engine(config)
        return self._engine

    def run(self, setup: Setup, requests: Sequence[Named]) -> list[Result]:
        """Every request under `setup`."""
        engine = self.engine(setup.engine)
        return [self._one(engine, setup, named) for named in requests]

    def _one(self, engine: Engine, setup: Setup, named: Named) -> Result:
        try:
            media = engine.generate(setup.applied(named.request), self.watch)
        except RequestError as error:  # a file may change between the check and the run
            raise _placed(error, named, setup) from None
        path = self.folder / f"{self._count:05d}.npz"
        self._count += 1
        np.savez(path, frames=media.video, waveform=media.audio)
        stages = media.report["stages"]
        return Result(
            named.name, path, media.report["sha256"],
            seconds=sum(record["seconds"] for record in stages.values()),
            denoise_seconds=stages["denoise"]["seconds"],
            calls=media.report["policy"]["calls"],
            peak_bytes=max(record["peak_bytes"] for record in stages.values()),
            policy=media.report["policy"],
        )  # fmt: skip
