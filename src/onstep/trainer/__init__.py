"""The object-oriented entry point: Hugging Face's `Trainer` on top of the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.trainer.predictions import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
    from onstep.trainer.seq2seq import Seq2SeqTrainer
    from onstep.trainer.trainer import Trainer

__all__ = ["EvalLoopOutput", "EvalPrediction", "PredictionOutput", "Seq2SeqTrainer", "TrainOutput", "Trainer"]

__getattr__, __dir__ = lazy_names(__name__)
