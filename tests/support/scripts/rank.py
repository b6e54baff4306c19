"""One rank of a job that is not forked: `rank JOBS JOB SETTINGS` does what `forked_processes` does in a child."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch


def main(jobs: str, job: str, settings: str) -> None:
    torch.set_num_threads(1)
    result = getattr(importlib.import_module(jobs), f"job_{job}")(json.loads(settings))
    if result is not None:
        Path(f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
