"""Entry point of `python -m onstep` and `torchrun -m onstep`."""

import sys

from onstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
