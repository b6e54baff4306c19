"""Searches with Ray Tune: each trial is a run that Ray starts in a process of its own."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.error import TuneError
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    create_scheduler,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher, SearchGenerator, create_searcher
from ray.tune.search.variant_generator import generate_variants

from onstep.errors import ConfigError, OnstepError, named_text
from onstep.trainer.search.ray_log import TrialLog
from onstep.trainer.search.ray_trial import Place, RayTrial
from onstep.trainer.search.ray_trials import OBJECTIVE, Trials
from onstep.trainer.search.trial_run import check_options, name_of_trial
from onstep.trainer.trials.results import BestRun, Wanted
from onstep.training.runs.lock import RunLock

logger = logging.getLogger(__name__)

LOCK = ".search.lock"
"""In the directory of a search, held by the process that makes it."""
_OWN = ("run_or_experiment", "config", "num_samples", "resume", "resume_config", "restore", "metric", "mode")
"""Parameters of `tune.run` that the search itself passes, or does not need."""
_REFUSED = (HyperBandScheduler, PopulationBasedTraining, PopulationBasedTrainingReplay)
_NAMED = re.compile(r"[\w.]+: ")
"""An error in a traceback, not a note of it."""
_ENDS_EARLY = ("time_budget_s", "stop", "fail_fast")
"""Keywords by which a search may end before all trials have."""


class RaySweep:
    """The trials of a search, of which this process is the driver.

    Args:
        trainer: the Trainer of the search, which is sent to the processes of the trials.
        wanted: what the user asks for.

    Raises:
        ConfigError: for a search that Ray Tune cannot make.
    """

    def __init__(self, trainer: Any, wanted: Wanted) -> None:
        known = [name for name in inspect.signature(tune.run).parameters if name not in _OWN and name[0] != "_"]
        check_options(wanted.options, known, "ray", "those of ray.tune.run, except for what the search itself sets")
        if len(wanted.directions) > 1:
            raise ConfigError("backend='ray' requires one direction; use backend='optuna' for a list of them.")
        if trainer.args.world_size > 1:
            raise ConfigError(
                "backend='ray' itself starts a process for each trial; call it in one process, or use "
                "backend='optuna', with which all ranks train each trial."
            )
        self._trainer, self._wanted = trainer, wanted
        self._mode = wanted.directions[0][:3]
        self._root = Path(str(trainer.args.output_dir)).absolute()
        self._options = dict(wanted.options)
        self._scheduler = self._made_scheduler()

    def run(self) -> BestRun:
        """Let Ray train the trials that have not ended, and return the best of all.

        Raises:
            ConfigError: if the Trainer cannot be sent to other processes.
            RunExistsError: if another process makes this search.
            OnstepError: if trials have failed.
            KeyboardInterrupt: after Ctrl-C.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        held = RunLock(self._root / LOCK, "a search, ")
        try:
            with self._sendable():
                analysis = self._tune()
        finally:
            held.release()
        best = analysis.get_best_trial(OBJECTIVE, self._mode, scope=os.environ.get("RAY_SCOPE", "last"))
        if best is None:
            raise ConfigError(f"No trial of the search in {self._root} has an objective that is a finite number.")
        return BestRun(best.trial_id, best.last_result[OBJECTIVE], best.config, analysis)

    def _tune(self) -> Any:
        options, args = self._options, self._trainer.args
        trials = Trials(
            self._made_search(),
            self._scheduler,
            TrialLog(self._root),
            self._mode,
            lambda config, number, others: name_of_trial(self._trainer, config, number, others),
        )
        ended, interrupted = trials.num_past
        if ended or interrupted:
            logger.info("the search continues: %d trials are finished, %d were interrupted", ended, interrupted)
        options.setdefault("resources_per_trial", {"cpu": 1, **({"gpu": 1} if args.n_gpu else {})})
        options.setdefault("progress_reporter", tune.CLIReporter(metric_columns=[OBJECTIVE]))
        options.setdefault("storage_path", str(self._root))
        options.setdefault("name", "ray")
        try:
            analysis = tune.run(
                self._trainable(),
                config=self._trainer.hp_space(None),
                num_samples=self._wanted.n_trials,
                search_alg=trials,
                scheduler=self._scheduler,
                **options,
            )
        except TuneError as error:
            raise OnstepError(_failures(error)) from error
        if not trials.have_ended and not any(options.get(name) for name in _ENDS_EARLY):
            raise KeyboardInterrupt("The search was interrupted; the same call continues it.")
        return analysis

    @contextmanager
    def _sendable(self) -> Iterator[None]:
        """Set aside what the Trainer has of an earlier training, and make its paths absolute."""
        trainer = self._trainer
        before = {name: getattr(trainer, name) for name in ("args", "model", "global_state")}
        trainer.args = copy.copy(trainer.args)
        trainer.args.output_dir = str(self._root)
        if trainer.args.logging_dir is not None:
            trainer.args.logging_dir = os.path.abspath(trainer.args.logging_dir)
        trainer.model = trainer.global_state = None
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)

    def _trainable(self) -> Any:
        if not ray.is_initialized():
            ray.init()
        place = Place(self._root, Path.cwd(), self._stopped_by())
        try:
            return tune.with_parameters(RayTrial, trainer=self._trainer, place=place)
        except Exception as error:  # what cannot be pickled raises errors of many types
            reason = named_text(error.__cause__ or error).splitlines()[0]
            raise ConfigError(
                f"backend='ray' sends the Trainer to other processes, which fails ({reason}); open files, connections "
                f"and the like in model_init or in a callback's on_train_begin, not before."
            ) from error

    def _stopped_by(self) -> str:
        is_alone = isinstance(self._scheduler, FIFOScheduler) and type(self._scheduler) is not FIFOScheduler
        return "Ray Tune" if self._options.get("stop") or not is_alone else type(self._scheduler).__name__

    def _made_scheduler(self) -> Any:
        given = self._options.pop("scheduler", None)
        scheduler = create_scheduler(given) if isinstance(given, str) else given or FIFOScheduler()
        name = type(scheduler).__name__
        if isinstance(scheduler, _REFUSED):
            raise ConfigError(
                f"scheduler={name} gives a trial the weights of others, or lets trials wait for each other, which a "
                f"search that continues cannot repeat; use one that stops trials, such as ASHAScheduler."
            )
        if type(scheduler) is not FIFOScheduler and self._trainer.args.eval_strategy == "no":
            raise ConfigError(
                f"scheduler={name} compares evaluations, and eval_strategy='no' has none; set eval_strategy='steps'."
            )
        scheduler.set_search_properties(OBJECTIVE, self._mode)
        return scheduler

    def _made_search(self) -> Any:
        """What chooses parameters; by default at random, from the seed of the arguments."""
        given, most = self._options.pop("search_alg", None), self._options.pop("max_concurrent_trials", None) or 0
        search = create_searcher(given) if isinstance(given, str) else given
        if search is None:
            return BasicVariantGenerator(max_concurrent=most, random_state=self._trainer.args.seed)
        if not isinstance(search, Searcher):
            return search
        if most and not isinstance(search, ConcurrencyLimiter):
            search = ConcurrencyLimiter(search, max_concurrent=most)
        return SearchGenerator(search)


def sample_of(space: Any) -> object:
    """What a space gives for a trial that is not trained, to check it."""
    config = space(None)
    if not isinstance(config, Mapping):
        return config
    sample: object = next(generate_variants(dict(config), random_state=0))[1]
    return sample


def _failures(error: TuneError) -> str:
    """Which trials have failed, and how the first did."""
    failed: list[Trial] = next((one for one in error.args if isinstance(one, list)), [])
    if not failed:
        return str(error)
    tracebacks = ((one.custom_trial_name, one.get_error()) for one in failed)
    name, text = next(((name, text) for name, text in tracebacks if text), ("unknown", str(error)))
    reason = next((line for line in reversed(text.splitlines()) if _NAMED.match(line)), text.splitlines()[-1])
    return (
        f"{len(failed)} of the trials failed; the first is {name}: {reason}; the same call continues them, and with "
        f"raise_on_failed_trial=False the search returns the best of the others."
    )
