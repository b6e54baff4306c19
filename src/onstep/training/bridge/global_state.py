"""Defines Megatron Bridge's `GlobalState` (the run, with its features under the documented names) and step result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from onstep.config import StragglerDetectionConfig
from onstep.distributed import ProcessGroupCollection
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.compute.losses import Scalar
from onstep.training.compute.step import LastStep, Step
from onstep.training.experts.experts import Experts
from onstep.training.fault_tolerance.sections import FaultToleranceState, sections_of
from onstep.training.profiling.instruments import GivenMonitor, energy_monitor
from onstep.training.reporting.gpu_telemetry import EnergyMonitor
from onstep.training.rerun.machine import RerunStateMachine
from onstep.training.rerun.rerun import GivenMachine, RerunMachine
from onstep.training.run import Run
from onstep.training.runs.signals import DistributedSignalHandler
from onstep.training.stragglers.detector import StragglerDetector, detector_of
from onstep.training.stragglers.nvrx import NVRxStragglerDetectionManager, NvrxStragglers


class TrainStepResult(NamedTuple):
    """The return value of `train_step`, in Megatron Bridge's order."""

    loss_dict: dict[str, Tensor]
    """Reduced losses as 0-d device tensors."""
    skipped_iter: int
    """1 if the update was not applied."""
    should_checkpoint: bool
    """Whether a checkpoint is due."""
    should_exit: bool
    """Whether the run is to end."""
    exit_code: int
    """The exit code with which it ends."""
    grad_norm: Scalar | None
    """Global L2 norm before clipping; a device tensor for Onstep's optimizers."""
    num_zeros_in_grad: Tensor | int | None
    """Number of exact zeros in the gradients, if counted; an int64 device tensor for Onstep's optimizers."""

    def with_max_attention_logit(self, global_state: Run) -> tuple[object, ...]:
        """The 8 values that newer versions of Megatron Bridge return: these 7 and the step's largest attention logit,
        as a device tensor, or None unless `model.log_max_attention_logit`.

        Args:
            global_state: the run.
        """
        step = global_state.features.room(LastStep).step
        return (*self, None if step is None else step.max_attention_logit)

    @classmethod
    def of(cls, step: Step) -> TrainStepResult:
        """The result of one step of the loop.

        Args:
            step: a finished step; one that was not applied is `skipped_iter` 1.
        """
        return cls(step.loss_dict, int(not step.applied), False, False, 0, step.grad_norm, step.num_zeros)


@dataclass
class GivenHandler:
    """The signal handler that was installed outside of a run."""

    handler: DistributedSignalHandler | None = None


@dataclass
class GivenManager:
    """The straggler detection of a user who drives training."""

    manager: NVRxStragglerDetectionManager | None = None


