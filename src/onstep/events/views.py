"""What callbacks may rely on in the objects that a context hands them: types for editors and mypy, no code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from onstep.config import ConfigContainer
from onstep.events.control import Control
from onstep.events.trainer_state import TrainerState
from onstep.progress import TrainState

if TYPE_CHECKING:
    import torch


class WorldView(Protocol):
    """The ranks of the run."""

    rank: int
    """This process's number, from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank trains."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""


class RunView(Protocol):
    """The run as callbacks see it: `context.state`."""

    cfg: ConfigContainer
    """The validated configuration."""
    train_state: TrainState
    """The progress."""
    control: Control
    """Where to ask for a stop, save, evaluation or log."""
    run_folder: Any
    """The folder of the run, with its `path`; None for a run without one."""
    tokenizer: Any
    """The tokenizer of the data; None where nobody gave one."""
    tensorboard_logger: Any
    """TensorBoard, with `add_scalar`; None where Megatron Bridge's tags do not go there."""
    wandb_logger: Any
    """W&B, with `log`; None likewise."""
    mlflow_logger: Any
    """MLflow, with `log_metrics`; None likewise."""
    comet_logger: Any
    """Comet, with `log_metrics`; None likewise."""

    @property
    def trainer_state(self) -> TrainerState:
        """Hugging Face's view of the progress."""

    @property
    def args(self) -> Any:
        """Hugging Face's view of the configuration, `TrainingArguments`."""

    @property
    def world(self) -> WorldView:
        """The ranks."""

    @property
    def processing_class(self) -> Any:
        """The tokenizer, or whatever else `Trainer` was given to prepare data."""

    @property
    def trainer(self) -> Any:
        """The `Trainer`; None under `pretrain`."""

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data; None before it is opened."""

    @property
    def eval_dataloader(self) -> Any:
        """The loader of the validation data; None where there is none."""

    @property
    def timers(self) -> Any:
        """Seconds that the parts of the run take."""

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, as far as they are known."""


class OptimizerView(Protocol):
    """What every optimizer of a run has, ours and foreign ones."""

    param_groups: list[dict[str, Any]]
    """Groups of parameters with their options, as in `torch.optim`."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, as in `torch.optim`."""


class SchedulerView(Protocol):
    """What every schedule of the learning rate has."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
