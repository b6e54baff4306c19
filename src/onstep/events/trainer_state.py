"""Defines Hugging Face's `TrainerState`, the progress of a training as plain values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from onstep.errors import DataError
from onstep.events.exportable_state import exported_states, is_exportable
from onstep.files.bounded_reading import MAX_JSON_BYTES, parse_json, read_bytes
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

Record = Metrics


class _Process(Protocol):
    """Whether this process is the first."""

    def is_local_process_zero(self) -> bool: ...
    def is_world_process_zero(self) -> bool: ...


@dataclass
class TrainerState:
    """The fields of `transformers.TrainerState`, which callbacks read as `state`.

    During a run, callbacks see a view of its progress (`onstep.events.RunState`). One that is made by hand holds plain
    values. Steps are optimizer updates.
    """

    epoch: float = 0
    """Epochs completed, including the fraction of the current one."""
    global_step: int = 0
    """Steps (optimizer updates) done."""
    max_steps: int = 0
    """Steps of the whole run."""
    logging_steps: int = 500
    """Steps between two logs."""
    eval_steps: int = 500
    """Steps between two evaluations."""
    save_steps: int = 500
    """Steps between two checkpoints."""
    train_batch_size: int | None = None
    """Samples per micro-batch and rank."""
    num_train_epochs: int = 0
    """Epochs of the whole run, rounded up."""
    num_input_tokens_seen: int = 0
    """Tokens trained on, if they are counted."""
    total_flos: float = 0
    """Floating-point operations so far."""
    log_history: list[Record] = None  # type: ignore[assignment]
    """What was logged, in order."""
    best_metric: float | None = None
    """The best value so far of the metric that chooses the best model."""
    best_global_step: int | None = None
    """The step that had it."""
    best_model_checkpoint: str | None = None
    """The directory of the checkpoint that has it."""
    is_local_process_zero: bool = True
    """Whether this is the first process of its machine."""
    is_world_process_zero: bool = True
    """Whether this is rank 0."""
    is_hyper_param_search: bool = False
    """Whether this is a trial of a hyperparameter search."""
    trial_name: str | None = None
    """The name that `hp_name` gives the trial."""
    trial_params: dict[str, str | float | int | bool] | None = None
    """The parameters of the trial."""
    stateful_callbacks: StateDict = None  # type: ignore[assignment]
    """The state of each `ExportableState` by class name; made from a list of such callbacks."""

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        given = self.stateful_callbacks
        if not isinstance(given, dict):
            self.stateful_callbacks = _states_of([] if given is None else given)

    def save_to_json(self, json_path: str) -> None:
        """Write all fields as JSON, as `trainer_state.json` has them.

        Args:
            json_path: the path of the JSON file.
        """
        Path(json_path).write_text(self.to_json_string(), encoding="utf-8")

    def to_json_string(self) -> str:
        """The content of `trainer_state.json`; what JSON does not have is written as text."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(TrainerState)}
        return json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"

    @classmethod
    def load_from_json(cls, json_path: str) -> Self:
        """Read a file that `save_to_json`, or Hugging Face's Trainer, has written.

        Args:
            json_path: the path of the JSON file.

        Raises:
            DataError: for a file that is not one.
        """
        values = parse_json(read_bytes(json_path, MAX_JSON_BYTES), str(json_path))
        known = {one.name for one in dataclasses.fields(TrainerState)}
        unknown = sorted(values.keys() - known) if isinstance(values, dict) else [type(values).__name__]
        if unknown:
            raise DataError(f"{json_path} is not a saved TrainerState: it has no field {', '.join(unknown)}.")
        return cls(**values)

    def compute_steps(self, args: object, max_steps: int) -> None:
        """Set `logging_steps`, `eval_steps` and `save_steps` from `args`, where a number below 1 is a share.

        Args:
            max_steps: steps of the whole run, of which a share is taken.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(self, trainer: _Process, max_steps: int, num_train_epochs: int, trial: object) -> None:
        """Set the length of a training, whether this process is the first, and the trial of a search.

        Args:
            trainer: the Trainer, which says whether its process is the first.
            max_steps: steps of the whole run.
            num_train_epochs: epochs of the whole run.
            trial: the trial; None outside of a search.
        """
        note_trial(self, trial, getattr(trainer, "hp_name", None))
        self.max_steps, self.num_train_epochs = max_steps, num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def note_trial(state: TrainerState, trial: object, hp_name: Callable[[Any], str] | None) -> None:
    """Set the name and the parameters of a trial; None clears the parameters.

    Args:
        state: where to set them.
        trial: an `optuna.Trial`, or the parameters by name.
        hp_name: gives the name of a trial; None leaves it.
    """
    if trial is not None and hp_name is not None:
        state.trial_name = hp_name(trial)
    parameters = trial if isinstance(trial, Mapping) else getattr(trial, "params", None)
    state.trial_params = None if parameters is None else dict(parameters)


def _states_of(callbacks: Iterable[object]) -> StateDict:
    callbacks = list(callbacks)
    for one in callbacks:
        if not is_exportable(one):
            raise TypeError(f"stateful_callbacks must be ExportableState objects, got {type(one).__name__}.")
    return exported_states(callbacks)
