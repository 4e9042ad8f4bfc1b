"""The bundled small model: a trained miniature of H3 that knows a little world (docs/demo-model.md)."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config import EngineConfig
from ..errors import ConfigError

BUNDLED = (
    "no --model: using the bundled miniature, which knows only its own little world: coloured shapes that bounce, slide, "
    "orbit or appear, with bells, clicks, buzzes and hums (docs/demo-model.md says how well)."
)


def bundled_model() -> Path:
    """The folder of the bundled weights, one original-layout partition with all three tasks. ConfigError: not there."""
    folder = Path(__file__).parent / "model"
    if not (folder / "model_index.json").is_file():
        raise ConfigError(
            f"model: none was named and the bundled one is not at {folder}; install again, or name a folder"
        )
    return folder


def model_folder(config: EngineConfig) -> Path | None:
    """The folder that `config` means: the one it names, the bundled model, or None where its components are all."""
    if config.model is not None:
        return Path(config.model)
    return None if config.components else bundled_model()


def tell_bundled(config: EngineConfig) -> None:
    """Say on stderr that the bundled model is used, where `config` leaves it at that."""
    if config.model is None and not config.components:
        print(f"twinreel: {BUNDLED}", file=sys.stderr)
