"""Stdout and stderr of a command: neither can end it. A dead stderr changes nothing, a dead stdout the exit code.

One rule for every command: what was made is kept, and a command that would have ended with 0 ends with 1 where stdout
did not take all of its result. Closed, full and left by its reader are the same.
"""

from __future__ import annotations

import errno
import os
import sys
from types import TracebackType
from typing import Any, TextIO

from .complaint import Complaint

UNHEARD = 1  # the exit code of a command that went well, and could not say so
STANDARD = (0, 1, 2)


class Outlet:
    """A text stream that cannot fail: after the first fault what is written goes nowhere, and `fault` remembers why."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO | None = stream
        self.fault: Exception | None = None
        if stream is None:  # how Python shows a descriptor that was closed before it began
            self.fault = OSError(errno.EBADF, os.strerror(errno.EBADF))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name of a file may be no text

    def write(self, text: str) -> int:
        """Write if that is still possible; the length of `text`."""
        if self.fault is None and self._stream is not None:
            try:
                self._stream.write(text)
            except RuntimeError:  # a signal's words, come in the middle of another write that has not ended: not told
                pass
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Send what was written on its way."""
        if self.fault is None and self._stream is not None:
            try:
                self._stream.flush()
            except RuntimeError:
                pass
            except (OSError, ValueError) as error:
                self._lose(error)

    def isatty(self) -> bool:
        """Whether a terminal reads it."""
        return self.fault is None and self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: Exception) -> None:
        self.fault = error
        try:
            number = self.fileno()
        except (OSError, ValueError, AttributeError):
            return  # a stream of Python's own
        if number in STANDARD:  # what its buffer still holds would fail once more when the process ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


class Outlets:
    """Inside the block `sys.stdout` and `sys.stderr` cannot fail; `settle` then says what the exit code is."""

    def __enter__(self) -> Outlets:
        self._before = sys.stdout, sys.stderr
        _fill_gaps()
        self.out, self.err = Outlet(sys.stdout), Outlet(sys.stderr)
        sys.stdout, sys.stderr = self.out, self.err  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stdout, sys.stderr = self._before

    def settle(self, code: int) -> int:
        """`code`, or where that is 0 and stdout did not take it all `UNHEARD`; stderr is told why, unless a reader left."""
        self.out.flush()
        if code == 0 and self.out.fault is not None:
            code = UNHEARD
            why = getattr(self.out.fault, "strerror", None) or str(self.out.fault)
            kept = "a file that was made is kept, with its report beside it; send stdout elsewhere to read the result"
            if not isinstance(self.out.fault, BrokenPipeError):  # `| head` has read what it wanted
                print(Complaint("the result could not be written to stdout", why, kept), file=self.err)
        self.err.flush()
        return code


def _fill_gaps() -> None:
    """Give a closed standard descriptor to nobody: the next file that is opened would get its number, and its text."""
    for number in STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
