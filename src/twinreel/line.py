"""A line between two processes of ours: Python values, one after the other."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any


def limit(line: Connection, seconds: float) -> None:
    """Let `put` and `get` raise BlockingIOError where for so long the other end, as that of a stopped process, takes
    nothing of a message, or gives no more of one."""
    whole = int(seconds)
    time = struct.pack("ll", whole, round((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, time)


def put(line: Connection, message: Any) -> None:
    """Send by value: a connection's own pickler would send tensors as shared memory, which strangers cannot open."""
    line.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def get(line: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other end is gone."""
    return pickle.loads(line.recv_bytes())
