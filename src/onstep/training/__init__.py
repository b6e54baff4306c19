"""The training layer: one loop, the functional door and everything that the loop calls."""

from onstep.events import CallbackContext, CallbackManager
from onstep.training.evaluation import evaluate, evaluate_and_print_results
from onstep.training.forward_step import (
    forward_step,
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from onstep.training.losses import LossShare, MeanLoss
from onstep.training.pretrain import pretrain
from onstep.training.state import GlobalState
from onstep.training.step import TrainStepResult, train_step
from onstep.training.train import train

__all__ = [
    "CallbackContext",
    "CallbackManager",
    "GlobalState",
    "LossShare",
    "MeanLoss",
    "TrainStepResult",
    "evaluate",
    "evaluate_and_print_results",
    "forward_step",
    "maybe_inject_state",
    "needs_global_state_injection",
    "prepare_forward_step_func",
    "pretrain",
    "train",
    "train_step",
]
