"""`twinreel serve`, and `twinreel generate --server`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..demo import tell_bundled
from ..errors import ConfigError, RequestError
from ..launch import stand_alone
from ..output import OutputOptions, check_output
from .door import check_engine
from .options import first_line

if TYPE_CHECKING:
    from ..flags import Generate
    from .flags import Serve


def serve(command: Serve) -> int:
    """Serve until stopped. Raises ConfigError, CheckpointError."""
    try:
        from .server import serve as run
        from .service import Service
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve: {error.name} is not installed; in the project's folder: pip install -c constraints.txt -e '.[serve]'"
        ) from None

    def told(address: str) -> None:
        print("twinreel: listening; Ctrl-C ends it", file=sys.stderr)
        print(address, flush=True)  # once: a terminal shows both streams, a program reads this one

    stand_alone("serve")
    config = command.engine.build()
    if config.allow_remote:
        raise ConfigError("--allow-remote: a server fetches from named hosts only; give --remote-hosts")
    service = Service(command.server, config)
    check_engine(config)
    tell_bundled(config)
    return run(service, told)


def generate(command: Generate) -> dict[str, Any]:
    """Run a request on the server that `command` names; the finished job. Raises what `Client` raises."""
    from ..flags import EngineFlags
    from ..progress import progress
    from .client import Client

    stand_alone("--server")
    output = command.writing.build()
    if command.engine != EngineFlags():
        raise ConfigError("--server: the engine's flags are the server's to set; leave them out")
    if command.trace is not None:
        raise ConfigError("--server: --trace is for runs on this machine; leave it out")
    if not command.output.lower().endswith(".mp4"):
        raise RequestError("output", f"got {command.output}; a server makes MP4 files, so the name ends in .mp4")
    if output != OutputOptions(overwrite=output.overwrite):
        raise RequestError("output", "a server chooses how files are written; leave out everything but --overwrite")
    request = command.request.build()
    target = check_output(command.output, output, needed=command.needed(request))
    key = None
    if command.server_key_file is not None:
        key = first_line(command.server_key_file, "--server-key-file")
    assert command.server is not None
    with progress(command.report.quiet) as watch:
        Client(command.server, key).model()  # a wrong address is said at once; what was there once is waited for
        client = Client(command.server, key, patience=3600.0)
        return client.generate(request, target, watch, overwrite=output.overwrite)
