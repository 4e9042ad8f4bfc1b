"""`twinreel serve`: uvicorn around the application, with an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ConfigError
from ..limits import shown
from .app import build_app
from .service import Service

HEADER_SECONDS = 20.0  # a connection that has sent no whole request line and headers by then is closed
LINGER_SECONDS = 10  # for answers that are being sent when the server stops
CONNECTIONS = 1000
BACKLOG = 2048


class Connection(H11Protocol):
    """HTTP/1.1, with an end to connections that never say what they want: neither at first nor after an answer."""

    _clock: asyncio.TimerHandle | None = None
    _seen: Any = None  # the request that was the newest when the clock was started

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Start the clock at the beginning of a further request."""
        if self._clock is None and self._waits():
            self._start_clock()
        super().data_received(data)

    def _start_clock(self) -> None:
        self._seen = self.cycle
        self._clock = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._check_silence)

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_silence(self) -> None:
        seen, self._seen, self._clock = self._seen, None, None
        if self.transport.is_closing() or not self._waits():
            return
        if self.cycle is seen:
            self.transport.close()
        elif self.timeout_keep_alive_task is None:  # a further head has begun meanwhile
            self._start_clock()


class Server(uvicorn.Server):
    """Ends event streams first, so that an orderly end need not wait for their readers."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.stopped_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop."""
        self.stopped_by = self.stopped_by or sig
        self._service.refuse_more()
        super().handle_exit(sig, frame)


def make_server(service: Service, sockets: Callable[[], None] | None = None) -> Server:
    """The HTTP server of a service, not yet running; its start and stop are the service's."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.start)
        yield
        await run_in_threadpool(service.stop)

    app = build_app(service)
    app.router.lifespan_context = life
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=LINGER_SECONDS,
    )
    return Server(config, service)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # named TCP outright: asyncio sends small packets at once only on sockets that say so (40 ms more otherwise)
        wire = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wire.bind(place)
        wire.listen(BACKLOG)  # whoever has been told the address may come, and waits until the server is up
    except (OSError, ValueError) as error:  # a name that no name service takes is a ValueError
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"port: cannot listen at {shown(host)[1:-1]}:{port} ({why}); name another") from None
    return wire


def serve(service: Service, told: Callable[[str], None] = print) -> int:
    """Serve until SIGINT or SIGTERM; `told` is given the address. Returns the exit code, 128 and the signal's number."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    wire = listen(service.options.host, service.options.port)
    host, port = wire.getsockname()[:2]
    told(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    server, number = make_server(service), 0
    try:
        server.run(sockets=[wire])
    except KeyboardInterrupt as error:  # raised by uvicorn at its very end, where the signal is not ignored
        number = int(getattr(error, "signal", signal.SIGINT))
    if not (number := number or server.stopped_by or 0):
        return 0
    print("twinreel: stopped in order; jobs that were not done go on when it serves again", file=sys.stderr)
    return 128 + number
