"""What `Client` and its methods are given, checked in one place before anything is sent, downloaded or written: each
error names the argument, what was given and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..errors import ConfigError, RequestError
from ..limits import Range, check_choice, check_number, check_text, shown
from ..output import absolute_path
from ..plain import plain
from ..request import check_form
from ..tools.targets import Targets

TIMEOUT = Range(0.001, 604_800, "s")
PATIENCE = Range(0, 604_800, "s")
ONCE_CHARACTERS = 200
VARIANTS = ("video", "audio", "frames", "latents", "report")


def place_of(url: Any) -> tuple[bool, str, str]:
    """(https, host and port, path before the routes) of a server's address. Raises ConfigError, which repeats no secret
    that may stand in the address."""
    how = "write http://HOST:PORT"
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.query or parts.fragment
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
    except (ValueError, TypeError, AttributeError):  # half an IPv6 address, a port beyond 65535, no text
        raise ConfigError(f"server: {_harmless(url)} is not an address; {how}") from None
    if secret:
        raise ConfigError(
            f"server: an address holds no user, password, ? or #; {how} (and the key by --server-key-file)"
        )
    if not good or not url.isprintable() or " " in url:
        raise ConfigError(f"server: {_harmless(url)} is not the address of a server; {how}")
    return parts.scheme == "https", parts.netloc, parts.path.rstrip("/")


def _harmless(url: Any) -> str:
    return "what was given" if "@" in str(url) else shown(url)


def headers_of(key: Any) -> dict[str, str]:
    """The headers that carry an API key, if there is one. Raises ConfigError, which does not repeat it."""
    if key is None:
        return {}
    if not isinstance(key, str) or not (key and key.isascii() and key.isprintable()):
        raise ConfigError("key: an API key is one or more printable ASCII characters; ask whoever runs the server")
    return {"Authorization": f"Bearer {key}"}


def seconds_of(name: str, value: Any, allowed: Range) -> float:
    """A number of seconds in the range. Raises ConfigError."""
    value = plain(value)
    try:
        allowed.check(name, value)
    except RequestError:
        told = f"give a number of seconds from {allowed.low:g} to {allowed.high:g}"
        raise ConfigError(f"{name}: got {shown(value)}; {told}") from None
    return float(value)


def check_order(request: Any, *, once: Any = None, **whole: Any) -> dict[str, int]:
    """Refuse what is no `Request`, whatever the server's weights are, an idempotency key that no header holds, and
    `whole` numbers that are none; these are returned. Raises RequestError."""
    check_form(request, allow_remote=True)
    numbers = {name: plain(value) for name, value in whole.items()}
    for name, value in numbers.items():
        check_number(name, value, whole=True)
    if once is None:
        return numbers
    if not isinstance(once, str) or not once.isascii() or not once.isprintable() or once != once.strip():
        raise RequestError("once", f"got {shown(once)}; give printable ASCII characters, or leave it out")
    if not 1 <= len(once) <= ONCE_CHARACTERS:
        raise RequestError("once", f"has {len(once)} characters; give 1 to {ONCE_CHARACTERS}, or leave it out")
    return numbers


def check_watch(watch: Any) -> None:
    """Refuse what cannot be called. Raises RequestError."""
    if not callable(watch):
        raise RequestError("watch", f"got {shown(watch)}; give a function that takes an Event, or leave it out")


def check_filters(filters: dict[str, Any]) -> None:
    """Refuse what no question can hold. Raises RequestError; what a filter may be, the server says."""
    for name, value in filters.items():
        if isinstance(value, bool) or not isinstance(plain(value), int | str):
            raise RequestError(name, f"got {shown(value)}; give text or a whole number, or leave it out")
        check_text(name, str(value))


def route_of(job: Any) -> str:
    """Where the API has the job of this id. Raises RequestError."""
    if not isinstance(job, str) or not job:
        raise RequestError("job", f"got {shown(job)}; give the id of a job, such as submit(...)['id']")
    check_text("job", job)
    return f"/v1/videos/{quote(job, '')}"


def target_of(path: Any, variant: Any, overwrite: Any) -> Path:
    """The absolute path of a file that can be written, for one of the files of a job. Raises RequestError."""
    check_choice("variant", variant, VARIANTS)
    check_choice("overwrite", overwrite, (True, False))
    target = absolute_path("path", path)
    Targets({"path": target}, (), overwrite)
    return target
