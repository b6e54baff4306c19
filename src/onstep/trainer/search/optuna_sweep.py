"""Searches with Optuna: rank 0 asks a study for trials, and all ranks train them."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from onstep.distributed import on_main
from onstep.errors import ConfigError, RunExistsError, named_text
from onstep.record.kinds import Metrics
from onstep.trainer.search.optuna_replay import Remaining, replay, silent
from onstep.trainer.search.trial_run import check_options, found_run, name_of_trial, objective_of_run, ranks
from onstep.trainer.trials.objective import Objective, objective_of
from onstep.trainer.trials.results import BestRun, Wanted

logger = logging.getLogger(__name__)
T = TypeVar("T")

STORAGE = "optuna.db"
"""The file of the study in the search's directory."""
_NAME, _OBJECTIVE = "run", "objective"
"""Attributes of a trial: the name of its directory, and its objective if it has several values."""
_OF_THE_LOOP = ("timeout", "n_jobs", "gc_after_trial", "catch")
"""Keywords of `Study.optimize`; the others are those of `create_study`."""
_LIMIT_OF_SEEDS = 2**32
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


@dataclass(frozen=True)
class Assigned:
    """A trial that all ranks train now."""

    number: int
    name: str
    """Of its directory."""
    parameters: dict[str, Any]
    resumes: bool
    """Whether its run continues from a checkpoint."""


