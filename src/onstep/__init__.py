"""Onstep is a PyTorch training library for people who want to interrupt, resume, inspect and trust their runs.

There are two entry points to one training loop. `Trainer` trains your own module on your own data, as in Hugging Face:

    from onstep import Trainer, TrainingArguments

    trainer = Trainer(model, TrainingArguments(output_dir="out"), train_dataset=dataset)
    trainer.train()

`pretrain` and `finetune` train a language model from a configuration, as in Megatron Bridge:

    from onstep import pretrain
    from onstep.recipes import tiny_gpt_pretrain_config
    from onstep.training import forward_step

    pretrain(tiny_gpt_pretrain_config(), forward_step)

Both call the same callbacks, in either convention (`Callback` with a context, `TrainerCallback` with args, state and
control); `onstep.events` lists all events. Both resume bitwise from verified checkpoints, stop on a NaN loss before it
reaches the weights, and report to W&B, TensorBoard, MLflow, Comet, Trackio or CSV. The same script runs on a CPU, on
one GPU, or on several GPUs under `torchrun`. On the command line, start with `onstep --help`.

Importing this package does not import torch; names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.callbacks import (
        DefaultMetrics,
        EarlyStoppingCallback,
        InfoCallback,
        JsonLogger,
        PrinterCallback,
        ProgressCallback,
    )
    from onstep.config import ConfigContainer, Seq2SeqTrainingArguments, TrainingArguments
    from onstep.errors import OnstepError
    from onstep.events import (
        VALID_EVENTS,
        Callback,
        CallbackContext,
        CallbackManager,
        DefaultFlowCallback,
        ExportableState,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        normalize_callbacks,
        should_fire,
    )
    from onstep.past import rewind
    from onstep.trainer import Seq2SeqTrainer, Trainer
    from onstep.trainer.callback_handler import CallbackHandler
    from onstep.training.pretrain import finetune, pretrain

__all__ = [
    "Callback",
    "CallbackContext",
    "CallbackManager",
    "CallbackHandler",
    "ConfigContainer",
    "DefaultFlowCallback",
    "DefaultMetrics",
    "EarlyStoppingCallback",
    "ExportableState",
    "InfoCallback",
    "JsonLogger",
    "OnstepError",
    "PrinterCallback",
    "ProgressCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "VALID_EVENTS",
    "finetune",
    "normalize_callbacks",
    "pretrain",
    "rewind",
    "should_fire",
]

__getattr__, __dir__ = lazy_names(__name__)
