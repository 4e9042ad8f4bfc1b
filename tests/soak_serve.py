"""A long run of the server with the real engine (`make soak`): what `test_serve_faults` does with a stub, for minutes.

Clients post valid, invalid and cancelled requests of every task at once; now and then the engine is killed, the server
is killed, or it is stopped in order and started again. Every accepted job must end as it should, its file must be the
one its hash names, the same request must give the same hash, and memory must not grow. The last line is the report.

    python tests/soak_serve.py --seconds 600 --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from soak import random_request
from twinreel import Client, Request, RequestError
from twinreel.serve.client import ServerError

GROWTH = 96 << 20  # of the server's and of the engine's memory between their first and their last quiet moment
CLIENTS = 4
SIZE = (96, 64)  # small, so that minutes hold many jobs
TROUBLES = ("engine", "server", "restart")


class Program:
    """`twinreel serve` as people run it."""

    def __init__(self, folder: Path, port: int) -> None:
        words = [
            sys.executable,
            "-m",
            "twinreel",
            "serve",
            "--data",
            str(folder),
            "--port",
            str(port),
            "--spare-gib",
            "0.1",
        ]
        self.log = folder.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    def engine(self) -> int | None:
        """The engine's process: the child that leads a group of its own and has the weights' lock in its words."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid and b"serve.worker" in words:
                return int(path.name)
        return None

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(150)
        self.log.close()


def memory_of(pid: int | None) -> int:
    """Resident bytes of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


class Soak:
    """The state of one run: what was accepted, and what it must become."""

    def __init__(self, seed: int, seconds: float, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.end, self.counts = time.monotonic() + seconds, Counter[str]()
        self.accepted: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.lock = threading.Lock()
        self.failures: list[str] = []
        self.program = Program(folder / "data", 0)
        self.client = Client(self.program.url, patience=120.0)
        shortest, longest = self.client.model()["limits"]["duration_seconds"]
        self.lengths = (shortest, min(shortest + 1.0, longest))

    def work(self, number: int) -> None:
        """One client: posts until the time is up."""
        rng = random.Random(number)
        while time.monotonic() < self.end and not self.failures:
            request = replace(random_request(rng, ["t2va", "fl2va", "ref2va"], self.lengths), size=SIZE)
            try:
                if rng.random() < 0.2:
                    self.refuse(request)
                    continue
                job = self.client.submit(request)["id"]
                with self.lock:
                    self.accepted[job] = request
                if rng.random() < 0.15:
                    time.sleep(rng.random())
                    with self.lock:
                        self.cancelled.add(job)
                    self.client.cancel(job)
                    continue
                self.client.wait(job)
            except ServerError as error:
                self.counts[f"answered {error.status}"] += 1
                time.sleep(0.5)
            except (AssertionError, RequestError) as error:
                self.failures.append(repr(error))

    def refuse(self, request: Request) -> None:
        """A request that must be refused before it is queued."""
        try:
            self.client.submit(replace(request, duration=77.0))
        except RequestError as error:
            assert error.field == "duration", error
            self.counts["refused"] += 1
            return
        raise AssertionError("a request of 77 s was accepted")

    def trouble(self) -> None:
        """Kill the engine, kill the server, or stop it in order."""
        kind = self.rng.choice(TROUBLES)
        self.counts[f"{kind} ended"] += 1
        if kind == "engine":
            if (pid := self.program.engine()) is not None:
                os.kill(pid, signal.SIGKILL)
            return
        self.program.end(signal.SIGKILL if kind == "server" else signal.SIGTERM)
        self.program = Program(self.folder / "data", self.program.port)

    def check(self) -> None:
        """Every accepted job has ended as it should, and its file is the one that its hash names."""
        for job, request in self.accepted.items():
            try:
                state = self.client.wait(job)
            except ServerError:
                state = self.client.get(job)
            self.counts[state["status"]] += 1
            if state["status"] == "failed":
                self.counts[state["error"]["message"]] += 1
            retried = state["status"] == "failed" and state["error"]["code"] == "EngineLost"
            assert state["status"] == "completed" or job in self.cancelled or retried, (state, request)
            if state["status"] == "completed":
                target = self.client.download(job, self.folder / "file.mp4", overwrite=True)
                assert hashlib.sha256(target.read_bytes()).hexdigest() == state["sha256"]["file"], job

    def repeat(self, number: int) -> None:
        """The same requests again give the same pictures and sounds."""
        done = [job for job in self.accepted if self.client.get(job)["status"] == "completed"]
        for job in self.rng.sample(done, min(number, len(done))):
            again = self.client.wait(self.client.submit(self.accepted[job])["id"])
            first = self.client.get(job)
            for name in ("frames", "waveform", "file"):
                assert again["sha256"][name] == first["sha256"][name], (job, name)
            self.counts["repeated"] += 1


def main() -> None:
    """Run until the time is up; anything amiss ends the process with an AssertionError."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two troubles")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak, begun = Soak(asked.seed, asked.seconds, Path(folder)), time.monotonic()
        threads = [threading.Thread(target=soak.work, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while time.monotonic() + asked.every < soak.end and not soak.failures:
            time.sleep(asked.every)
            soak.trouble()
        for thread in threads:
            thread.join()
        assert not soak.failures, soak.failures
        soak.check()
        levels = memory_of(soak.program.process.pid), memory_of(soak.program.engine())
        soak.repeat(10)
        grown = [
            memory_of(pid) - level
            for pid, level in zip((soak.program.process.pid, soak.program.engine()), levels, strict=True)
        ]
        assert max(grown) < GROWTH, grown
        soak.program.end(signal.SIGTERM)
        print(json.dumps(report(soak, time.monotonic() - begun, levels, grown)))


def report(soak: Soak, seconds: float, levels: tuple[int, ...], grown: list[int]) -> dict[str, Any]:
    """The last line."""
    mib = {"server": levels[0] >> 20, "engine": levels[1] >> 20, "grown": [size >> 20 for size in grown]}
    return {"seconds": round(seconds), "accepted": len(soak.accepted), **dict(sorted(soak.counts.items())), "mib": mib}


if __name__ == "__main__":
    main()
