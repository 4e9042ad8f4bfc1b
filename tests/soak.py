"""A long run (`make soak`): random requests of every task into files of every format, some failing at random stages.

A round is 50 requests, 10 of which fail first: the engine goes on, memory in use and threads between requests do not
grow, and no file is left but those asked for. Latents that a failure left are decoded. Then every request runs twice
and gives the same hashes, with those of the decoded latents among them.

    python tests/soak.py --seconds 600 --seed 0
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from twinreel import Cancelled, Engine, Keyframe, Picture, Reference, Request, Sound
from twinreel.output import FORMATS, LATENTS_SUFFIX
from twinreel.watch import Event

GROWTH = 64 << 20  # bytes; allocators keep some of what they were given
WARM_UP = 10  # requests after which memory and threads have reached their level
REQUESTS, FAILING = 50, 10
STAGES = ("read", "encode", "denoise", "decode", "mux")
TASKS = ("t2va", "fl2va", "ref2va")


class Injected(Exception):
    """The failure that a round throws into a run."""


def memory_in_use() -> int:
    """Resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def picture(rng: random.Random) -> Picture:
    """A random picture of a random shape."""
    shape = (rng.randrange(64, 200), rng.randrange(64, 200), 3)
    return Picture(np.random.default_rng(rng.randrange(2**32)).integers(0, 256, shape, dtype=np.uint8))


def random_request(rng: random.Random, tasks: list[str], seconds: tuple[float, ...]) -> Request:
    """A request that some task of `tasks` can run."""
    given: dict[str, Any] = {"steps": rng.choice((2, 3, 5)), "seed": rng.randrange(2**32)}
    given |= {"duration": rng.choice(seconds), "noise": rng.choice(("official", "sequential"))}
    task = rng.choice(tasks)
    if task == "fl2va":
        indices = rng.choice(((0,), (-1,), (0, -1)))
        given["keyframes"] = tuple(Keyframe(picture(rng), index) for index in indices)
    elif task == "ref2va":
        wave = np.random.default_rng(rng.randrange(2**32)).uniform(-1, 1, (rng.choice((1, 2)), 70_000))
        sound = Sound(wave.astype(np.float32), rng.choice((22_050, 32_000)))
        given["references"] = (Reference("image", picture(rng)), Reference("audio", sound))
    words = rng.choices("a red ball falls into deep water and rings".split(), k=rng.randrange(1, 20))
    return Request(" ".join(words), **given)


def fail_one(engine: Engine, request: Request, path: Path, rng: random.Random) -> tuple[str, Any]:
    """Run `request` into a failure at a random stage: which, and the hashes of the file of latents that were left."""
    stage, how = rng.choice(STAGES), rng.choice((Injected, Cancelled, OSError))

    def watch(event: Event) -> None:
        if event.stage != stage:
            return
        if how is Cancelled:
            engine.cancel()
        else:
            raise how(errno.ENOSPC, "injected") if how is OSError else how

    try:
        engine.render(request, path, watch=watch)
    except (Injected, Cancelled, OSError):
        kept = path.with_name(path.stem + LATENTS_SUFFIX)
        late = stage in ("decode", "mux")
        assert [entry.name for entry in path.parent.iterdir()] == [kept.name] * late, (
            stage,
            how,
            os.listdir(path.parent),
        )
        return f"{how.__name__} at {stage}", engine.decode(kept, path)["sha256"] if late else None
    raise AssertionError(f"a request that failed at {stage} ran to its end")


def clear(folder: Path, expected: set[str]) -> None:
    """Remove the files of a run, which must be `expected` and no more."""
    found = set(os.listdir(folder))
    assert found == expected, f"left over: {sorted(found - expected)}, missing: {sorted(expected - found)}"
    for entry in folder.iterdir():
        for file in [*entry.iterdir()] if entry.is_dir() else []:
            file.unlink()
        entry.rmdir() if entry.is_dir() else entry.unlink()


def one(engine: Engine, request: Request, folder: Path, rng: random.Random, fails: bool) -> str:
    """A request of the round, twice; returns what to say of it."""
    suffix = rng.choice(list(FORMATS))
    path, expected = folder / f"a{suffix}", {f"a{suffix}", "a.json"}
    said, finished = fail_one(engine, request, path, rng) if fails else ("", None)
    if fails:
        clear(folder, expected if finished else set())
    first = engine.render(request, path)["sha256"]
    clear(folder, expected)
    second = engine.render(request, path)["sha256"]
    clear(folder, expected)
    assert first == second == (finished or first), f"{first}, {second}, {finished}: {request}"
    return f"{request.resolved_task} {suffix or 'frames'} {said}"


def soak_round(
    engine: Engine,
    rng: random.Random,
    requests: int = REQUESTS,
    failing: int = FAILING,
    seconds: tuple[float, ...] = (4, 5),
) -> None:
    """One round; any difference, leftover or growth is an AssertionError."""
    tasks = [task for task in TASKS if task in engine.describe()["tasks"]]
    failures = set(rng.sample(range(requests), failing))
    memory = threads = 0
    before = set(threading.enumerate())  # others' threads, where a round is one test of many
    with tempfile.TemporaryDirectory(prefix="twinreel-soak-") as name:
        for number in range(requests):
            request = random_request(rng, tasks, seconds)
            said = one(engine, request, Path(name), rng, number in failures)
            used, running = memory_in_use(), len(os.listdir("/proc/self/task"))
            if number < min(WARM_UP, requests // 2):
                memory, threads = max(memory, used), max(threads, running)
            assert used <= memory + GROWTH or number < WARM_UP, f"{used} bytes in use, {memory} after warm-up"
            assert running <= threads or number < WARM_UP, f"{running} threads, {threads} after warm-up"
            left = set(threading.enumerate()) - before
            assert not left, f"threads are left: {left}"
            print(f"{number + 1}: {said}, {used >> 20} MiB, {running} threads", flush=True)


def main() -> None:
    """Rounds until the time is up; at least one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, engine, end = random.Random(asked.seed), Engine(), time.monotonic() + asked.seconds
    while True:
        soak_round(engine, rng)
        if time.monotonic() >= end:
            return


if __name__ == "__main__":
    main()
