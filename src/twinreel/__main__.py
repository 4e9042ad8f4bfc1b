"""`python -m twinreel`, which is the `twinreel` command."""

import signal
import sys


def main() -> int:
    """The command. Until `cli` listens, Ctrl-C ends this process as it ends any other: by the signal, with no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
