"""What is not finite, or a spike, is never applied unseen: the gate before each update, and what follows from it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from onstep.data.loaders.sample_order import skip_samples
from onstep.events import Request
from onstep.events.control import BEFORE_UPDATE
from onstep.optim import HostFiniteGate
from onstep.training.anomalies.anomaly import Anomaly, Findings, SpikeDetector, investigate, too_many
from onstep.training.compute.losses import MicroLoss, StepLoss, Weight
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.forward_backward import BufferGuard
from onstep.training.stages.job import Job
from onstep.training.stages.record import publish

logger = logging.getLogger(__name__)

_REMEMBERED_STEPS = 16
"""A device tells of a bad step at most 10 steps late."""


class StepRecord(NamedTuple):
    """What is kept of a step until it is known to be finite."""

    step: int
    sample_ids: list[list[int]] | None
    micros: list[MicroLoss]
    loss: StepLoss


class AnomalyGate(Feature[Job]):
    """The gate before each update. All ranks find the same, since they see the same loss and gradient norm.

    Under `train.on_nonfinite` raise and stop the finite gate is sticky, and an accelerator is not waited for: the host
    learns of a bad step late, and until then every update is a no-op. Under skip and rollback, and where spikes are
    looked for, the host reads loss and norm at each step before the update, so that only that one is left out.

    The finite gate is the optimizer's own, and starts open: what an earlier `train()` met is over.
    """

    name = "anomalies"
    when = "always; train.on_nonfinite and anomaly.on_spike say what it does"
    collective = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Always: what is not finite is never applied."""
        return True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._job, self._state, self._gate = host, host.run, host.optimizer.gate
        state = self._state
        self._gate.reset()
        self._knows_at_once = isinstance(self._gate, HostFiniteGate)
        self._on_nonfinite, self._on_spike = state.cfg.train.on_nonfinite, state.cfg.anomaly.on_spike
        stops_at_once = self._on_nonfinite == "stop" and self._knows_at_once
        self.looks_for_spikes = self._on_spike != "ignore"
        """Whether loss and gradient norm of each step are compared with those before."""
        self._reads = stops_at_once or self._on_nonfinite in ("skip", "rollback") or self.looks_for_spikes
        self.needs_grad_norm = self._reads
        self._spikes = SpikeDetector(state.cfg.anomaly)
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self._buffers: BufferGuard | None = None
        self._found: Anomaly | None = None
        self._has_agreed_on_listeners = False
        self._has_warned_of_ids = False
        self._history: dict[str, list[str]] = {"skip": [], "rollback": []}
        state.ending.by_anomaly = False

    def wrap_compute(self, compute: Callable[[Step], None]) -> Callable[[Step], None]:
        """Keep what the step starts from. Collective at the first step."""

        def watched(step: Step) -> None:
            self._gate.step = step.number
            if self._reads:
                self._buffers = self._buffers or BufferGuard(self._job.model)
                self._buffers.keep()
            if self._state.world.size > 1:
                self._note_listeners()
            compute(step)

        return watched

    def _note_listeners(self) -> None:
        control, on = self._state.control, self._job.tell.on
        control.hears_before_update = any(getattr(on, event) for event in BEFORE_UPDATE)
        if not self._has_agreed_on_listeners:  # from the next step on it is part of the agreement at each step's end
            self._has_agreed_on_listeners = True
            [heard] = self._state.world.agree([int(control.hears_before_update)])
            control.is_heard_before_update = bool(heard)

    def admits(self, step: Step) -> bool:
        """Whether this step's update is to be applied; the same on all ranks.

        Waits for the device where the policy says so. Collective where a callback listens to an event before the
        update, which may ask for it to be left out.
        """
        requests = self._state.control.requests
        if not self._reads and not requests and self._state.world.size == 1:
            return True
        loss, grad_norm = step.total, step.grad_norm
        values: dict[str, float] = {}
        if self._reads:
            is_bad = self._gate.poll(force=True) is not None
            if is_bad or (self.looks_for_spikes and grad_norm is not None):
                values = _read(loss, grad_norm)
            spike = self._spikes.find(values) if values and not is_bad else None
            if is_bad:
                self._found = Anomaly.non_finite(step.number, self._on_nonfinite, values)
            elif spike is not None:
                self._found = Anomaly.of(step.number, f"spike: {spike}", self._on_spike, values)
        asked = self._asked_to_skip()
        if asked is not None and self._found is None:
            values = values or _read(loss, grad_norm)
            self._found = replace(Anomaly.of(step.number, str(asked), "skip", values), asked=asked)
        if self._found is None and values:
            self._spikes.accept(step.number, values)
        return self._found is None

    def after_train_step(self, step: Step) -> None:
        """Remember the step; find out who is to blame if it was bad, before the counters move on.

        Raises:
            NonFiniteError: under the policy `raise`, on all ranks at the same step.
            AnomalyError: for a spike under the policy `raise`.
        """
        if self._knows_at_once and self._found is None and self._gate.first_bad_step is None:
            return
        self._records.append(StepRecord(step.number, step.batches.sample_ids, step.micros, step.total))
        if self._found is not None:
            self._explain(self._found)
        elif self._gate.poll() is not None:
            self.check()
        step.left_out = self._found is not None

    def after_count(self, step: Step) -> None:
        """Publish what was found and ask for what follows, now that the counters have moved on.

        Raises:
            AnomalyError: when there were more skips than `anomaly.max_skips`.
        """
        if self._found is not None:
            self._conclude(self._found)

    def settle(self) -> None:
        """Ask the device for certain whether a step was bad."""
        self.check(wait=True)

    def check(self, wait: bool = False) -> None:
        """Act on a bad step that the host has only now learned of; `wait` asks the device for certain.

        Raises:
            NonFiniteError: under the policy `raise`, naming the first bad step, its rank and its samples.
        """
        step = None if self._state.ending.by_anomaly or self._found is not None else self._gate.poll(force=wait)
        if step is None:
            return
        record = self._record_of(step)
        values = {"loss": math.nan} if record is None else _read(record.loss, None)
        found = self._explain(Anomaly.non_finite(step, self._on_nonfinite, values))
        if wait:  # the counters have moved on already
            self._conclude(found)

    def before_rollback(self, bad_step: int, request: Request) -> None:
        """Remember the rollback that the ranks have agreed on.

        Raises:
            AnomalyError: when there were more than `anomaly.max_rollbacks`.
        """
        progress, most = self._state.train_state, self._state.cfg.anomaly.max_rollbacks
        self._history["rollback"].append(f"step {bad_step} ({request.reason or request.author})")
        if progress.num_rollbacks > most:
            raise too_many("rollback", progress.num_rollbacks, most, self._history["rollback"])

    def rolled_back(self) -> None:
        """Forget what came after the checkpoint, and open the gate."""
        self._spikes.forget_after(self._state.train_state.step)
        self._gate.reset()
        self._records.clear()

    def state_dict(self) -> StateDict:
        """The last accepted losses and norms, and what was skipped or rolled back, in words."""
        return {"spikes": self._spikes.state_dict(), "history": {key: list(one) for key, one in self._history.items()}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with saved values; a rollback keeps the words of the branch that it leaves."""
        self._spikes.load_state_dict(state_dict["spikes"])
        for key, saved in state_dict["history"].items():
            if len(saved) > len(self._history[key]):
                self._history[key] = list(saved)

    def _record_of(self, step: int) -> StepRecord | None:
        return next((one for one in self._records if one.step == step), None)

    def _asked_to_skip(self) -> Request | None:
        """The first request of any rank to leave out this update. Collective where somebody may ask."""
        state, mine = self._state, self._state.control.take_skips()
        if state.world.size > 1:
            if not state.control.is_heard_before_update:  # a callback that joined in this very step, on this rank
                if mine:
                    logger.warning("skip asked by '%s' came in the step that it joined; ignored", mine[0].author)
                return None
            [is_asked] = state.world.agree([int(bool(mine))])
            everyone = state.world.gather([vars(one) for one in mine]) if is_asked else []
            mine = [Request(**fields) for fields_of_rank in everyone for fields in fields_of_rank]
        return mine[0] if mine else None

    def _explain(self, found: Anomaly) -> Anomaly:
        """Name the culprits; from here on the step is over and the gate is open for the next. Collective.

        Raises:
            NonFiniteError: under the policy `raise`.
            AnomalyError: the same for a spike.
        """
        record = self._record_of(found.step)
        ids = None if record is None else record.sample_ids
        is_this_step = found.step == self._state.train_state.step + 1
        if found.is_non_finite and record is not None:
            findings = investigate(self._job, record.micros, ids, self._job.last if is_this_step else None)
        else:
            findings = Findings([], self._state.world.gather(ids))
        if self._buffers is not None and is_this_step:
            self._buffers.restore()
        self._found = explained = replace(found, findings=findings)
        if found.action == "raise":
            write_decision(self._state, explained.request("raised", self._state.world.rank), found.step)
            raise explained.error()
        if found.is_non_finite and found.action != "stop":
            self._gate.reset()
        return explained

    def _conclude(self, found: Anomaly) -> None:
        """Remember the samples to blame, show what was found everywhere at its own step, and ask for what follows."""
        state, ids = self._state, found.findings.sample_ids
        self._found = None
        if found.action in ("skip", "rollback") and ids is not None:
            skip_samples(state.train_state.skip_list, state.train_state.epoch, ids)
        elif found.action in ("skip", "rollback") and not self._has_warned_of_ids:
            self._has_warned_of_ids = True
            logger.warning("the data has no sample ids, so what is skipped now will be met again in the next epoch")
        if state.world.is_main:
            logger.warning("%s; action: %s", found, found.action)
        publish(state, {"epoch": state.trainer_state.epoch, **found.logs()}, self._job.tell)
        if found.action == "skip":
            self._note_skip(found)
        else:
            self._decide(found)

    def _note_skip(self, found: Anomaly) -> None:
        """Count the samples as skipped and record the decision; only the gate's own skips are limited."""
        state, progress = self._state, self._state.train_state
        assert self._job.last is not None
        num_samples = self._job.last.batches.num_samples
        progress.skipped_train_samples += num_samples or state.current_running_global_batch_size
        write_decision(state, found.request("skip", state.world.rank))
        if found.asked is not None:
            return
        progress.num_skips += 1
        self._history["skip"].append(str(found))
        most = state.cfg.anomaly.max_skips
        if progress.num_skips > most:
            raise too_many("skip", progress.num_skips, most, self._history["skip"])

    def _decide(self, found: Anomaly) -> None:
        """Put the decision to the control as the gate's: once for all ranks, which have all come to it."""
        control = self._state.control
        flag = "should_training_stop" if found.action == "stop" else "rollback"
        if self._state.world.is_main:
            control.ask(found.request(flag, self._state.world.rank))
        elif found.action == "stop":
            control.decide(flag)
        self._state.ending.by_anomaly = self._state.ending.by_anomaly or found.action == "stop"


def _read(loss: StepLoss, grad_norm: Weight | None) -> dict[str, float]:
    """Loss and gradient norm on the host; waits for the device."""
    values = {"loss": float(loss.value())}
    return values if grad_norm is None else {**values, "grad_norm": float(grad_norm)}
