"""Recomputes a suspicious result, to distinguish a hardware fault from a correct value.

The first rerun is in place, on the same device; if the result is the same, the run saves and exits (exit code 16), and
after a restart the step is recomputed, on another device if the scheduler provides one. The states and exit codes are
those of Megatron-Core's rerun state machine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from torch import Tensor

from onstep.config import RerunStateMachineConfig
from onstep.distributed import World
from onstep.training.compute.largest_results import LargestResults
from onstep.training.protocols import StateDict
from onstep.training.rerun.rejections import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    Diagnosis,
    DifferenceStats,
    Rejection,
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    UnexpectedResultError,
    device_identity,
    plain,
    relative_difference,
)
from onstep.training.rerun.snapshot import Rewindable, StepSnapshot, rewindable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

REPORTING_INTERVAL = 100
"""Number of iterations between two reports of determinism statistics."""

_NOTHING, _REPRODUCED, _NOT_REPRODUCED = range(3)

_EXITS = {
    RerunState.RERUNNING_IN_PLACE: (False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
    RerunState.WILL_RERUN_FROM_CHECKPOINT: (True, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE),
    RerunState.RERUNNING_FROM_CHECKPOINT: (False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: (False, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE),
}
"""(save a checkpoint first, exit without an update, exit code) after a step."""


class RerunStateMachine:
    """Wraps the forward and backward passes of a step::

        while machine.should_run_forward_backward(data_iterator):
            ...  # zero the gradients, forward, backward; `validate_result` for each result in question
        should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()

    Every rank has one. Its state is per rank (a PER_RANK component of a checkpoint).

    Args:
        world: the ranks that decide together.
        mode: see `RerunMode`.
        state_save_func: returns what a forward pass changes besides the random generators (buffers of the model, states
            of a parallel generator); called before the first run of a step.
        state_restore_func: restores that state before each rerun.
        error_injector: simulates errors.
        device: identity of this rank's device; None calls `device_identity`.
    """

    def __init__(
        self,
        world: World | None = None,
        mode: RerunMode | str = RerunMode.DISABLED,
        *,
        state_save_func: Callable[[], object] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        error_injector: RerunErrorInjector | None = None,
        device: str | None = None,
    ) -> None:
        self._world = world or World()
        self._mode = RerunMode(mode)
        self.error_injector = error_injector or RerunErrorInjector()
        self._device = device or device_identity(self._world)
        self._snapshot = StepSnapshot(self._world.device, state_save_func, state_restore_func)
        self.state = RerunState.NOT_RUNNING_YET
        self.current_iteration = 0
        """Steps done before the current one; set by the loop when it starts."""
        self.diagnosis: Diagnosis | None = None
        """The result of the last rerun; the same on all ranks."""
        self.conclusion: str | None = None
        """The same as text; also set if another device is needed to decide."""
        self.stats: dict[str, DifferenceStats] = {}
        """For `report_determinism_stats`: differences on this rank, by the validation's message."""
        self._rejections: list[Rejection] = []
        """Of this rank while a step runs; of all ranks once a rerun is decided."""
        self._largest = LargestResults()
        self._is_in_step = False
        self._is_resumed = False
        self._call = 0
        self._results: list[object] = []
        self._iterator_states: list[StateDict] = []

    @classmethod
    def from_config(cls, config: RerunStateMachineConfig, world: World, **options: Any) -> RerunStateMachine:
        """Build the machine that `config` describes; `options` are those of the constructor."""
        injector = RerunErrorInjector(config.error_injection_rate, config.error_injection_type, seed=1 + world.rank)
        return cls(world, config.rerun_mode, error_injector=injector, **options)

    def get_mode(self) -> RerunMode:
        """The machine's current mode."""
        return self._mode

    def set_mode(self, mode: RerunMode | str) -> None:
        """Change the mode, between two steps.

        Raises:
            RuntimeError: while a step is running.
        """
        if self._is_in_step:
            raise RuntimeError("the mode of a RerunStateMachine cannot change during a step; change it between steps")
        self._mode = RerunMode(mode)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Rerun nothing within the block, as in evaluations: their results are validated at once."""
        before = self._mode
        self.set_mode(RerunMode.DISABLED)
        try:
            yield
        finally:
            self._mode = before

    @property
    def is_enabled(self) -> bool:
        """Whether the machine ever reruns anything."""
        return self._mode is not RerunMode.DISABLED

    def should_run_forward_backward(self, data_iterator: Rewindable | list[Rewindable] | None = None) -> bool:
        """Whether to compute the step (again). Collective, unless the mode is `disabled`.

        Args:
            data_iterator: a `RerunDataIterator`, or a list with one for each virtual pipeline stage. None if the
                micro-batches of a step are at hand and need not be read again.

        Raises:
            TypeError: for an iterator that cannot rewind.
        """
        if not self._is_in_step:
            self._begin_step(data_iterator)
            return True
        self._is_in_step = self._must_run_again()
        if self._is_in_step:
            self._snapshot.go_back()
            self._call = 0
        elif self.state in (RerunState.INITIAL_RUN, RerunState.NOT_RUNNING_YET):
            self.state = RerunState.NOT_RUNNING_YET
            self.current_iteration += 1
        return self._is_in_step

    def validate_result(
        self,
        result: Result,
        rejection_func: Callable[[Result], bool],
        message: str = "unexpected result",
        comparison_func: Callable[[Result, Result], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Validate a result of a forward or backward pass; a rejected one is recomputed.

        Reads the device. The validations of a step must come in the same order each time it runs.

        Args:
            result: a number or tensor; any type with a custom `comparison_func`.
            rejection_func: whether a result is suspicious.
            message: description of the problem.
            comparison_func: returns how far two results are apart; None is `relative_difference`.
            tolerance: the largest difference at which two results count as the same.
            fatal: whether a result that remains suspicious ends the run; otherwise it is only logged as a warning.

        Raises:
            UnexpectedResultError: for a fatal result, if the mode is `disabled`.
        """
        if not self._is_in_step or not self.is_enabled:
            if rejection_func(result):
                self._refuse(self._rejection(0, result, message, fatal))
            return
        compare: Callable[..., float] = comparison_func or relative_difference
        call, self._call = self._call, self._call + 1
        is_initial = self.state is RerunState.INITIAL_RUN
        if self._mode is RerunMode.REPORT_DETERMINISM_STATS:
            if is_initial:
                self._results.append(plain(result))
            elif call < len(self._results):
                self.stats.setdefault(message, DifferenceStats()).add(compare(self._results[call], plain(result)))
            return
        first = None if is_initial else next((one for one in self._rejections if one.call == call), None)
        if first is not None:
            self._attribute(first, compare(first.value, plain(result)), tolerance)
            return
        is_rejected = bool(rejection_func(result))
        is_injected = is_initial and not is_rejected and self.error_injector.maybe_inject()
        if is_rejected or is_injected:
            rejection = self._rejection(call, result, message, fatal)
            rejection.injected = is_injected
            if not is_initial:  # accepted the first time, and suspicious now
                rejection.difference, rejection.is_reproduced = math.inf, False
            self._rejections.append(rejection)

    def is_unexpectedly_large(
        self, result: float | Tensor, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Whether a result is more than `threshold` times the largest of the first `num_samples`; for `rejection_func`.

        The first results of each `context` are only recorded. `resample` starts recording again. Reads the device.
        """
        records = self.state in (RerunState.INITIAL_RUN, RerunState.NOT_RUNNING_YET)
        return self._largest.is_exceeded(result, threshold, context, num_samples, resample=resample, records=records)

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Decide after a step: (save a checkpoint first, exit without an update, exit code).

        If a checkpoint is requested, the random generators, the iterators and the state of `state_restore_func` are
        restored to what they were before the step.
        """
        if self._mode is not RerunMode.VALIDATE_RESULTS or self._is_in_step:
            return False, False, 0
        if self.state is RerunState.WILL_RERUN_FROM_CHECKPOINT:
            self._snapshot.go_back()
        return _EXITS.get(self.state, (False, False, 0))

    def state_dict(self) -> StateDict:
        """The state that the next process needs: values to compare with, and the results in question."""
        pending = self.state is RerunState.WILL_RERUN_FROM_CHECKPOINT
        iterators = [one.state_dict() for one in self._snapshot.iterators] if pending else self._iterator_states
        pending = pending or self._is_resumed
        state = RerunState.WILL_RERUN_FROM_CHECKPOINT if pending else RerunState.NOT_RUNNING_YET
        return {
            "mode": self._mode.value,
            "state": state.value,
            "current_iteration": self.current_iteration,
            "world_size": self._world.size,
            "data_ranks": self._world.data.size,
            "rejections": [asdict(one) for one in self._rejections] if pending else [],
            "largest": self._largest.state_dict(),
            "error_injector": self.error_injector.state_dict(),
            "iterators": iterators,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a checkpoint; a result in question is recomputed in the next step.

        It is not recomputed if reruns are disabled now or the number of ranks has changed: nothing is then comparable.
        """
        self.current_iteration = int(state_dict["current_iteration"])
        self._largest.load_state_dict(state_dict["largest"])
        self.error_injector.load_state_dict(state_dict["error_injector"])
        self._is_resumed = state_dict["state"] == RerunState.WILL_RERUN_FROM_CHECKPOINT.value
        self._rejections = [Rejection.from_dict(one) for one in state_dict["rejections"]]
        self._iterator_states = list(state_dict["iterators"])
        ranks = state_dict["world_size"], state_dict.get("data_ranks", state_dict["world_size"])
        is_same = ranks == (self._world.size, self._world.data.size)
        if self._is_resumed and (self._mode is not RerunMode.VALIDATE_RESULTS or not is_same):
            logger.warning(
                "the checkpoint has results in question (%s), but they are not recomputed: that requires "
                "rerun_state_machine.rerun_mode=validate_results and %d ranks, %d of them with samples of their own",
                "; ".join(map(str, self._rejections)),
                *ranks,
            )
            self._is_resumed, self._rejections = False, []
            self.error_injector.is_active = False

    def report_determinism_stats(self) -> dict[str, DifferenceStats]:
        """Log how often results differed, for the worst rank of each validation, and return it. Collective."""
        worst: dict[str, DifferenceStats] = {}
        for of_rank in self._world.gather(self.stats):
            for name, stats in of_rank.items():
                if name not in worst or stats.largest > worst[name].largest:
                    worst[name] = stats
        if self._world.is_main:
            for name, stats in worst.items():
                logger.info("determinism of '%s' (worst rank): %s", name, stats)
        return worst

    def _begin_step(self, data_iterator: Rewindable | list[Rewindable] | None) -> None:
        iterators = rewindable(data_iterator) if self.is_enabled else []
        if self._is_resumed:
            self._resume(iterators)
        else:
            self.state, self._rejections = RerunState.INITIAL_RUN, []
        self._is_in_step, self._call, self._results = True, 0, []
        if self.is_enabled:
            self._snapshot.take(iterators)

    def _resume(self, iterators: list[Rewindable]) -> None:
        """Prepare to recompute the results that a checkpoint holds in question."""
        for iterator, state in zip(iterators, self._iterator_states, strict=False):
            iterator.load_state_dict(state)
        self._rejections = [one for one in self._rejections if one.rank == self._world.rank]
        for one in self._rejections:
            one.difference = one.is_reproduced = None
        is_same_device = any(one.fatal and one.device == self._device for one in self._rejections)
        (some_same_device,) = self._world.agree([int(is_same_device)])
        again, elsewhere = RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT, RerunState.RERUNNING_FROM_CHECKPOINT
        self.state = again if some_same_device else elsewhere
        self._is_resumed, self._iterator_states = False, []

    def _must_run_again(self) -> bool:
        """Whether the step that has just run must run once more; acts on the outcome of a rerun."""
        if not self.is_enabled:
            return False
        counts = self._mode is RerunMode.REPORT_DETERMINISM_STATS
        if self.state is RerunState.INITIAL_RUN:
            if not counts and self._world.agree([int(bool(self._rejections))]) == [0]:
                return False
            for one in self._rejections:
                logger.warning("%s; recomputing the step on the same device", one)
            self.state = RerunState.RERUNNING_IN_PLACE
            return True
        if not counts:
            self._classify()
            return False
        self.state = RerunState.NOT_RUNNING_YET
        if (self.current_iteration + 1) % REPORTING_INTERVAL == 0:
            self.report_determinism_stats()
        return False

    def _classify(self) -> None:
        """Decide, for all ranks, what the second result means."""
        own = max(map(_outcome, self._rejections), default=_NOTHING)
        outcome = max(of_rank for [of_rank] in self._world.gather_numbers([own]))
        if outcome == _NOTHING:
            for one in self._rejections:
                logger.warning("%s; recomputed, it differs by %s; not fatal, training continues", one, one.difference)
            self.state, self._rejections, self.error_injector.is_active = RerunState.NOT_RUNNING_YET, [], False
            return
        self._rejections = [one for of_rank in self._world.gather(self._rejections) for one in of_rank]
        suspect = next(one for one in self._rejections if _outcome(one) == outcome)
        if self.state is RerunState.RERUNNING_IN_PLACE and outcome == _REPRODUCED:
            self.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
            self._say("%s; the same device computes it again; restart on another device to find the cause", suspect)
        elif self.state is RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT:
            self._say("%s; this is the same device again, which is inconclusive; restart on another one", suspect)
        else:
            kind = RerunDiagnostic.CORRECT_RESULT if outcome == _REPRODUCED else RerunDiagnostic.PERSISTENT_ERROR
            if self.state is RerunState.RERUNNING_IN_PLACE:
                kind = RerunDiagnostic.TRANSIENT_ERROR
            self.diagnosis, self.error_injector.is_active = Diagnosis(kind, suspect), False
            self._say("%s", self.diagnosis)

    def _say(self, text: str, what: object) -> None:
        self.conclusion = text % what
        if self._world.is_main:
            logger.error(text, what)

    def _refuse(self, rejection: Rejection) -> None:
        """Report a rejection that is not recomputed."""
        if rejection.fatal:
            raise UnexpectedResultError(
                f"{rejection}; rerun_state_machine.rerun_mode=validate_results recomputes such a step."
            )
        logger.warning("%s", rejection)

    def _attribute(self, first: Rejection, difference: float, tolerance: float) -> None:
        """Record how far the second result of a rejected one is from it."""
        if first.injected:
            is_other_device = self.state is RerunState.RERUNNING_FROM_CHECKPOINT
            difference = self.error_injector.maybe_miscompare(difference, on_other_device=is_other_device)
        first.difference, first.is_reproduced = difference, difference <= tolerance

    def _rejection(self, call: int, result: object, message: str, fatal: bool) -> Rejection:
        place = (self._world.rank, self._device, self.current_iteration)
        named = self._world.place()
        return Rejection(*place, call=call, value=plain(result), message=message, fatal=fatal, place=named)


def _outcome(rejection: Rejection) -> int:
    if not rejection.fatal:
        return _NOTHING
    return _REPRODUCED if rejection.is_reproduced else _NOT_REPRODUCED
