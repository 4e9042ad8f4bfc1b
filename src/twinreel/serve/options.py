"""What an operator chooses about the server, checked before a port is opened."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..limits import shown
from ..small_files import read_small, why

MIB, GIB = 1 << 20, 1 << 30
KEY_FILE_BYTES = 4096
SHORTEST_KEY = 16  # characters; below that a key can be guessed over the network
WEEK, CENTURY = 7 * 86400.0, 36500.0  # seconds, days: what is longer is a slip, and some clocks cannot count to it
# What each number may be, ends included; one whose low end is a whole number must be whole itself.
NUMBERS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_queued": (1, 1_000_000),
    "max_variants": (1, 1000),
    "upload_mib": (1, 1 << 20),
    "megapixels": (0.001, 1000.0),
    "idle_seconds": (0.01, WEEK),
    "keep_days": (0.001, CENTURY),
    "keep_gib": (0.001, 1e6),
    "spare_gib": (0.0, 1e6),
    "drain_seconds": (0.0, WEEK),
    "retries": (0, 100),
    "max_starts": (1, 1_000_000),
    "stall_seconds": (1.0, WEEK),
    "cache_mib": (0, 1 << 30),
}
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*", re.IGNORECASE)


@dataclass(frozen=True)
class ServeOptions:
    """How the server listens, keeps and refuses; the defaults are safe on a machine of your own."""

    host: str = "127.0.0.1"
    """Address to listen at; any but a loopback address needs --api-key-file."""
    port: int = 8188
    """Port; 0 takes a free one and prints it."""
    data: Path = Path("twinreel-data")
    """Folder of the queue, the uploads and the results; one server a folder."""
    api_key_file: Path | None = None
    """File whose first line is the API key (16 characters or more)."""
    names: tuple[str, ...] = ()
    """Host names the server is reached by, besides localhost and --host: other Host headers are refused."""
    remote_hosts: tuple[str, ...] = ()
    """Hosts http(s) media may come from: example.org, or .example.org with its subdomains. Default: none."""
    max_queued: int = 64
    """Jobs that may wait; further ones are answered with 429."""
    max_variants: int = 8
    """Most variants (`n`) of one request."""
    upload_mib: int = 512
    """MiB of media of one request, all files together."""
    megapixels: float = 64.0
    """Largest picture, in millions of pixels."""
    idle_seconds: float = 30.0
    """A client that sends nothing for so long is disconnected."""
    keep_days: float = 30.0
    """Finished jobs are removed after so many days."""
    keep_gib: float = 20.0
    """The oldest finished jobs are removed when all take more than this."""
    spare_gib: float = 1.0
    """New jobs are refused (503) while the disk has less room than this."""
    drain_seconds: float = 30.0
    """At shutdown the running job may take so long to end; then it goes back to the queue."""
    retries: int = 1
    """How often a job is tried again after it took the engine down."""
    max_starts: int = 20
    """How often a job may be begun, restarts of the server included; orderly stops give their start back."""
    stall_seconds: float = 3600.0
    """An engine silent for so long inside a job is restarted."""
    warm: tuple[str, ...] = ()
    """What to run once before the server is ready: TASK@WIDTHxHEIGHTxSECONDS, such as t2va@1344x768x5."""
    cache_mib: int = 512
    """Host memory for prompt embeddings and reference latents kept across requests; 0 keeps none."""
    drop_latents: bool = False
    """Keep no latents of finished jobs (`?variant=latents`)."""
    log_prompts: bool = False
    """Write prompts into the log."""


def check_options(options: ServeOptions) -> str | None:
    """The API key, or None where none is asked for. Raises ConfigError for what is unsafe or cannot work."""
    for name, (low, high) in NUMBERS.items():
        _check_number(f"--{name.replace('_', '-')}", getattr(options, name), low, high)
    for name in options.names:
        if not is_host(name):
            raise ConfigError(f"--names: got {name!r}; write one host name each, such as video.example.org")
    for name in options.remote_hosts:
        if not is_host(name.removeprefix(".")):
            raise ConfigError(
                f"--remote-hosts: got {name!r}; write example.org, or .example.org for it and its subdomains"
            )
    key = None if options.api_key_file is None else _read_key(options.api_key_file)
    if key is None and not is_loopback(options.host):
        raise ConfigError(
            f"host: {options.host} can be reached from other machines; give --api-key-file, or listen at 127.0.0.1"
        )
    return key


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    whole = isinstance(low, int)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name}: got {shown(value)}; give {kind} from {low:,} to {high:,}")


def is_host(name: Any) -> bool:
    """Whether `name` can be what a host is called: a name or an address, with neither port nor wildcard."""
    if not isinstance(name, str) or len(name) > 253:
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
        return True
    except ValueError:
        return _NAME.fullmatch(name.removesuffix(".")) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def first_line(path: Path, name: str) -> str:
    """The first line of a small file that holds a key, stripped. Raises ConfigError that begins with `name`."""
    try:
        return read_small(path, KEY_FILE_BYTES).decode("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot read {path} ({why(error)}); name the file with the key") from None


def _read_key(path: Path) -> str:
    key = first_line(path, "api_key_file")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"api_key_file: the first line of {path} is no key: {SHORTEST_KEY} or more printable ASCII characters are "
            f"needed; make one with: python -c 'import secrets; print(secrets.token_urlsafe())' > {path}"
        )
    return key
