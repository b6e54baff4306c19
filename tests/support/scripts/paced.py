"""A callback for `--import`: holds a run in SLURM at a step until its test lets it go on, or makes each step last."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from onstep import Callback


class Paced(Callback):
    """Reads files of the working directory: `hold-RESTART` has the step after which to wait for `go-RESTART`, `pace`
    the seconds of each step while the job was requeued less often than its second number says. With a file `asked`, the
    run is asked to save before its first step.
    """

    def __init__(self) -> None:
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def on_train_start(self, context: Any) -> None:
        if Path("asked").exists():
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_step_end(self, context: Any) -> None:
        pace, hold = Path("pace"), Path(f"hold-{self._restart}")
        if pace.exists():
            seconds, restarts = pace.read_text().split()
            time.sleep(float(seconds) if self._restart < int(restarts) else 0.0)
        if hold.exists() and context.trainer_state.global_step == int(hold.read_text()):
            Path(f"held-{self._restart}-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
            while not Path(f"go-{self._restart}").exists():
                time.sleep(0.02)
