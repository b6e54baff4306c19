"""Onstep: one training loop for PyTorch models, open at every moment to your own callbacks.

Importing this package does not import torch; names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.callbacks import DefaultMetrics, InfoCallback, JsonLogger, ProgressCallback
    from onstep.config import ConfigContainer, TrainingArguments
    from onstep.errors import OnstepError
    from onstep.events import (
        VALID_EVENTS,
        Callback,
        CallbackContext,
        CallbackManager,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        normalize_callbacks,
        should_fire,
    )
    from onstep.trainer import Trainer
    from onstep.training import finetune, pretrain

_HOMES = {
    "Callback": "onstep.events",
    "CallbackContext": "onstep.events",
    "CallbackManager": "onstep.events",
    "ConfigContainer": "onstep.config",
    "DefaultMetrics": "onstep.callbacks",
    "InfoCallback": "onstep.callbacks",
    "JsonLogger": "onstep.callbacks",
    "OnstepError": "onstep.errors",
    "ProgressCallback": "onstep.callbacks",
    "Trainer": "onstep.trainer",
    "TrainerCallback": "onstep.events",
    "TrainerControl": "onstep.events",
    "TrainerState": "onstep.events",
    "TrainingArguments": "onstep.config",
    "VALID_EVENTS": "onstep.events",
    "finetune": "onstep.training",
    "normalize_callbacks": "onstep.events",
    "pretrain": "onstep.training",
    "should_fire": "onstep.events",
}

__all__ = [
    "Callback",
    "CallbackContext",
    "CallbackManager",
    "ConfigContainer",
    "DefaultMetrics",
    "InfoCallback",
    "JsonLogger",
    "OnstepError",
    "ProgressCallback",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "VALID_EVENTS",
    "finetune",
    "normalize_callbacks",
    "pretrain",
    "should_fire",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
