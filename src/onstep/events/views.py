"""Declares the interfaces that callbacks can rely on in the objects of a context, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from onstep.config import ConfigContainer, TrainingArguments
from onstep.events.control import Control
from onstep.events.run_state import RunInfo, RunState
from onstep.record.kinds import Listener
from onstep.train_state import StateDict, TrainState

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Item = TypeVar("Item")


class DataView(Protocol):
    """The ranks of the run with samples of their own: all, unless some divide the model among them."""

    rank: int
    """The number of this rank's share of the samples, from 0."""
    size: int
    """Number of ranks with samples of their own."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over these ranks, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """

    def sum_losses(self, tensor: Tensor) -> Tensor:
        """The sum of losses or token counts, in place; like `sum` unless ranks divide sequences. Collective.

        Args:
            tensor: a tensor of the same shape on each rank.
        """

    def gather(self, item: Item) -> list[Item]:
        """The item of each of these ranks, in order, on every rank. Collective; for small Python objects.

        Args:
            item: a small picklable object of this rank.
        """


class WorldView(Protocol):
    """The ranks of the run."""

    rank: int
    """Rank of this process, from 0."""
    size: int
    """Number of ranks."""
    device: torch.device
    """The device this rank trains on."""

    @property
    def data(self) -> DataView:
        """The ranks with samples of their own: for whatever counts samples, tokens or losses."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    def main_only(self, what: str | None = None, remedy: str | None = None) -> AbstractContextManager[None]:
        """Context for what one rank does alone, in which a collective raises.

        Args:
            what: what is done, for the message; None for the callback that is being called.
            remedy: what to do instead of the collective; None for what a callback can do.
        """

    def postpone(self, error: BaseException) -> bool:
        """Whether all ranks will raise this error of `main_only` together.

        Args:
            error: what a callback raised that one rank alone called.
        """

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """

    def gather(self, item: Item) -> list[Item]:
        """Every rank's item, in rank order, on every rank. Collective; for small Python objects.

        Args:
            item: a small picklable object of this rank.
        """


class RecordView(Protocol):
    """The record of a run as callbacks see it."""

    listeners: set[Listener]
    """Called on rank 0 for each line, also in a run without a directory, whose record is not kept."""

    @property
    def path(self) -> Path | None:
        """`record.jsonl` in the directory of the run; None on other ranks and in a run without a directory."""


class RunDirView(Protocol):
    """The directory of a run."""

    @property
    def path(self) -> Path:
        """Where it is."""

    def read(self) -> Mapping[str, object]:
        """The content of its `run.json`."""


class ScalarWriter(Protocol):
    """A logger with TensorBoard's method."""

    add_scalar: Callable[..., object]


class TableLogger(Protocol):
    """A logger with W&B's method."""

    log: Callable[..., object]


class MetricsLogger(Protocol):
    """A logger with the method of MLflow and Comet."""

    log_metrics: Callable[..., object]


class RunView(Protocol):
    """The run as callbacks see it, in `context.state`."""

    cfg: ConfigContainer
    """The validated configuration."""
    train_state: TrainState
    """The progress."""
    info: RunInfo
    """Facts about the run."""
    control: Control
    """Requests a stop, save, evaluation or log."""
    tokenizer: Any
    """The tokenizer of the data; None if there is none."""
    tensorboard_logger: ScalarWriter | None
    """TensorBoard writer with `add_scalar`; None if Megatron Bridge's tags are not sent to it."""
    wandb_logger: TableLogger | None
    """W&B logger with `log`; None likewise."""
    mlflow_logger: MetricsLogger | None
    """MLflow logger with `log_metrics`; None likewise."""
    comet_logger: MetricsLogger | None
    """Comet logger with `log_metrics`; None likewise."""

    @property
    def checkpoints(self) -> object:
        """The run's checkpoints; None if it has no directory for them."""

    @property
    def run_dir(self) -> RunDirView | None:
        """The directory of the run; None if the run has none."""

    @property
    def trainer_state(self) -> RunState:
        """The progress as Hugging Face's `TrainerState`."""

    @property
    def args(self) -> TrainingArguments:
        """The configuration as Hugging Face's `TrainingArguments`."""

    @property
    def world(self) -> WorldView:
        """The ranks."""

    @property
    def processing_class(self) -> Any:
        """The tokenizer or other object that `Trainer` was given to process data."""

    @property
    def trainer(self) -> Any:
        """The `Trainer`; None under `pretrain`."""

    @property
    def train_dataloader(self) -> Any:
        """The training data loader; None before it is opened."""

    @property
    def eval_dataloader(self) -> Any:
        """The validation data loader; None if there is none."""

    @property
    def record(self) -> RecordView:
        """What happens in the run, line by line."""

    @property
    def timers(self) -> Any:
        """Timers of the sections of the run."""

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training per token, as far as known."""


class OptimizerView(Protocol):
    """The interface that every optimizer of a run has, built-in or third-party."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters with their options, as in `torch.optim`."""

    def state_dict(self) -> StateDict:
        """Its state, as in `torch.optim`."""


class SchedulerView(Protocol):
    """The interface that every learning-rate scheduler has."""

    def state_dict(self) -> StateDict:
        """Its state, as in `torch.optim.lr_scheduler`."""


def configured_values(run: RunView) -> dict[str, float | None]:
    """The configured values of the loop's own keys that can be set during a run."""
    config = run.cfg
    return {
        "lr_factor": 1.0,
        "log_interval": config.logger.log_interval,
        "eval_interval": config.validation.eval_interval,
        "save_interval": config.checkpoint.save_interval,
        "train_iters": config.train.train_iters or run.info.max_steps or None,
        "log_straggler": int(config.straggler.log_straggler and not config.straggler.disable_straggler_on_startup),
    }
