"""`python -m twinreel` is the `twinreel` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
