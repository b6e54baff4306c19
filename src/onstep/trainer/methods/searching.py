"""Hugging Face's methods of a hyperparameter search that subclasses override."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from onstep.errors import ConfigError
from onstep.events import Request
from onstep.record.kinds import Metrics
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.computing.attributes import follow_arguments
from onstep.trainer.trials.parameters import set_parameters
from onstep.trainer.trials.results import HPSearchBackend, HPSpace, Sweep


class SearchingMethods(BaseTrainer):
    """Hugging Face's methods of a hyperparameter search that subclasses override."""

    hp_space: HPSpace | None = None
    """Gives the parameters of a trial, during a search."""
    compute_objective: Callable[[Metrics], Any] | None = None
    """Gives the objective of an evaluation, during a search."""
    objective: Any = None
    """The objective of the most recent evaluation of a trial, on rank 0."""
    sweep: Sweep | None = None
    """The search in progress."""
    idle_in_search: frozenset[str] = frozenset()
    """The arguments without effect that trials of it have named."""
    _trial: object = None
    """The trial that is trained, as it was passed to `train`."""

    def _hp_search_setup(self, trial: object) -> None:
        """Remember the trial that was passed to `train`, and set the arguments that it names.

        Called before each training.
        """
        self._trial = trial
        if self.sweep is not None and trial is not None:
            set_parameters(self.args, self.sweep.parameters_of(trial), others=self._makes_model_from_trial())
            follow_arguments(self)

    def _report_to_hp_search(self, trial: object, step: int, metrics: Metrics) -> None:
        """Report an evaluation of a trial to the search, which may end the run; called after each of a run."""
        if self.sweep is None or trial is None or not self.is_world_process_zero():
            return
        reason = self.sweep.report(trial, step, metrics)
        if reason is not None:
            self.control.add_request(Request("should_training_stop", "hyperparameter_search", "on_evaluate", reason))

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Refused: a search with Ray Tune needs no copies of checkpoints.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "Trainer._tune_save_checkpoint writes a copy for Ray, and is not supported: a trial of a search has the "
            "checkpoints of its run; set control.should_save = True in a callback to save one."
        )

    def _makes_model_from_trial(self) -> bool:
        """Whether `model_init` receives the trial."""
        parameters = inspect.signature(self.model_init).parameters.values() if self.model_init is not None else ()
        return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)

    def model_of_trial(self) -> nn.Module:
        """A new model from `model_init`, of the current trial if there is one."""
        return self.call_model_init() if self._trial is None else self.call_model_init(self._trial)

    hp_name: Callable[[Any], str] | None
    hp_search_backend: HPSearchBackend | None
    control: Any
    call_model_init: Callable[..., nn.Module]