class AsyncCalls:
    """Megatron Bridge's queue of asynchronous saves, over the checkpoints of a run; at most one is being written."""

    def __init__(self, state: Run) -> None:
        self._state = state

    def get_num_unfinalized_calls(self) -> int:
        """Number of saves that are not durable yet."""
        checkpoints = self._state.checkpoints
        return int(checkpoints is not None and checkpoints.manager.is_saving)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Make a save durable that is written; with `blocking`, wait for it. Collective.

        Returns:
            The steps of the saves that became durable.
        """
        checkpoints = self._state.checkpoints
        if checkpoints is None or not checkpoints.manager.is_saving:
            return []
        if not blocking and self._state.world.agree([int(checkpoints.is_writing)]) != [0]:
            return []
        checkpoints.finish()
        return [self._state.train_state.step]

    def close(self) -> None:
        """Wait for the save that is being written, and make it durable. Collective."""
        self.maybe_finalize_async_calls(blocking=True)


_KEPT = ("cfg", "world", "run_dir", "checkpoints", "entry_point")
"""The fields that `GlobalState.reset_for_restart` keeps."""


class GlobalState(Run):
    """A run as Megatron Bridge's callbacks and functions see it; everything added here comes from features.

    Args:
        train_state: the counters of the run.
        info: facts about the run.
        num_eval_microbatches: micro-batches of an evaluation step on this rank.
        run_dir: the directory of the run; None without one.
        clock: the clock of the run.
        start_time: when this state was made, in Unix seconds.
    """

    @property
    def signal_handler(self) -> DistributedSignalHandler | None:
        """Turns signals into exit requests; None without `train.exit_signal_handler`.

        Outside of a run the first access installs it, until `reset_for_restart`, or until another state or run begins
        after a signal.
        """
        train, given = self.cfg.train, self.features.room(GivenHandler)
        if self.exits.handler is None and train.exit_signal_handler:
            names = train.exit_signals if train.exit_signal is None else [train.exit_signal]
            self.exits.handler = given.handler = DistributedSignalHandler(names, world=self.world)
            given.handler.is_permanent = True
            given.handler.__enter__()
        return self.exits.handler

    @property
    def async_calls_queue(self) -> AsyncCalls:
        """The checkpoints that are still being written in the background."""
        return AsyncCalls(self)

    def reset_for_restart(self) -> None:
        """Begin again in this process: keep the configuration, the ranks and the checkpoints, and reset the rest."""
        if "bridge_trackers" in self.__dict__:
            self.bridge_trackers.close("stopped")
        given = self.features.room(GivenHandler)
        if given.handler is not None:
            given.handler.release()
        kept = {name: getattr(self, name) for name in _KEPT}
        if self.checkpoints is not None:  # what comes at the same step may be something else
            self.checkpoints.saved_mark = self.checkpoints.failure = None
        self.__dict__.clear()
        self.__init__(**kept)  # type: ignore[misc]

    @property
    def fault_tolerance_state(self) -> FaultToleranceState:
        """The saved state of the run's timed sections."""
        return sections_of(self).state

    @fault_tolerance_state.setter
    def fault_tolerance_state(self, state: FaultToleranceState) -> None:
        sections_of(self).state = state

    @property
    def rank_monitor_client(self) -> Any:
        """The client that times the run's sections: that of `nvidia-resiliency-ext`, Onstep's own, or None."""
        return sections_of(self).client

    @rank_monitor_client.setter
    def rank_monitor_client(self, client: Any) -> None:
        sections_of(self).client = client

    @property
    def rerun_state_machine(self) -> RerunStateMachine:
        """Recomputes suspicious results, if `rerun_state_machine.rerun_mode` enables it."""
        feature = self.features.find(RerunMachine)
        return self.features.room(GivenMachine).machine if feature is None else feature.machine

    @rerun_state_machine.setter
    def rerun_state_machine(self, machine: RerunStateMachine) -> None:
        self.features.room(GivenMachine).machine = machine

    @property
    def straggler_timer(self) -> StragglerDetector:
        """Times batch reading and forward passes; does nothing unless `straggler.log_straggler`."""
        if self.cfg.straggler.log_straggler:
            return detector_of(self)
        return StragglerDetector(StragglerDetectionConfig(disable_straggler_on_startup=True))

    @property
    def energy_monitor(self) -> EnergyMonitor | None:
        """Measures the energy of the GPUs; None unless `logger.log_energy`."""
        return energy_monitor(self)

    @energy_monitor.setter
    def energy_monitor(self, monitor: EnergyMonitor | None) -> None:
        self.features.room(GivenMonitor).monitor = monitor

    @property
    def nvrx_straggler_manager(self) -> NVRxStragglerDetectionManager | None:
        """The straggler detection of `nvidia-resiliency-ext`; None unless `nvrx_straggler.enabled`."""
        feature = self.features.find(NvrxStragglers)
        return self.features.room(GivenManager).manager if feature is None else feature.manager

    @nvrx_straggler_manager.setter
    def nvrx_straggler_manager(self, manager: NVRxStragglerDetectionManager | None) -> None:
        self.features.room(GivenManager).manager = manager

    @property
    def pg_collection(self) -> ProcessGroupCollection:
        """The process groups of the run by Megatron's names; each is made when it is first asked for."""
        return ProcessGroupCollection(self.world)

    @property
    def experts(self) -> Experts | None:
        """The model's routers and multi-token prediction; None if it has neither."""
        return self.features.find(Experts)

    @property
    def last_step_loss(self) -> StepLoss | None:
        """The loss of the most recent step, over all ranks."""
        return self.features.room(LastStep).loss

    @property
    def max_attention_logit(self) -> Tensor | None:
        """The largest attention logit of the most recent step, over all ranks; None unless the model records it."""
        return self.features.room(LastStep).max_attention_logit
