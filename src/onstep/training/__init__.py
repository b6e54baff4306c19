"""The training layer: one loop, the functional door and everything that the loop calls."""

from onstep.events import CallbackContext, CallbackManager
from onstep.progress import TrainState
from onstep.training.evaluation import evaluate, evaluate_and_print_results
from onstep.training.exits import checkpoint_and_decide_exit, save_checkpoint_and_time
from onstep.training.forward_step import (
    forward_step,
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from onstep.training.losses import LossShare, MeanLoss
from onstep.training.pretrain import pretrain
from onstep.training.progress_log import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from onstep.training.rerun import RerunStateMachine
from onstep.training.rerun_data_iterator import RerunDataIterator
from onstep.training.signals import DistributedSignalHandler, Preempted
from onstep.training.state import GlobalState
from onstep.training.step import TrainStepResult, train_step
from onstep.training.train import train

__all__ = [
    "CallbackContext",
    "CallbackManager",
    "DistributedSignalHandler",
    "GlobalState",
    "LossShare",
    "MeanLoss",
    "Preempted",
    "RerunDataIterator",
    "RerunStateMachine",
    "TrainState",
    "TrainStepResult",
    "checkpoint_and_decide_exit",
    "compute_throughputs_and_append_to_progress_log",
    "evaluate",
    "evaluate_and_print_results",
    "forward_step",
    "get_start_time_from_progress_log",
    "maybe_inject_state",
    "needs_global_state_injection",
    "prepare_forward_step_func",
    "pretrain",
    "save_checkpoint_and_time",
    "train",
    "train_step",
]
