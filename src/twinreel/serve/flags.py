"""The flags of `serve`; `commands` runs them. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from ..flags import EngineFlags, ReportFlags
from .options import ServeOptions


@dataclass(frozen=True)
class Serve:
    """Serve the HTTP API and its page: a durable queue, one engine. docs/serving.md describes it."""

    server: ServeOptions = field(default_factory=ServeOptions)
    engine: EngineFlags = field(default_factory=EngineFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


COMMANDS: tuple[Any, ...] = (Annotated[Serve, tyro.conf.subcommand("serve")],)
