"""Provides Hugging Face's `TrainerState` as a read-only view of the run's progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onstep.events.log_history import LogHistory
from onstep.train_state import TrainState


@dataclass
class RunInfo:
    """Facts about the run that the view shows besides progress; set by the loop when a run starts."""

    max_steps: int = 0
    num_train_epochs: float = 0
    steps_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    """Set with a batch-size ramp-up: epochs then have different numbers of steps, and `steps_per_epoch` is the number
    at the largest batch size."""
    num_examples: int | None = None
    """Samples of the training data; None if it has no length."""
    num_train_samples: int | None = None
    """Samples that the whole run trains on, over all ranks and epochs."""
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    """Samples per micro-batch and rank."""
    max_eval_steps: int = -1
    num_processes: int = 1
    rank: int = 0
    local_rank: int = 0
    history: LogHistory = field(default_factory=LogHistory, repr=False)
    bridge_tags: Any = None
    """Megatron Bridge's tags since the metrics log's last record (`onstep.trackers.tag_record`); None if not
    collected.
    """

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """Hugging Face's list of what was logged, which may be changed; of a resumed run, it is read when needed."""
        return self.history.records

    @log_history.setter
    def log_history(self, records: list[dict[str, Any]]) -> None:
        if records is not self.history.records:
            self.history.replace(records)


class TrainerState:
    """The fields of `transformers.TrainerState` and Forgather's additions, all read-only."""

    is_hyper_param_search = False
    trial_name = None
    trial_params = None
    stateful_callbacks: tuple[Any, ...] = ()

    def __init__(self, progress: TrainState, info: RunInfo) -> None:
        self._progress = progress
        self._info = info

    def __getattr__(self, name: str) -> Any:
        info = self.__dict__.get("_info")
        if info is not None and not name.startswith("_") and hasattr(info, name):
            return getattr(info, name)
        raise AttributeError(f"TrainerState has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        raise AttributeError(
            f"state.{name} is a read-only view of the run's progress; use `control` for requests, or change the "
            f"configuration before training."
        )

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._progress.step

    @property
    def epoch(self) -> float:
        """Epochs completed, including the fraction of the current one if its length is known."""
        steps, samples = self._info.steps_per_epoch, self._info.samples_per_epoch
        if samples:
            return self._progress.epoch + self._progress.samples_in_epoch / samples
        return self._progress.epoch + (self._progress.steps_in_epoch / steps if steps else 0.0)

    @property
    def raw_epoch(self) -> int:
        """Full epochs completed."""
        return self._progress.epoch

    @property
    def epoch_start_step(self) -> int:
        """The step at which the current epoch began."""
        return self._progress.step - self._progress.steps_in_epoch

    @property
    def epoch_train_steps(self) -> int | None:
        """Optimizer steps per epoch; None if the data has no length."""
        return self._info.steps_per_epoch

    @property
    def best_metric(self) -> float | None:
        """Best value of `metric_for_best_model` so far."""
        return self._progress.best_metric

    @property
    def best_global_step(self) -> int | None:
        """Step at which `best_metric` was reached."""
        return self._progress.best_step

    @property
    def best_model_checkpoint(self) -> str | None:
        """Directory of the checkpoint with the best value; None until there is one."""
        return self._progress.best_model_checkpoint

    @property
    def num_input_tokens_seen(self) -> int:
        """Input tokens if they are counted, else labels trained on, over all ranks; updated at logged steps."""
        counted = self._progress.num_input_tokens_seen
        return self._progress.consumed_tokens if counted is None else counted

    @property
    def total_flos(self) -> float:
        """Floating-point operations so far; updated at logged steps."""
        return self._progress.floating_point_operations_so_far

    @property
    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._info.rank == 0

    @property
    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._info.local_rank == 0
