"""The object-oriented entry point: Hugging Face's `Trainer` on top of the training loop."""

from onstep.trainer.predictions import EvalPrediction, PredictionOutput, TrainOutput
from onstep.trainer.trainer import Trainer

__all__ = ["EvalPrediction", "PredictionOutput", "TrainOutput", "Trainer"]
