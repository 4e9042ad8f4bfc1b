"""twinreel runs MiniMax H3: video and its stereo sound from text, keyframes or references.

`Engine(EngineConfig(...)).generate(Request("..."))` returns a `Media`. Importing this package loads no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import EngineConfig
from .errors import Cancelled, CheckpointError, ConfigError, RequestError
from .request import Keyframe, Reference, Request

if TYPE_CHECKING:
    from .engine import Engine
    from .output import OutputOptions
    from .output.write import Media
    from .serve.client import Client
    from .sources import Clip, Picture, Sound

__version__ = "0.1.0"
_LAZY = {
    "Client": "serve.client",
    "Engine": "engine",
    "Media": "output.write",
    "OutputOptions": "output",
    "Clip": "sources",
    "Picture": "sources",
    "Sound": "sources",
}
__all__ = [
    "Cancelled",
    "CheckpointError",
    "Client",
    "Clip",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "Keyframe",
    "Media",
    "OutputOptions",
    "Picture",
    "Reference",
    "Request",
    "RequestError",
    "Sound",
]


def __getattr__(name: str) -> Any:
    if name == "Engine" and "torch" not in sys.modules:
        from .launch import wait_asleep

        wait_asleep()  # as the command line does: four times quicker beside other work
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module 'twinreel' has no attribute {name!r}")