class OptunaSweep:
    """The trials of a search, of which rank 0 has the study.

    Args:
        trainer: the Trainer of the search.
        wanted: what the user asks for.

    Raises:
        ConfigError: for keywords that Optuna does not have.
    """

    def __init__(self, trainer: Any, wanted: Wanted) -> None:
        _check_options(wanted.options)
        self._trainer, self._wanted = trainer, wanted
        self._root = Path(str(trainer.args.output_dir)).absolute()
        catch = wanted.options.get("catch", ())
        self._catch: tuple[type[BaseException], ...] = (catch,) if isinstance(catch, type) else tuple(catch)
        self._deadline = time.monotonic() + (wanted.options.get("timeout") or math.inf)
        self._study: Any = None
        self._trial: Any = None
        """The trial in progress."""
        self._reached: tuple[int, Objective] | None = None
        """The last step of it that was evaluated, and the objective there."""
        self._is_pruned = False
        self._interrupted: list[Any] = []
        """The trials that an earlier process did not finish, in their order."""
        self._replayed: dict[int, Any] = {}

    # ---- what the Trainer's methods call

    def parameters_of(self, trial: Any) -> Mapping[str, object]:
        """What the user's `hp_space` gives for a trial."""
        parameters: Mapping[str, object] = self._trainer.hp_space(trial)
        return parameters

    def report(self, trial: Any, step: int, metrics: Metrics) -> str | None:
        """Report an evaluation to the study; returns why the trial is pruned, if it is.

        A step that an earlier process has reported is not reported again; what followed from the last of them might not
        have been done.
        """
        objective = objective_of(self._trainer.compute_objective, metrics, len(self._wanted.directions))
        self._trainer.objective = objective
        before = self._reached
        if before is not None and step < before[0]:
            return None
        self._reached = step, objective
        if isinstance(objective, list):
            trial.set_user_attr(_OBJECTIVE, [step, objective])
            return None
        if before is None or step > before[0]:
            trial.report(objective, step)
        if not trial.should_prune():
            return None
        self._is_pruned = True
        return f"trial {trial.number} is pruned by {type(self._study.pruner).__name__}: its objective is {objective:g}"

    # ---- the trials

    def run(self) -> BestRun | list[BestRun]:
        """Train trials until there are enough, and return the best. Collective."""
        self._on_main(self._open)
        while (assigned := self._on_main(self._next)) is not None:
            self._train(assigned)
            if self._wanted.options.get("gc_after_trial"):
                gc.collect()
        return self._on_main(self._best)

    def _on_main(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks. Collective."""
        with ranks(self._trainer) as world:
            return on_main(world, work)

    def _open(self) -> None:
        """Open the study, or make it; of one that was interrupted, find out which trials are not finished."""
        options = {name: value for name, value in self._wanted.options.items() if name not in _OF_THE_LOOP}
        self._root.mkdir(parents=True, exist_ok=True)
        if "storage" not in options:
            options["storage"] = f"sqlite:///{self._root / STORAGE}"
            options.setdefault("study_name", "search")
        options.setdefault("study_name", str(self._root))
        options.setdefault("sampler", self._seeded_sampler())
        options.setdefault("load_if_exists", True)
        options["storage"] = self._storage = _storage_at(options["storage"])
        directions = list(self._wanted.directions)
        try:
            self._study = optuna.create_study(directions=[StudyDirection[one.upper()] for one in directions], **options)
        except optuna.exceptions.DuplicatedStudyError:
            raise ConfigError(
                f"The study {options['study_name']!r} exists already, and load_if_exists=False says not to continue "
                f"it; drop load_if_exists, or choose another study_name."
            ) from None
        found = [one.name.lower() for one in self._study.directions]
        if found != directions:
            raise ConfigError(
                f"direction={directions} differs from that of the study {self._study.study_name!r}, {found}; choose "
                f"another study_name for another search."
            )
        self._check_space()
        self._interrupted = self._trials(TrialState.RUNNING)
        ended = len(self._trials(*_ENDED))
        if ended or self._interrupted:
            self._replayed = replay(self._study, self._study_id)
            logger.info(
                "the search continues: %d of %d trials are finished, %d were interrupted",
                ended,
                self._wanted.n_trials,
                len(self._interrupted),
            )

    def _check_space(self) -> None:
        """Refuse a space whose parameters are of other kinds than those that the study has."""
        known = {
            name: one for past in self._study.get_trials(deepcopy=False) for name, one in past.distributions.items()
        }
        for name, asked in distributions_of(self._trainer.hp_space).items():
            try:
                check_distribution_compatibility(known.get(name, asked), asked)
            except ValueError:
                raise ConfigError(
                    f"hp_space gives {name} by {asked}, and the study {self._study.study_name!r} has it by "
                    f"{known[name]}; choose another study_name for another space."
                ) from None

    def _seeded_sampler(self) -> Any:
        seed = self._trainer.args.seed % _LIMIT_OF_SEEDS
        if len(self._wanted.directions) > 1:
            return optuna.samplers.NSGAIISampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed)

    def _trials(self, *states: Any) -> list[Any]:
        found: list[Any] = self._study.get_trials(deepcopy=False, states=states)
        return found

    def _next(self) -> Assigned | None:
        """The next trial to train; None if there is none."""
        while self._interrupted:
            past = self._interrupted.pop(0)
            self._trial, self._is_pruned = self._asked_again(past), False
            self._reached = _reached_in(past)
            has_ended, resumes = found_run(self._root, past.user_attrs.get(_NAME, ""))
            if has_ended and self._reached is not None:
                self._is_pruned = len(self._wanted.directions) == 1 and self._trial.should_prune()
                self._tell(self._reached[1])
                continue
            return self._assigned(resumes=resumes)
        if len(self._trials(*_ENDED)) >= self._wanted.n_trials or time.monotonic() > self._deadline:
            return None
        self._trial, self._is_pruned, self._reached = self._study.ask(), False, None
        return self._assigned(resumes=False)

    def _asked_again(self, past: Any) -> Any:
        """An interrupted trial, whose parameters are those that it has."""
        study, replayed = self._study, self._replayed.get(past.number)
        if replayed is not None:
            study = optuna.load_study(
                study_name=study.study_name, storage=self._storage, sampler=Remaining(replayed), pruner=study.pruner
            )
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, past.number)
        return optuna.trial.Trial(study, trial_id)

    @property
    def _study_id(self) -> int:
        found: int = self._storage.get_study_id_from_name(self._study.study_name)
        return found

    def _assigned(self, *, resumes: bool) -> Assigned:
        """The current trial with its parameters and the name of its directory, which the storage has from now on."""
        trainer, trial = self._trainer, self._trial
        trainer.hp_space(trial)  # lets the study choose all parameters
        name = trial.user_attrs.get(_NAME)
        if name is None:
            others = {one.user_attrs.get(_NAME): one.number for one in self._study.get_trials(deepcopy=False)}
            name = name_of_trial(trainer, trial, trial.number, others)
            trial.set_user_attr(_NAME, name)
        return Assigned(trial.number, name, dict(trial.params), resumes)

    def _train(self, assigned: Assigned) -> None:
        """Train a trial, and tell the study how it ended. Collective."""
        is_main = self._trainer.is_world_process_zero()
        trial = self._trial if is_main else optuna.trial.FixedTrial(assigned.parameters, assigned.number)
        logger.info("trial %d: %s", assigned.number, assigned.parameters)
        count = len(self._wanted.directions)
        try:
            objective = objective_of_run(self._trainer, trial, assigned.name, count, resumes=assigned.resumes)
        except optuna.TrialPruned as error:  # by the user's own code
            logger.info("trial %d is pruned: %s", assigned.number, error)
            if is_main:
                self._study.tell(assigned.number, state=TrialState.PRUNED)
        except RunExistsError as error:  # not of the trial: another process may be training it
            error.add_note("One process, or one job of torchrun, trains the trials of a study at a time.")
            raise
        except self._catch as error:
            logger.warning("trial %d has failed: %s", assigned.number, named_text(error))
            if is_main:
                self._study.tell(assigned.number, state=TrialState.FAIL)
        except Exception as error:
            error.add_note(
                f"This ended trial {assigned.number} of the search, which the same call continues; with "
                f"catch=({type(error).__name__},) such a trial counts as failed, and the search continues."
            )
            raise
        else:
            if is_main:
                self._tell(objective)

    def _tell(self, objective: Objective) -> None:
        """Tell the study how the current trial ended."""
        number = self._trial.number
        values = objective if isinstance(objective, list) else [objective]
        if self._is_pruned:
            self._study.tell(number, state=TrialState.PRUNED)
        elif any(math.isnan(value) for value in values):
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, values)
        how = "is pruned" if self._is_pruned else "has ended"
        ended = len(self._trials(*_ENDED))
        logger.info("trial %d %s, objective %s; %d of %d", number, how, objective, ended, self._wanted.n_trials)

    def _best(self) -> BestRun | list[BestRun]:
        if not self._trials(TrialState.COMPLETE):
            raise ConfigError(
                f"No trial of the study {self._study.study_name!r} was completed: all were pruned or have failed."
            )
        if len(self._wanted.directions) > 1:
            return [BestRun(str(one.number), one.values, one.params) for one in self._study.best_trials]
        best = self._study.best_trial
        return BestRun(str(best.number), best.value, best.params)


def sample_of(space: Any) -> object:
    """What a space gives for a trial that is not trained, to check it."""
    return space(_untrained())


def distributions_of(space: Any) -> dict[str, BaseDistribution]:
    """What a space asks of a trial that is not trained, by name."""
    trial = _untrained()
    space(trial)
    return dict(trial.distributions)


def _untrained() -> Any:
    with silent():
        return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()


def _storage_at(given: Any) -> Any:
    """Open a storage.

    Raises:
        ConfigError: if its URL is none, or its database cannot be opened.
    """
    try:
        return optuna.storages.get_storage(given)
    except (SQLAlchemyError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"storage={given!r} cannot be opened ({reason}); give an existing directory as sqlite:///DIR/FILE.db, or "
            f"the URL of a database that answers."
        ) from None


def _reached_in(past: Any) -> tuple[int, Objective] | None:
    """The last step of a trial that was evaluated, and its objective there."""
    if past.last_step is not None:
        return past.last_step, past.intermediate_values[past.last_step]
    found = past.user_attrs.get(_OBJECTIVE)
    return None if found is None else (found[0], found[1])


def _check_options(options: Mapping[str, object]) -> None:
    known = {*inspect.signature(optuna.create_study).parameters, *_OF_THE_LOOP} - {"direction", "directions"}
    check_options(options, known, "optuna", f"those of optuna.create_study and {', '.join(_OF_THE_LOOP)}")
    if options.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"n_jobs must be 1, got {options['n_jobs']}: the trials of a Trainer are trained one after another; "
            f"drop n_jobs."
        )
