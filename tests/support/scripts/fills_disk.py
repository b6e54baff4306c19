"""A user's callback that fills the disk of the run at one step, and kills its own process or makes room at another."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from onstep import Callback


class FillsDisk(Callback):
    """Fills the file FILLER before step 3 and sends SIGKILL after step 7, or removes it if MAKES_ROOM is set.

    Does nothing where FILLER is not set.
    """

    def on_step_begin(self, context: Any) -> None:
        if "FILLER" in os.environ and context.trainer_state.global_step == 2:
            with Path(os.environ["FILLER"]).open("wb", buffering=0) as file:
                for size in (2**16, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue

    def on_log_step(self, context: Any) -> None:
        context.logs["note"] = "x" * 5000  # more than a page: none of it fits into the space that the file has already

    def on_step_end(self, context: Any) -> None:
        if "FILLER" in os.environ and context.trainer_state.global_step == 7:
            if "MAKES_ROOM" in os.environ:
                Path(os.environ["FILLER"]).unlink()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
