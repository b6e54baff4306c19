"""Repeats a study in memory, so that a new sampler continues where that of an earlier process was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState


class Remaining(BaseSampler):
    """A sampler for a trial that was asked for before: it gives what the replayed sampler gave that trial."""

    def __init__(self, replayed: Any) -> None:
        self._replayed = replayed

    def infer_relative_search_space(self, study: object, trial: object) -> dict[str, BaseDistribution]:
        """No parameters: all are asked for one by one."""
        return {}

    def sample_relative(self, study: object, trial: object, search_space: object) -> dict[str, Any]:
        """Nothing, likewise."""
        return {}

    def sample_independent(self, study: object, trial: object, param_name: str, param_distribution: Any) -> object:
        """The value of a parameter that the storage does not have yet."""
        own, suggest = param_distribution, self._replayed
        if isinstance(own, CategoricalDistribution):
            return suggest.suggest_categorical(param_name, own.choices)
        ask = suggest.suggest_int if isinstance(own, IntDistribution) else suggest.suggest_float
        return ask(param_name, own.low, own.high, step=own.step, log=own.log)


def replay(study: Any, study_id: int) -> dict[int, Any]:
    """Repeat a study in memory with its own sampler, which afterwards draws what it would have drawn next.

    Args:
        study: the study, with a new sampler.
        study_id: its id in its storage; a sampler accepts no other one afterwards.

    Returns:
        The trials that are not finished, by number, as the sampler gave them. Empty where it draws other values than
        before: it was made without a seed, or several processes worked on the study.
    """
    unfinished: dict[int, Any] = {}
    with silent():
        storage = optuna.storages.InMemoryStorage()
        for _ in range(study_id):  # ids are counted from 0
            storage.create_new_study(study.directions)
        copied = optuna.create_study(
            study_name=study.study_name,
            storage=storage,
            directions=study.directions,
            sampler=study.sampler,
            pruner=study.pruner,
        )
        for past in study.get_trials(deepcopy=False):
            if past.state == TrialState.WAITING:
                continue
            if "fixed_params" in past.system_attrs:  # it was enqueued
                copied.enqueue_trial(past.system_attrs["fixed_params"])
            trial = copied.ask(past.distributions)
            if trial.params != past.params:
                return {}
            for step, value in past.intermediate_values.items():
                trial.report(value, step)
                trial.should_prune()
            if not past.state.is_finished():
                unfinished[past.number] = trial
                continue
            copied.tell(trial, past.values if past.state == TrialState.COMPLETE else None, past.state)
    return unfinished


@contextmanager
def silent() -> Iterator[None]:
    """Keep Optuna from logging that a study in memory was made."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
