"""A long run (`make soak`): random requests of every task through one engine, on the built-in miniature.

Every request runs twice and must give the same hashes; every fifth one is cancelled and the engine must go on. After a
warm-up of ten requests the memory that is in use between requests must not grow by more than `GROWTH`.

    python tests/soak.py --seconds 600 --seed 0
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from twinreel import Cancelled, Engine, Keyframe, Picture, Reference, Request, Sound
from twinreel.watch import Event

GROWTH = 64 << 20  # bytes; allocators keep some of what they were given
WARM_UP = 10
EVERY_CANCELLED = 5


def memory_in_use() -> int:
    """Resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def picture(rng: random.Random) -> Picture:
    """A random picture of a random shape."""
    shape = (rng.randrange(64, 200), rng.randrange(64, 200), 3)
    return Picture(np.random.default_rng(rng.randrange(2**32)).integers(0, 256, shape, dtype=np.uint8))


def random_request(rng: random.Random, tasks: list[str]) -> Request:
    """A request that some task of `tasks` can run."""
    given: dict[str, Any] = {"steps": rng.choice((2, 3, 5)), "seed": rng.randrange(2**32)}
    given |= {"duration": rng.choice((4, 5)), "noise": rng.choice(("official", "sequential"))}
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


def cancel_one(engine: Engine, request: Request) -> None:
    """Cancel `request` after its first call; an engine that finishes it all the same is at fault."""

    def watch(event: Event) -> None:
        if event.stage == "denoise":
            engine.cancel()

    try:
        engine.generate(request, watch)
    except Cancelled:
        return
    raise AssertionError("a cancelled request ran to its end")


def main() -> None:
    """Run until the time is up; any difference or growth ends the process with an AssertionError."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, engine, end = random.Random(asked.seed), Engine(), time.monotonic() + asked.seconds
    tasks, level, number = engine.describe()["tasks"], 0, 0
    while time.monotonic() < end:
        request = random_request(rng, tasks)
        if number % EVERY_CANCELLED == EVERY_CANCELLED - 1:
            cancel_one(engine, request)
        first, second = (engine.generate(request).report["sha256"] for _ in range(2))
        assert first == second, f"request {number}: {first} then {second}: {request}"
        number += 1
        used = memory_in_use()
        level = max(level, used) if number <= WARM_UP else level
        assert used <= level + GROWTH, f"request {number}: {used} bytes in use, {level} after warm-up"
        print(f"{number}: {request.resolved_task}, {used >> 20} MiB, {first['frames'][:12]}", flush=True)
    assert number, "not one request was finished; give more seconds"


if __name__ == "__main__":
    main()
