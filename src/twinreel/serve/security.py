"""Who may talk to the server: the API key, browser sessions, the names it is reached by, and pages of other origins."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from .options import is_loopback

COOKIE = "twinreel_session"
SESSION_SECONDS = 12 * 3600
OPEN_PATHS = ("/health", "/ready")  # what a load balancer asks
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# The page, its files and the session are open: without the key they show nothing.
GUARDED = ("/v1/", "/metrics", "/openapi.json")
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}
# Media of a page come from the server itself, from the page's own memory (blob:) or stand in it (data:).
PAGE_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def pathless(text: str) -> str:
    """A message for clients: files of this machine by their last names alone."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.@+~-]+)+/([\w.@+~-]+)", r"\1", text)


class Refusal(Exception):
    """A request that is not let in: HTTP `status`, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


class Guard:
    """Checks requests against `key` (None: none is asked for) and against `names`, the hosts the server answers to."""

    def __init__(self, key: str | None, host: str, names: Iterable[str]) -> None:
        self._key = None if key is None else hashlib.sha256(key.encode()).digest()
        # sessions end with the process
        self._secret = secrets.token_bytes(32)
        self._names = {name.lower() for name in (host, "localhost", *names)}

    @property
    def asks_for_key(self) -> bool:
        """Whether an API key is needed."""
        return self._key is not None

    def check(self, method: str, path: str, headers: Mapping[str, str], cookies: Mapping[str, str]) -> None:
        """Raise Refusal for a request that must not go on."""
        host = headers.get("host", "")
        # a page of another site whose name was made to point here would send that name; with a key it has none to send
        if self._key is None and not self._is_ours(host):
            raise Refusal(
                403, "forbidden", f"the host name {host[:100]!r} is not served; the operator adds it with --names"
            )
        if method not in SAFE_METHODS and not self._same_origin(headers, host):
            raise Refusal(403, "forbidden", "requests from pages of other origins are refused")
        if self._key is None or path in OPEN_PATHS or path == "/v1/session" or not path.startswith(GUARDED):
            return
        given = headers.get("authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else headers.get("x-api-key")
        if key is not None:
            if self.is_key(key.strip()):
                return
            raise Refusal(401, "unauthorized", "the API key is wrong")
        if not self.is_session(cookies.get(COOKIE, "")):
            raise Refusal(401, "unauthorized", "an API key is needed: send Authorization: Bearer KEY")

    def is_key(self, key: str) -> bool:
        """Whether this is the key, in time that does not depend on where it differs."""
        if self._key is None:
            return True
        return hmac.compare_digest(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), self._key)

    def session(self) -> str:
        """A new session's cookie."""
        end = str(int(time.time()) + SESSION_SECONDS)
        return f"{end}.{self._sign(end)}"

    def is_session(self, cookie: str) -> bool:
        """Whether this cookie was made here and still holds."""
        end, _, mark = cookie.partition(".")
        good = hmac.compare_digest(mark.encode("utf-8", "replace"), self._sign(end).encode())
        return good and end.isdecimal() and int(end) > time.time()

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("utf-8", "replace"), "sha256").hexdigest()

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name.lower() in self._names or is_loopback(name)

    @staticmethod
    def _same_origin(headers: Mapping[str, str], host: str) -> bool:
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False
