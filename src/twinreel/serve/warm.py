"""What `--warm` names: a request of two steps of a task and size, run once before the server is ready."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, RequestError
from ..request import Keyframe, Reference, Request, check_request
from ..spec import Spec

_TEXT = re.compile(r"(t2va|fl2va|ref2va)@(\d{1,5})x(\d{1,5})x(\d{1,4}(?:\.\d{1,4})?)", re.ASCII)
STEPS = 2


def warm_request(text: str) -> Request:
    """The request that `text` names (`t2va@1344x768x5`), its medium a grey picture. Raises ConfigError."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--warm: got {text[:60]!r}; write TASK@WIDTHxHEIGHTxSECONDS, such as t2va@1344x768x5")
    import numpy as np

    from ..sources import Picture

    width, height = int(found[2]), int(found[3])
    media: dict[str, Any] = {}
    if found[1] != "t2va":
        # as far as a picture goes that the size itself does not rule out; `check_warm` says what is wrong with others
        grey = Picture(np.full((min(height, 8192) or 1, min(width, 8192) or 1, 3), 128, np.uint8))
        media = {"keyframes": (Keyframe(grey),)} if found[1] == "fl2va" else {"references": (Reference("image", grey),)}
    return Request("Warm-up.", size=(width, height), duration=float(found[4]), steps=STEPS, **media)


def check_warm(texts: Sequence[str], spec: Spec) -> None:
    """Refuse what the weights of `spec` cannot run, before an engine is started for it. Raises ConfigError."""
    for text in texts:
        request = warm_request(text)
        try:
            check_request(request, spec)
        except RequestError as error:
            raise ConfigError(f"--warm: {text}: {error}") from None
