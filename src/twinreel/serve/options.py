"""What an operator chooses about the server, checked before a port is opened."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
KEY_FILE_BYTES = 4096
SHORTEST_KEY = 16  # characters; below that a key can be guessed over the network


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
    """How often a job may be begun in all, restarts of the server included."""
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
    for name in ("max_queued", "max_variants", "upload_mib", "megapixels", "idle_seconds", "max_starts", "keep_gib"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"{name}: got {getattr(options, name)}; it must be above 0")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"port: got {options.port}; from 0 (any free one) to 65535")
    key = None if options.api_key_file is None else _read_key(options.api_key_file)
    if key is None and not is_loopback(options.host):
        raise ConfigError(
            f"host: {options.host} can be reached from other machines; give --api-key-file, or listen at 127.0.0.1"
        )
    return key


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
        if path.exists() and (not path.is_file() or path.stat().st_size > KEY_FILE_BYTES):
            raise ConfigError(
                f"{name}: {path} is no file of at most {KEY_FILE_BYTES} bytes; name the file with the key"
            )
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot read {path} ({error}); name the file with the key") from None


def _read_key(path: Path) -> str:
    key = first_line(path, "api_key_file")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
        raise ConfigError(f"api_key_file: the key in {path} needs {SHORTEST_KEY} or more printable ASCII characters")
    return key
