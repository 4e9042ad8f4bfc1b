"""Remote media on a server: only from allowed hosts, never from addresses of the server's own networks.

A name is resolved here, every address it has must be public, and the connection goes to the address that was checked;
a redirect starts all over. So neither a name that points inwards nor one that changes its mind gets through.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from ..errors import RequestError

REDIRECTS = 3
WAIT_SECONDS, MAX_SECONDS = 10.0, 60.0
PORTS = {"http": 80, "https": 443}
BLOCK = 1 << 16
# Not the internet at large, whatever the table of this Python says: site-local, protocol assignments, relays of 6to4,
# documentation.
_CLOSED = [ipaddress.ip_network(text) for text in ("fec0::/10", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large: not private, loopback, link-local, shared or reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not any(ip in net for net in _CLOSED)


def resolve(host: str, port: int) -> list[str]:
    """Every address of a name. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Fetcher:
    """Fetches from `hosts`: `example.org`, or `.example.org` for it and its subdomains. The rest is for tests."""

    def __init__(
        self,
        hosts: Iterable[str],
        resolve: Callable[[str, int], Sequence[str]] = resolve,
        allowed: Callable[[str], bool] = is_public,
        ports: Iterable[int] = (80, 443),
    ) -> None:
        self._hosts = tuple(host.lower().rstrip(".") for host in hosts)
        self._resolve, self._allowed, self._ports = resolve, allowed, set(ports)

    def fetch(self, address: str, take: Callable[[bytes], object], field: str, max_bytes: int) -> int:
        """Hand what `address` gives to `take`, block by block; its bytes. Raises RequestError naming `field`."""
        end = time.monotonic() + MAX_SECONDS
        try:
            for _ in range(REDIRECTS + 1):
                wire, host, parts = self._connect(address, field)
                with wire, _until(end, wire), _asked(wire, host, parts) as answer:
                    if answer.status in (301, 302, 303, 307, 308):
                        address = urljoin(address, answer.headers.get("Location", ""))
                        continue
                    if answer.status != 200:
                        raise RequestError(field, f"{parts.netloc} answered {answer.status}; check the address")
                    size = _pass_on(answer, take, field, max_bytes)
                if time.monotonic() >= end:  # a line that was hung up may read like the end of the file
                    raise TimeoutError
                return size
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= end:
                raise RequestError(field, f"took more than {MAX_SECONDS:g} s; upload the medium instead") from None
            raise RequestError(field, f"cannot be fetched ({type(error).__name__}); check the address") from None
        raise RequestError(field, f"redirects more than {REDIRECTS} times; give the final address")

    def _connect(self, address: str, field: str) -> tuple[socket.socket, str, SplitResult]:
        parts = urlsplit(address)
        host, scheme = (parts.hostname or "").lower().rstrip("."), parts.scheme.lower()
        if scheme not in PORTS or parts.username is not None:
            raise RequestError(field, "leads to an address that is not plain http or https; upload the medium instead")
        if not any(host == name.lstrip(".") or name[:1] == "." and host.endswith(name) for name in self._hosts):
            raise RequestError(field, f"media from {host[:100]!r} are not allowed here; upload the medium instead")
        port = parts.port or PORTS[scheme]
        if port not in self._ports:
            raise RequestError(field, f"port {port} is not asked; upload the medium instead")
        found = self._resolve(host, port)
        if not found or not all(map(self._allowed, found)):
            raise RequestError(field, f"{host[:100]!r} is not a public address; upload the medium instead")
        return socket.create_connection((found[0], port), WAIT_SECONDS), host, parts


@contextlib.contextmanager
def _until(end: float, wire: socket.socket) -> Iterator[None]:
    """Hang up at `end`: a host that sends a byte now and then keeps every single wait short."""
    line = wire.dup()  # TLS takes `wire` over, and an answer that ends with the line takes it from its connection

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    clock = threading.Timer(max(0.0, end - time.monotonic()), hang_up)
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
        line.close()


@contextlib.contextmanager
def _asked(wire: socket.socket, host: str, parts: SplitResult) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET over `wire`, which is connected to `host`."""
    if parts.scheme.lower() == "https":
        wire = ssl.create_default_context().wrap_socket(wire, server_hostname=host)
    with contextlib.closing(http.client.HTTPConnection(host, PORTS["http"], timeout=WAIT_SECONDS)) as connection:
        connection.sock = wire
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Host": parts.netloc, "User-Agent": "twinreel", "Accept": "*/*"})
        with connection.getresponse() as answer:
            yield answer


def _pass_on(answer: http.client.HTTPResponse, take: Callable[[bytes], object], field: str, max_bytes: int) -> int:
    size = 0
    while block := answer.read1(BLOCK):
        size += len(block)
        if size > max_bytes:
            raise RequestError(field, f"is larger than {max_bytes >> 20:,} MiB; give a smaller file")
        take(block)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return size
