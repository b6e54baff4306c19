"""Gives Ray Tune the trials of a search: those of earlier processes as they ended, then new ones."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import TRAINING_ITERATION
from ray.tune.search import SearchAlgorithm

from onstep.files.json_values import encode
from onstep.trainer.search.ray_log import ENDED, NAME, RESULT, TRIAL, Line, PastTrial, TrialLog, plain, trials_in

logger = logging.getLogger(__name__)

OBJECTIVE = "objective"
"""The metric that a search minimizes or maximizes, in each result."""
_NO_CONTROLLER = SimpleNamespace(get_live_trials=list)
"""For a scheduler that receives past results, of trials that it cannot control."""


class Trials(SearchAlgorithm):  # type: ignore[misc]
    """Numbers the trials of a search algorithm, and writes down what happens in them.

    What an earlier process has written is repeated: its trials are asked for again, and the search algorithm and the
    scheduler receive their results in the order in which they came. A trial that has ended is not started.

    Args:
        inner: chooses the parameters.
        scheduler: of the search, which stops trials.
        log: the file of the search.
        mode: `min` or `max`.
        named: the name of a trial's directory, from its parameters, its number and the numbers of the others by name.
    """

    def __init__(
        self, inner: Any, scheduler: Any, log: TrialLog, mode: str, named: Callable[[Any, int, dict[object, int]], str]
    ) -> None:
        self._inner, self._scheduler, self._log, self._mode, self._named = inner, scheduler, log, mode, named
        lines = log.lines()
        self._past = trials_in(lines)
        self._lines: deque[Line] = deque(lines)
        """Those that are still to be repeated."""
        self._given: list[tuple[Trial, str]] = []
        """Trials by number, with the ids by which the search algorithm knows them."""
        self._written = {trial: len(past.results) for trial, past in self._past.items()}
        """Results of each trial that are in the file."""
        self._names: dict[object, int] = {}
        self._ended = {trial for trial, past in self._past.items() if past.has_ended}
        self._has_warned = False

    @property
    def num_past(self) -> tuple[int, int]:
        """Trials of earlier processes that have ended, and that have not."""
        ended = sum(past.has_ended for past in self._past.values())
        return ended, len(self._past) - ended

    @property
    def have_ended(self) -> bool:
        """Whether all trials of the search have ended, or failed."""
        return self.is_finished() and all(trial.trial_id in self._ended for trial, _ in self._given)

    # ---- what Ray calls

    @property
    def metric(self) -> str:
        """What Ray shows beside each trial."""
        return OBJECTIVE

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Pass the space to the search algorithm; returns whether it accepts it."""
        accepted: bool = self._inner.set_search_properties(metric or OBJECTIVE, mode or self._mode, config, **spec)
        return accepted

    @property
    def total_samples(self) -> int:
        """Trials of the whole search."""
        return int(self._inner.total_samples)

    def add_configurations(self, experiments: Any) -> None:
        """Accept the space."""
        self._inner.add_configurations(experiments)

    def is_finished(self) -> bool:
        """Whether there are no more trials to begin."""
        return bool(self._inner.is_finished())

    def set_finished(self) -> None:
        """Begin no more trials."""
        self._inner.set_finished()

    def next_trial(self) -> Trial | None:
        """The next trial; None if there is none now."""
        while self._lines and NAME not in self._lines[0]:
            self._repeat(self._lines.popleft())
        trial = self._inner.next_trial()
        while trial is None and self._repeat_an_end():  # fewer trials are allowed at once than before
            trial = self._inner.next_trial()
        if trial is None:
            return None
        if self._lines:
            self._lines.popleft()
        number = len(self._given)
        self._given.append((trial, trial.trial_id))
        trial.trial_id = str(number)
        past = self._past.get(trial.trial_id)
        if past is None:
            name = self._named(trial.config, number, self._names)
            self._log.append(trial.trial_id, name=name, parameters=trial.config)
        else:
            name = past.name
            self._settle(trial, past)
        self._names[name] = number
        trial.custom_trial_name = trial.custom_trial_name or name
        return trial

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Write down a result, and pass it on; called for those after which the trial continues."""
        self._write(trial_id, result)
        self._inner.on_trial_result(self._given[int(trial_id)][1], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Write down that a trial has ended, unless by an error; called before its process is."""
        self._ended.add(trial_id)
        if result is not None and not error:
            self._write(trial_id, result, ended=True)
        self._inner.on_trial_complete(self._given[int(trial_id)][1], result=result, error=error)

    # ---- the file

    def _write(self, trial_id: str, result: dict[str, Any], **content: bool) -> None:
        count = self._written.get(trial_id, 0)
        is_new = result.get(TRAINING_ITERATION, 0) > count  # a trial that was interrupted reports its results again
        if is_new:
            self._written[trial_id] = count + 1
        if is_new or content:
            self._log.append(trial_id, **({RESULT: plain(result)} if is_new else {}), **content)

    def _settle(self, trial: Trial, past: PastTrial) -> None:
        """Give a trial the parameters and the results that the file has."""
        if json.loads(encode(trial.config)) != past.parameters:
            if not self._has_warned:
                logger.warning(
                    "the search algorithm gives trial %s other parameters than in %s, so it has no seed; the search "
                    "continues with those of the file",
                    trial.trial_id,
                    past.name,
                )
            self._has_warned = True
            trial.set_config({**trial.config, **past.parameters})
        if past.has_ended:
            for result in past.results:
                trial.update_last_result(dict(result))
            trial.set_status(Trial.TERMINATED)

    def _repeat_an_end(self) -> bool:
        """Repeat what is left of a trial that has begun and ended; returns whether there was one."""
        ends = (line[TRIAL] for line in self._lines if ENDED in line and int(line[TRIAL]) < len(self._given))
        found = next(ends, None)
        if found is None:
            return False
        left = [line for line in self._lines if line[TRIAL] == found]
        self._lines = deque(line for line in self._lines if line[TRIAL] != found)
        for line in left:
            self._repeat(line)
        return True

    def _repeat(self, line: Line) -> None:
        """Give the search algorithm and the scheduler a past result, or the end, of a trial that has ended.

        The results of one that has not are reported again by its own process.
        """
        past = self._past.get(line[TRIAL])
        if past is None or not past.has_ended or int(line[TRIAL]) >= len(self._given):
            return
        trial, known_as = self._given[int(line[TRIAL])]
        if RESULT in line:
            self._scheduler.on_trial_result(_NO_CONTROLLER, trial, line[RESULT])
        if ENDED not in line:
            self._inner.on_trial_result(known_as, line[RESULT])
            return
        last = past.results[-1]
        self._scheduler.on_trial_complete(_NO_CONTROLLER, trial, last)
        self._inner.on_trial_complete(known_as, result=last)
