"""The bundled small model: a trained miniature of H3 that knows a little world (docs/demo-model.md)."""

from __future__ import annotations

from pathlib import Path

from ..config import EngineConfig
from ..errors import ConfigError


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
