"""A process of ours that speaks JSON lines: one line in is an order, lines out are its answers.

It runs in a process group of its own, so that nothing it starts outlives it, and ends by itself when this process dies
(its standard input then closes).
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from ..launch import environment

REMEMBERED = 20  # last lines of its standard error, for the cause of its death
SHOWN = 300


class ChildLost(Exception):
    """The process is gone; the message says how it ended and its last words."""


class Child:
    """One started process. `send` and `receive` may be used by different threads. OSError: the system has none to give."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=environment(),
        )  # fmt: skip
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._words: deque[str] = deque(maxlen=REMEMBERED)
        self._sending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._read_answers, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_words, args=(self._process.stderr,), daemon=True),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # no further thread is to be had
            self.kill()
            raise OSError(errno.EAGAIN, str(error)) from None

    @property
    def pid(self) -> int:
        """Its process and group number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(self, order: dict[str, Any]) -> None:
        """Give an order. Raises ChildLost."""
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise ChildLost(self.cause()) from None

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Its next answer, or None after `timeout` seconds. Raises ChildLost when it has ended."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            return None
        if line is not None:
            try:
                if isinstance(answer := json.loads(line), dict):
                    return answer
                raise ValueError(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise ChildLost(f"what it said is no answer: {line[:SHOWN]!r}") from None
        self._lines.put(None)  # it has ended, be it in the middle of a line
        raise ChildLost(self.cause())

    def cause(self) -> str:
        """How it ended, in words."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its output and did not end"
        self._threads[1].join(1)
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (killed from outside, often because the system was out of memory)"
        last = next((word for word in reversed(self._words) if word.strip()), "")
        return f"{how}; its last words: {last.strip()[:SHOWN]}" if last else how

    def kill(self) -> None:
        """End it and all it has started, now."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._close()

    def stop(self, seconds: float) -> None:
        """Ask it to end by closing its input; kill the group after `seconds`."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(seconds)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def _close(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(2)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass  # what was left to write has no reader any more

    def _read_answers(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _read_words(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._words.append(text)
            print(text, file=sys.stderr, flush=True)


class Voice:
    """The other end: orders from standard input, answers to what was standard output when it was made.

    Whatever else prints to standard output goes to standard error from then on.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._speaking = threading.Lock()

    def say(self, **answer: Any) -> None:
        """Answer."""
        with self._speaking:
            self._answers.write(json.dumps(answer, default=str) + "\n")
            self._answers.flush()

    @staticmethod
    def orders() -> Any:
        """Every order, until the other process closes the line or dies. A thread may wait in here when the process ends:
        if it read `sys.stdin`, Python would abort."""
        for line in os.fdopen(os.dup(0), "rb"):
            if line.endswith(b"\n"):  # or it died in the middle of one
                yield json.loads(line)
