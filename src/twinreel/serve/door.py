"""The engine's choices, checked before the server listens: in a process of their own, since this one loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError, TwinreelError
from ..launch import environment, module

SECONDS = 120.0
ERRORS: dict[str, type[TwinreelError]] = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}


def check_engine(config: EngineConfig) -> None:
    """Refuse what every start of the engine would refuse. Raises ConfigError, CheckpointError; reads no weight."""
    words, where = module(__name__, json.dumps(asdict(config))), environment()
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=where)
    if done.returncode == 0:
        return
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"the engine's choices could not be checked: {done.stderr.strip()[-500:]}") from None
    raise ERRORS[told["kind"]](told["message"])


def main(words: Sequence[str] | None = None) -> int:
    """Check the settings in `words[0]`; a refusal is one JSON object on stdout and exit code 1."""
    from ..demo import model_folder
    from ..topology import check_choices
    from ..weights import locate, read_spec

    settings: dict[str, Any] = json.loads((sys.argv[1:] if words is None else words)[0])
    config = EngineConfig(**settings)
    try:
        spec = read_spec(locate(model_folder(config), config.components))
        check_choices(config, spec)
    except TwinreelError as error:
        print(json.dumps({"kind": type(error).__name__, "message": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
