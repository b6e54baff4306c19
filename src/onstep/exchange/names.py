"""The table of exchanged names: which of `transformers` are Onstep's after the exchange, and which remain its own."""

from __future__ import annotations

NAMES: dict[str, dict[str, str]] = {
    "transformers.trainer": {"Trainer": "onstep.trainer:Trainer"},
    "transformers.trainer_seq2seq": {"Seq2SeqTrainer": "onstep.trainer:Seq2SeqTrainer"},
    "transformers.training_args": {"TrainingArguments": "onstep.config:TrainingArguments"},
    "transformers.training_args_seq2seq": {"Seq2SeqTrainingArguments": "onstep.config:Seq2SeqTrainingArguments"},
    "transformers.trainer_callback": {
        "TrainerCallback": "onstep.events:TrainerCallback",
        "TrainerControl": "onstep.events:TrainerControl",
        "TrainerState": "onstep.events:TrainerState",
        "ExportableState": "onstep.events:ExportableState",
        "CallbackHandler": "onstep.trainer.callback_handler:CallbackHandler",
        "DefaultFlowCallback": "onstep.events:DefaultFlowCallback",
        "EarlyStoppingCallback": "onstep.callbacks:EarlyStoppingCallback",
        "PrinterCallback": "onstep.callbacks:PrinterCallback",
        "ProgressCallback": "onstep.callbacks:ProgressCallback",
    },
    "transformers.trainer_utils": {
        "EvalLoopOutput": "onstep.trainer:EvalLoopOutput",
        "EvalPrediction": "onstep.trainer:EvalPrediction",
        "PredictionOutput": "onstep.trainer:PredictionOutput",
        "TrainOutput": "onstep.trainer:TrainOutput",
    },
}
"""Module that defines a name -> name -> its replacement, as `module:name`.

What imports a name from another place, such as `transformers` itself, gets the same object.
"""


def number_of_names() -> int:
    """How many names are exchanged."""
    return sum(map(len, NAMES.values()))
