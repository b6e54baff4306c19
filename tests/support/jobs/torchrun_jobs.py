"""torchrun itself, as a job of a forked process."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.run import main


def job_torchrun(settings: dict[str, Any]) -> None:
    os.environ.update(settings["environment"])
    main(settings["words"])
