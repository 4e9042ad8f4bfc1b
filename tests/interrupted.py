"""What the tests of interrupted runs and of names share: a request, the name of its latents, and a run that is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinreel import Engine, OutputOptions, Request
from twinreel.watch import Event

T2VA = Request("A secret cat plays piano.", steps=2, duration=0.9)
LATENTS = "a.latents.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def interrupt(
    engine: Engine, folder: Path, stage: str = "decode", error: type[BaseException] = RuntimeError, **options
):
    def watch(event: Event) -> None:
        if event.stage == stage and event.done:
            raise error("injected")

    with pytest.raises(error, match="injected") as caught:
        engine.render(T2VA, folder / "a.mp4", OutputOptions(**options), watch)
    return caught.value
