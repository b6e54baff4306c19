"""The names of `transformers.trainer_callback`, so that imports from that module need only another first word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.callbacks import EarlyStoppingCallback, PrinterCallback, ProgressCallback
    from onstep.events import DefaultFlowCallback, ExportableState, TrainerCallback, TrainerControl, TrainerState
    from onstep.trainer.callback_handler import CallbackHandler

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "onstep"))
