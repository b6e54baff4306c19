"""Prints the record of each logged step as Hugging Face's Trainer does."""

from __future__ import annotations

import sys

from onstep.events import RunState, TrainerCallback
from onstep.record.kinds import Metrics


class PrinterCallback(TrainerCallback):
    """Prints the dictionary of each logged step on standard output, as Hugging Face's does."""

    reads_weights = False
    shows_progress = True

    def on_log(
        self, args: object, state: RunState, control: object, logs: Metrics | None = None, **kwargs: object
    ) -> None:
        """Print the logs, floats with four significant digits, without `total_flos`."""
        if state.is_local_process_zero:
            shown = {key: value for key, value in (logs or {}).items() if key != "total_flos"}
            rounded = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in shown.items()}
            sys.stdout.write(f"{rounded}\n")
