"""`module NAME WORDS` runs what `python -m NAME WORDS` runs, for a launcher that starts files only."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
