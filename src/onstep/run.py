"""Entry point of `python -m onstep.run`, and of `torchrun` and `accelerate launch` with `-m onstep.run`."""

import sys

from onstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
