"""http(s) media, where the operator allows them: fetched whole, with limits, before anything else is done."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..request import REMOTE, Request
from ..scratch import scratch

MAX_BYTES = 512 << 20
MAX_SECONDS = 120.0
WAIT_SECONDS = 15.0  # for one answer of the server
BLOCK = 1 << 20


@contextmanager
def fetched(request: Request) -> Iterator[Request]:
    """`request` with every http(s) address replaced by the path of a copy that lives as long as the block.

    RequestError names the field of an address that cannot be fetched.
    """
    with scratch("media") as folder:

        def local(address: Any, field: str, name: str) -> Any:
            if isinstance(address, str) and address.split("://")[0].lower() in REMOTE and "://" in address:
                return download(address, folder / name, field)
            return address

        keyframes = tuple(
            replace(item, image=local(item.image, f"keyframes[{i}].image", f"keyframe-{i}"))
            for i, item in enumerate(request.keyframes)
        )
        references = tuple(
            replace(item, source=local(item.source, f"references[{i}].source", f"reference-{i}"))
            for i, item in enumerate(request.references)
        )
        yield replace(request, keyframes=keyframes, references=references)


def download(address: str, target: Path, field: str, *, max_bytes: int = MAX_BYTES) -> str:
    """Write what `address` gives to `target` and return its path. RequestError beyond the limits of size and time."""
    # only these: the default opener would also follow a redirect to ftp, and read proxies from the environment
    opener = urllib.request.OpenerDirector()
    for part in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(part)
    stop, size = time.monotonic() + MAX_SECONDS, 0
    try:
        with opener.open(address, timeout=WAIT_SECONDS) as answer, target.open("wb") as file:
            while block := answer.read1(BLOCK):
                size += len(block)
                if size > max_bytes:
                    raise RequestError(
                        field, f"more than {max_bytes >> 20:,} MiB at {address[:200]}; give a smaller file"
                    )
                if time.monotonic() > stop:
                    raise RequestError(field, f"{address[:200]} took more than {MAX_SECONDS:g} s; download it yourself")
                file.write(block)
            if answer.length:  # `read1` ends there without a word
                raise RequestError(field, f"{address[:200]} broke off, {answer.length:,} bytes are missing; try again")
    except (OSError, ValueError, HTTPException) as error:
        raise RequestError(field, f"cannot fetch {address[:200]!r} ({error}); check the address") from None
    return str(target)
