"""The processes of an engine's ranks: started, watched and started anew. `rank` is what runs in each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from .errors import ConfigError
from .launch import MEETING, PATIENCE, environment, module
from .line import get, limit, put
from .stopping import Stopped, held_back
from .watch import Boundary, Watch

ENTRY = "twinreel.rank"
PULSE = 0.3  # seconds between two signs of life of a rank
SILENCE = 25.0  # seconds without one after which a rank counts as stuck
HUSH = 3.0  # seconds without one after which it is what the others failed for
GATHERING = 1.0  # seconds after a failure in which the others may say why
LEAVING = 5.0  # seconds for a process whose line is gone to be gone too
CLOSED = "the engine was closed in the middle of this run"
ENDING = 10.0  # seconds to end a run that its caller has left


class RankLost(RuntimeError):
    """A process of a rank ended, or its ranks no longer answer. They are started anew; the next request works."""


@dataclass
class Member:
    """A started rank: its process, our end of its line, whether it has said that it is ready, when it was heard last."""

    rank: int
    process: subprocess.Popen[bytes]
    line: Connection
    ready: bool = False
    heard: float = 0.0


class Ranks:
    """`count` ranks of one engine, each a process that runs `ENTRY`. One run at a time.

    settings: what it builds its engine of. Raises what a rank raises when it cannot.
    """

    def __init__(self, settings: Any, count: int) -> None:
        self._settings, self._count, self._entry = settings, count, ENTRY
        self._members: list[Member] = []
        self._running: int | None = None
        self._waiting: set[int] = set()  # ranks of the run that have not ended it
        self._runs = 0
        self._kept = ""  # what rank 0 has said of latents that are in a file
        self._cancelled = self._ended = False
        self._mine = threading.RLock()  # whoever has it starts and ends processes
        self.facts: dict[str, Any] = {}
        ready = False
        try:
            self._start()
            self._await_ready()
            ready = True
        finally:  # behind a signal as well
            if not ready:
                self.close()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [member.process.pid for member in self._members]

    def run(self, order: tuple[Any, ...], watch: Watch, boundary: Boundary | None) -> Any:
        """Have every rank carry out `order`; rank 0's result.

        `watch` and `boundary` are called here with what rank 0 tells. Raises the error that all ranks agreed on; the
        cause of any other, after which the ranks are started anew; RankLost. Each has a note of latents that are kept.
        """
        with self._mine:
            self._cancelled = False
            return self._run(order, watch, boundary)

    def _run(self, order: tuple[Any, ...], watch: Watch, boundary: Boundary | None) -> Any:
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            raise ConfigError("the working folder of this process is gone; change into one that is there") from None
        gone = any(member.process.poll() is not None for member in self._members)
        # since the last run, while they were started after it, or because a signal cut its ending short
        if gone or len(self._members) < self._count or self._waiting:
            self.close()  # which costs this one nothing but time
            self._start()
        self._await_ready()
        self._runs, self._kept = self._runs + 1, ""
        try:
            return self._carried_out(folder, order, watch, boundary)
        finally:
            self._running = None
            if self._waiting:  # the caller has left: end the run, or the ranks
                self._abandon()
            error = sys.exc_info()[1]
            if error is not None and self._kept and self._kept not in getattr(error, "__notes__", ()):
                error.add_note(self._kept)

    def _carried_out(self, folder: str, order: tuple[Any, ...], watch: Watch, boundary: Boundary | None) -> Any:
        self._waiting = {member.rank for member in self._members}
        for member in self._members:
            self._send(member, ("run", self._runs, folder, order, boundary is not None))
            member.heard = time.monotonic()
        self._running = self._runs  # not before: a signal's cancel must not cut an order in two
        if self._cancelled:  # while they were started
            self.cancel()
        return self._listen(watch, boundary)

    def _send(self, member: Member, message: tuple[Any, ...]) -> None:
        try:
            put(member.line, message)
        except OSError as error:
            stopped = isinstance(error, BlockingIOError)
            told = RankLost(f"rank {member.rank} took nothing from its line; its process does not run")
            raise self._broken(told if stopped else error, None) from None

    def cancel(self) -> None:
        """End the run at its next vote. Without one, no effect."""
        self._cancelled = True
        if self._running is not None:
            for member in self._members:
                try:
                    put(member.line, ("cancel", self._running))
                except OSError:
                    pass  # it is gone, which `run` finds out

    def end(self) -> None:
        """End the ranks for good; a run that goes on elsewhere ends with RuntimeError."""
        self._ended = True
        for member in list(self._members):
            member.process.kill()  # which a run notices
        with self._mine:
            self.close()

    def close(self) -> None:
        """End the ranks."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait()
            member.line.close()
        self._members, self._waiting = [], set()

    def _listen(self, watch: Watch, boundary: Boundary | None) -> Any:
        result: Any = None
        error: BaseException | None = None
        while self._waiting:
            for member, message in self._messages():
                kind, *values = message
                if kind == "event":
                    watch(*values)
                elif kind == "boundary" and boundary is not None:
                    boundary(*values)
                    self._send(member, ("recorded",))
                elif kind == "done":
                    self._waiting.discard(member.rank)
                    result = values[0] if member.rank == 0 else result
                elif kind == "failed":
                    failed, agreed = values
                    if not agreed:
                        raise self._broken(failed, member.rank)
                    self._waiting.discard(member.rank)
                    error = failed if error is None or member.rank == 0 else error  # rank 0's has its notes
        if not self._members:  # the watch has closed the engine
            raise RuntimeError(CLOSED)
        if error is not None:
            raise error
        return result

    def _heard(self, line: Connection) -> tuple[Any, ...]:
        """The next message of a rank; what rank 0 says of latents is remembered wherever it is heard."""
        message: tuple[Any, ...] = get(line)
        if message[0] == "kept":
            self._kept = message[1]
        return message

    def _messages(self) -> Iterator[tuple[Member, tuple[Any, ...]]]:
        """The next message of each rank that has one, each read when it is asked for."""
        lines = {member.line: member for member in self._members if member.rank in self._waiting}
        heard = wait(list(lines), PULSE)
        for member in lines.values():  # before the caller may be busy for longer than that
            if member.line not in heard and time.monotonic() - member.heard > SILENCE:
                raise self._broken(RankLost(f"rank {member.rank} gave no sign of life for {SILENCE:.0f} s"), None)
        for line in heard:
            assert isinstance(line, Connection)
            try:
                message = self._heard(line)
            except (EOFError, OSError) as error:
                raise self._broken(error, None) from None
            lines[line].heard = time.monotonic()
            yield lines[line], message

    def _broken(self, error: BaseException, failed: int | None) -> BaseException:
        """The cause of a run that cannot go on; the ranks are ended and started anew."""
        if self._ended:
            return RuntimeError(CLOSED)
        end, silent = time.monotonic() + GATHERING, {member.rank for member in self._members} - {failed}
        words: dict[int, str] = {}
        alive: set[int] = set()
        while silent and (left := end - time.monotonic()) > 0:
            lines = {member.line: member.rank for member in self._members if member.rank in silent}
            for line in wait(list(lines), left):
                assert isinstance(line, Connection)
                try:
                    kind, *values = self._heard(line)
                except (EOFError, OSError):
                    silent.discard(lines[line])
                    continue
                alive.add(lines[line])
                if kind in ("failed", "done"):
                    silent.discard(lines[line])
                    words[lines[line]] = f"{type(values[0]).__name__}: {values[0]}" if kind == "failed" else "done"
        # those whose line is gone, and have said nothing of an end of their own, are on their way out
        for member in self._members:
            if member.rank not in silent | words.keys() | {failed}:
                _wait_for(member.process)
        lost = {member.rank: code for member in self._members if (code := member.process.poll()) is not None}
        deaf = {member.rank: member.heard for member in self._members if member.rank in silent - alive}
        self.close()
        self._start()
        error = self._cause(error, failed, lost, deaf, words)
        for rank, said in words.items():
            error.add_note(f"rank {rank} then: {said.splitlines()[0][:200]}")
        return error

    def _cause(
        self, error: BaseException, failed: int | None, lost: Mapping[int, int], deaf: Mapping[int, float],
        words: dict[int, str],
    ) -> BaseException:  # fmt: skip
        """What ended the run: a rank that is gone or stuck before whatever the others raised while they waited for it.

        lost: exit code by rank; deaf: when a rank that gave no sign of life was heard last. `words` gains what it hides.
        """
        hushed = {rank: time.monotonic() - heard for rank, heard in deaf.items()}
        hushed = {rank: seconds for rank, seconds in hushed.items() if seconds > HUSH}
        if isinstance(error, RankLost) and not lost:
            return error
        if hushed and set(lost.values()) == {-signal.SIGABRT}:  # NCCL ends who waits too long for them
            words |= {rank: f"ended by {ending(code)}" for rank, code in lost.items()}
            lost = {}
        if lost or hushed:
            reasons = [f"rank {rank} ended by {ending(code)}" for rank, code in lost.items()]
            reasons += [f"rank {rank} gave no sign of life for {seconds:.0f} s" for rank, seconds in hushed.items()]
            if failed is not None and failed not in lost:
                words[failed] = f"{type(error).__name__}: {error}"
            return RankLost("; ".join(reasons))
        if failed is None:
            return RankLost(f"the line to a rank broke ({error})")
        error.add_note(f"on rank {failed} of {self._count}")
        if deaf:
            error.add_note(f"no answer from rank {', '.join(map(str, sorted(deaf)))}")
        return error

    def _abandon(self) -> None:
        if self._ended or isinstance(sys.exc_info()[1], Stopped):  # at once; who runs again starts them again
            self.close()
            return
        for member in self._members:
            try:
                put(member.line, ("cancel", self._runs))
                put(member.line, ("recorded",))  # it may wait for the values that the caller left at
            except OSError:
                pass
        end = time.monotonic() + ENDING
        while self._waiting and (left := end - time.monotonic()) > 0:
            lines = {member.line: member.rank for member in self._members if member.rank in self._waiting}
            for line in wait(list(lines), left):
                assert isinstance(line, Connection)
                try:
                    kind, *values = self._heard(line)
                    if kind == "boundary":
                        put(line, ("recorded",))
                except (EOFError, OSError):
                    end = 0.0
                    break
                if kind == "failed" and not values[1]:
                    end = 0.0
                if kind in ("done", "failed"):
                    self._waiting.discard(lines[line])
        if self._waiting or end == 0.0:
            self.close()
            self._start()

    def _start(self) -> None:
        self._members = []
        if self._ended:
            raise RuntimeError(CLOSED)
        with held_back(), socket.socket() as listener:  # no rank hears Ctrl-C before it can leave it to us
            listener.bind(("127.0.0.1", 0))
            listener.listen(self._count)
            variables = {
                "WORLD_SIZE": self._count, "LOCAL_WORLD_SIZE": self._count,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": listener.getsockname()[1],
            }  # fmt: skip
            for rank in range(self._count):
                self._members.append(self._start_rank(rank, listener.fileno(), variables))
                put(self._members[-1].line, self._settings)

    def _start_rank(self, rank: int, listening: int, variables: dict[str, Any]) -> Member:
        ours, theirs = Pipe()
        own = variables | {"RANK": rank, "LOCAL_RANK": rank}
        passed = (theirs.fileno(), *([listening] if rank == 0 else []))
        # Its standard output is ours to fill: what a rank prints goes to standard error.
        process = subprocess.Popen(
            module(self._entry, *map(str, passed)),
            pass_fds=passed, stdin=subprocess.DEVNULL, stdout=2, env=environment(own),
        )  # fmt: skip
        theirs.close()
        limit(ours, SILENCE / 2)  # a large message fills what the line holds, and then waits once more
        return Member(rank, process, ours, heard=time.monotonic())

    def _await_ready(self) -> None:
        end = time.monotonic() + MEETING
        while late := [member for member in self._members if not member.ready]:
            if self._ended:
                raise RuntimeError(CLOSED)
            if time.monotonic() > end:
                quiet = min(late, key=lambda member: member.heard)  # the others may only wait for it
                silent = time.monotonic() - quiet.heard
                self.close()
                told = f" and gave no sign of life for {silent:.0f} s" if silent > SILENCE else ""
                raise RankLost(f"rank {quiet.rank} was not ready after {MEETING:.0f} s{told}")
            lines = wait([member.line for member in late], PULSE)
            for member in late:
                if member.line in lines:
                    self._welcome(member)

    def _welcome(self, member: Member) -> None:
        try:
            kind, *values = get(member.line)
        except (EOFError, OSError):
            code = member.process.wait()
            if self._ended:
                raise RuntimeError(CLOSED) from None
            self.close()
            raise RankLost(f"rank {member.rank} ended by {ending(code)} before it was ready") from None
        member.heard = time.monotonic()
        if kind == "failed":
            self.close()
            raise values[0]
        member.ready = kind == "ready"
        if member.ready and member.rank == 0:
            self.facts = values[0]


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(LEAVING)
    except subprocess.TimeoutExpired:
        pass  # it closed its line and lives: `close` ends it


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    often = {
        signal.SIGKILL: " (killed from outside, often because the system was out of memory)",
        signal.SIGABRT: f" (often because an exchange between ranks took more than {PATIENCE:.0f} s)",
    }
    return f"signal {signal.Signals(-code).name}{often.get(signal.Signals(-code), '')}"
