"""The object door: Hugging Face's `Trainer` over the one training loop."""

from onstep.trainer.predictions import EvalPrediction, PredictionOutput, TrainOutput
from onstep.trainer.trainer import Trainer

__all__ = ["EvalPrediction", "PredictionOutput", "TrainOutput", "Trainer"]
