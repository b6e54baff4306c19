"""Detects non-finite and spiking losses or gradient norms before each update and applies the configured policy."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onstep.data.loaders.sample_order import skip_samples
from onstep.events import Request
from onstep.events.control import BEFORE_UPDATE
from onstep.optim import HostFiniteGate
from onstep.training.anomalies.anomaly import Anomaly, too_many
from onstep.training.anomalies.bad_samples import Findings, find_bad_samples, sharers_of
from onstep.training.anomalies.spikes import SpikeDetector
from onstep.training.anomalies.worst_samples import find_worst_samples
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.compute.losses import MicroLoss, Scalar
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.forward_backward import BufferGuard
from onstep.training.stages.job import Job
from onstep.training.stages.record import publish

logger = logging.getLogger(__name__)

_REMEMBERED_STEPS = 16
"""On an accelerator, a bad step is detected at most 10 steps late."""


class StepRecord(NamedTuple):
    """Data kept for a step until it is known to be finite."""

    step: int
    sample_ids: list[list[int]] | None
    micros: list[MicroLoss]
    loss: StepLoss


class AnomalyGate(Feature[Job]):
    """Checks each update before it is applied. All ranks reach the same result: they see the same loss and norm.

    With `train.on_nonfinite` raise or stop, the finite gate is sticky and an accelerator is not waited for: the host
    learns of a bad step late, and until then every update is a no-op. With skip or rollback, and with spike detection,
    the host learns before each update whether the step is bad, and reads its loss and norm if spikes are looked for, in
    one wait, so that only the bad update is skipped.

    The finite gate belongs to the optimizer and starts open: what an earlier `train()` found no longer applies.
    """

    name = "anomalies"
    when = "always; train.on_nonfinite and anomaly.on_spike set the policy"
    collective = True
    has_state = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._job, self._state, self._gate = host, host.run, host.optimizer.gate
        state = self._state
        self._gate.reset()
        self._knows_at_once = isinstance(self._gate, HostFiniteGate)
        self._on_nonfinite, self._on_spike = state.cfg.train.on_nonfinite, state.cfg.anomaly.on_spike
        stops_at_once = self._on_nonfinite == "stop" and self._knows_at_once
        self.looks_for_spikes = self._on_spike != "ignore"
        """Whether each step's loss and gradient norm are compared with those before."""
        self._reads = stops_at_once or self._on_nonfinite in ("skip", "rollback") or self.looks_for_spikes
        self.needs_grad_norm = self._reads
        self._spikes = SpikeDetector(state.cfg.anomaly)
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)
        self._buffers: BufferGuard | None = None
        self._found: Anomaly | None = None
        self._has_agreed_on_listeners = False
        self._has_warned_of_ids = False
        self._history: dict[str, list[str]] = {"skip": [], "rollback": []}

    def wrap_compute(self, compute: Callable[[Step], None]) -> Callable[[Step], None]:
        """Keep the state that the step starts from. Collective at the first step."""

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
        control, on = self._state.control, self._job.notify.on
        control.has_pre_update_listener = any(getattr(on, event) for event in BEFORE_UPDATE)
        if not self._has_agreed_on_listeners:  # from the next step on, part of the agreement at the end of a step
            self._has_agreed_on_listeners = True
            [any_listener] = self._state.world.agree([int(control.has_pre_update_listener)])
            control.any_pre_update_listener = bool(any_listener)

    def admits(self, step: Step) -> bool:
        """Whether to apply this step's update; the same on all ranks.

        Waits for the device where the policy requires it. Collective if a callback listens to an event before the
        update, since it may request a skip.
        """
        requests = self._state.control.requests
        if not self._reads and not requests and self._state.world.size == 1:
            return True
        loss, grad_norm = step.total, step.grad_norm
        values: dict[str, float] = {}
        if self._reads:
            wanted = _tensors(loss, grad_norm) if self.looks_for_spikes and grad_norm is not None else {}
            values = dict(zip(wanted, self._job.optimizer.read(*wanted.values()), strict=True))
            is_bad = self._gate.first_bad_step is not None
            if is_bad:
                values = values or self._read(loss, grad_norm)
            spike = self._spikes.find(values) if values and not is_bad else None
            if is_bad:
                self._found = Anomaly.non_finite(step.number, self._on_nonfinite, values)
            elif spike is not None:
                self._found = Anomaly.of(step.number, f"spike: {spike}", self._on_spike, values)
        asked = self._skip_request()
        if asked is not None and self._found is None:
            values = values or self._read(loss, grad_norm)
            self._found = replace(Anomaly.of(step.number, str(asked), "skip", values), asked=asked)
        if self._found is None and values:
            self._spikes.accept(step.number, values)
        return self._found is None

    def after_train_step(self, step: Step) -> None:
        """Remember the step; if it was bad, find the bad samples before the counters advance.

        Raises:
            NonFiniteError: with the policy `raise`, on all ranks at the same step.
            AnomalyError: for a spike, with the policy `raise`.
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
        """Publish the findings and request the policy's action, now that the counters have advanced.

        Raises:
            AnomalyError: after more than `anomaly.max_skips` skips.
        """
        if self._found is not None:
            self._conclude(self._found)

    def end_alone(self, step: Step) -> bool:
        """Apply the policy to a step that is trained without `train()`, whose caller counts and decides. Collective.

        Returns:
            Whether the training is to end, by the policy `stop`. The next update is applied, also after an error.

        Raises:
            NonFiniteError: with the policy `raise`.
            AnomalyError: for a spike, with the policy `raise`.
        """
        try:
            self.after_train_step(step)
        finally:
            found, self._found = self._found, None
            if found is not None:
                self._gate.reset()
        if found is None:
            return False
        if self._state.world.is_main:
            logger.warning("%s; the update was left out (%s)", found, found.action)
        return found.action == "stop"

    def settle(self) -> None:
        """Read from the device whether a step was bad, waiting for it."""
        self.check(wait=True)

    def check(self, wait: bool = False) -> None:
        """Act on a bad step that the host has only now learned of; with `wait`, wait for the device's answer.

        Raises:
            NonFiniteError: with the policy `raise`, naming the first bad step, its rank and its samples.
        """
        step = None if self._state.ending.by_anomaly or self._found is not None else self._gate.poll(force=wait)
        if step is None:
            return
        record = self._record_of(step)
        values = {"loss": math.nan} if record is None else self._read(record.loss, None)
        found = self._explain(Anomaly.non_finite(step, self._on_nonfinite, values))
        if wait:  # the counters have already advanced
            self._conclude(found)

    def before_rollback(self, bad_step: int, request: Request) -> None:
        """Remember the rollback that the ranks have agreed on.

        Raises:
            AnomalyError: after more than `anomaly.max_rollbacks` rollbacks.
        """
        progress, most = self._state.train_state, self._state.cfg.anomaly.max_rollbacks
        self._history["rollback"].append(f"step {bad_step} ({request.reason or request.author})")
        if progress.num_rollbacks > most:
            raise too_many("rollback", progress.num_rollbacks, most, self._history["rollback"])

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """Forget everything after the checkpoint, and open the gate."""
        self._spikes.forget_after(self._state.train_state.step)
        self._gate.reset()
        self._records.clear()

    def state_dict(self) -> StateDict:
        """The last accepted losses and norms, and descriptions of the skips and rollbacks."""
        return {"spikes": self._spikes.state_dict(), "history": {key: list(one) for key, one in self._history.items()}}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with saved values; a rollback keeps the descriptions of the abandoned branch."""
        self._spikes.load_state_dict(state_dict["spikes"])
        for key, saved in state_dict["history"].items():
            if len(saved) > len(self._history[key]):
                self._history[key] = list(saved)

    def _read(self, loss: StepLoss, grad_norm: Scalar | None) -> dict[str, float]:
        """Loss and gradient norm on the host; waits for the device."""
        tensors = _tensors(loss, grad_norm)
        return dict(zip(tensors, self._gate.read(*tensors.values()), strict=True))

    def _record_of(self, step: int) -> StepRecord | None:
        return next((one for one in self._records if one.step == step), None)

    def _skip_request(self) -> Request | None:
        """The first request of any rank to skip this update. Collective if any callback may request it."""
        state, mine = self._state, self._state.control.pop_skips()
        if state.world.size > 1:
            if not state.control.any_pre_update_listener:  # a callback that was added on this rank during this step
                if mine:
                    logger.warning("ignored the skip requested by '%s', which was added in this step", mine[0].author)
                return None
            [any_request] = state.world.agree([int(bool(mine))])
            everyone = state.world.gather([vars(one) for one in mine]) if any_request else []
            mine = [Request(**fields) for fields_of_rank in everyone for fields in fields_of_rank]
        return mine[0] if mine else None

    def _explain(self, found: Anomaly) -> Anomaly:
        """Find the bad samples; after this the step is over and the gate is open for the next one. Collective.

        Raises:
            NonFiniteError: with the policy `raise`.
            AnomalyError: likewise for a spike.
        """
        record = self._record_of(found.step)
        ids = None if record is None else record.sample_ids
        is_this_step = found.step == self._state.train_state.step + 1
        if found.is_non_finite and record is not None:
            findings = find_bad_samples(self._job, record.micros, ids, self._job.last if is_this_step else None)
        else:
            world = self._state.world
            findings = Findings([], world.data.gather(ids), sharers=sharers_of(world.sizes))
            if found.is_spike and is_this_step and self._job.last is not None:
                findings = replace(findings, worst=find_worst_samples(self._job, self._job.last))
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
        """Remember the bad samples, report the findings at their own step, and request the policy's action."""
        state, ids = self._state, found.findings.sample_ids
        self._found = None
        if found.action in ("skip", "rollback") and ids is not None:
            skip_samples(state.train_state.skip_list, state.train_state.epoch, ids)
        elif found.action in ("skip", "rollback") and not self._has_warned_of_ids:
            self._has_warned_of_ids = True
            logger.warning("the data has no sample ids, so the samples skipped now will reappear in the next epoch")
        if state.world.is_main:
            logger.warning("%s; action: %s", found, found.action)
        publish(state, {"epoch": state.trainer_state.epoch, **found.logs()}, self._job.notify)
        if found.action == "skip":
            self._note_skip(found)
        else:
            self._decide(found)

    def _note_skip(self, found: Anomaly) -> None:
        """Count the samples as skipped and record the decision; only the gate's own skips count towards the limit."""
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
        """Pass the decision to the control in the gate's name: once for all ranks, which have all reached it."""
        control = self._state.control
        flag = "should_training_stop" if found.action == "stop" else "rollback"
        if self._state.world.is_main:
            control.add_request(found.request(flag, self._state.world.rank))
        elif found.action == "stop":
            control.set_flag(flag)
        self._state.ending.by_anomaly = self._state.ending.by_anomaly or found.action == "stop"


def _tensors(loss: StepLoss, grad_norm: Scalar | None) -> dict[str, Tensor]:
    """Loss and gradient norm of a step."""
    values = {"loss": loss.value()}
    return values if grad_norm is None else {**values, "grad_norm": torch.as_tensor(grad_norm)}
