"""Applies what is set while a run runs, waits while it is paused, and lets callbacks carry out commands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onstep.errors import named_text
from onstep.events import Request
from onstep.events.settings import DeclaredSetting
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.feature import Feature
from onstep.training.runs.decisions import FAILED_AFTER, DecisionLog, changes_learning
from onstep.training.stages.agreement import agree, append_decision, refuse, write_decision
from onstep.training.stages.data_position import leave_out_now
from onstep.training.stages.job import Job
from onstep.training.steering.repeats import load_repeats, repeat

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.1
"""How long a paused run waits before it looks again for what it is asked for."""


class Overridden(dict[str, tuple[DeclaredSetting, Any]]):
    """Values of callbacks that were set during the run: where they are, and the configured value."""


class Steering(Feature[Job]):
    """Does what a run is asked for while it runs, beside the flags of its control, and repeats it after a resume."""

    name = "steering"
    collective = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._run = host.run
        self._log = host.run.features.room(DecisionLog)
        self._pause: Request | None = None
        """Who asked the run to wait; None while it trains."""
        self._is_paused = False
        """Whether the run waits, so that the pause is recorded."""
        self._commands: list[Request] = []
        """Commands for callbacks that ranks have agreed on."""
        self._applied: dict[str, Any] = {}
        """The overrides that are in force."""
        self._overridden = host.run.features.room(Overridden)
        self._last: tuple[int, Request] | None = None
        """The last command that changed what is learned, and the step after which it did; named if the run fails."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Name the command that may be the cause of an error that ends the training."""
        try:
            yield
        except BaseException as error:
            if self._run.ending.training != "before":
                self._refuse_undone()
                self._blame(error)
            raise

    def begin(self) -> None:
        """Repeat what the run was asked for after its checkpoint. Collective."""
        self._last = load_repeats(self._run, self._log)
        self._apply()
        repeat(self._run, self._log)
        agree(self._run)
        self._apply()
        stage = self._run.stage
        stage.final_metrics_logged = stage.final_metrics_logged and self._run.is_over  # it may have become longer

    def wrap_act(self, act: Callable[[Job], bool]) -> Callable[[Job], None]:
        """What was sent after this step goes before what is asked for; the run then waits if it is paused."""

        def steered(job: Job) -> None:
            if self._log.repeats:
                repeat(self._run, self._log)
            while self._act(act) and repeat(self._run, self._log):
                pass  # what followed a repeated rollback before the next step
            if self._pause is not None:
                self._stay_paused(self._pause, act)

        return steered

    def _act(self, act: Callable[[Job], bool]) -> bool:
        """Act, and apply what later agreements have changed; whether the run was rolled back."""
        run, has_rolled_back = self._run, act(self.host)
        if self._applied != run.train_state.overrides and not run.control.should_abort_without_save:
            self._apply()
        return has_rolled_back

    def requested(self, request: Request) -> None:
        """Keep what is done later: a pause, commands."""
        match request.flag:
            case "pause":
                self._pause = self._pause or request
            case "resume":
                if self._pause is not None and not self._is_paused:  # it has nothing to wait for any more
                    write_decision(self._run, self._pause)
                self._pause = None
            case "leave_out":
                leave_out_now(self.host, request.details["sample_ids"])
            case "command":
                self._commands.append(request)
        if request.is_steered and request.flag != "rollback" and changes_learning(request):
            self._last = (self._run.train_state.step, request)

    def before_acting(self) -> None:
        """Apply what was set, and let callbacks carry out commands."""
        self._apply()
        if self._commands:
            self._fire_commands()

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """Apply what is set again: callbacks may have loaded other values."""
        if request.is_steered:
            self._last = (bad_step, request)
        self._applied = {}
        self._apply()

    def concluding(self) -> None:
        """Refuse what is not done any more, and name the command that may be the cause of an anomaly."""
        self._refuse_undone()
        if self._run.ending.by_anomaly:
            self._blame(None)

    def _stay_paused(self, request: Request, act: Callable[[Job], bool]) -> None:
        """Wait until a callback or a signal asks for something else; do what is asked for meanwhile. Collective."""
        run = self._run
        if run.is_over:
            self._pause = None
            refuse(run, request, "the run ends after this step, so it cannot wait")
            return
        self._is_paused = True
        write_decision(run, request)
        if run.world.is_main:
            logger.info("paused after step %d (%s)", run.train_state.step, request)
        HEARTBEAT.activity = "paused"
        while self._pause is not None and not run.is_over:
            HEARTBEAT.beats += 1
            with run.features.pause("wait"):
                time.sleep(_PAUSE_SECONDS)
            self.host.notify.on_paused()
            self._act(act)
        self._pause, self._is_paused = None, False
        if run.world.is_main and not run.is_over:
            logger.info("continuing after step %d", run.train_state.step)

    def _apply(self) -> None:
        """Apply values that were set during the run and act outside the loop's own decisions."""
        overrides, scheduler = self._run.train_state.overrides, self.host.scales_rates
        if scheduler is not None:
            factor = overrides.get("lr_factor", 1.0)
            if scheduler.lr_factor != factor:
                scheduler.lr_factor = factor
        if self._applied != overrides:
            self._applied = dict(overrides)
            if self._run.world.is_main:
                self._name_what_has_no_effect()
            self._apply_to_callbacks()

    def _name_what_has_no_effect(self) -> None:
        overrides = self._applied
        if self.host.scales_rates is None and "lr_factor" in overrides:
            factor = overrides["lr_factor"]
            logger.warning("lr_factor=%s has no effect: the run's scheduler cannot be scaled", factor)
        if "log_straggler" in overrides and not self._run.cfg.straggler.log_straggler:
            logger.warning("log_straggler has no effect: start the run with straggler.log_straggler=true")

    def _apply_to_callbacks(self) -> None:
        overrides, declared = self._run.train_state.overrides, self._run.control.declared
        for key, one in declared.items():
            if key in overrides:
                self._overridden.setdefault(key, (one, one.value))
                one.put(overrides[key])
            elif key in self._overridden:
                was_declared, value = self._overridden.pop(key)
                was_declared.put(value)
        missing = ", ".join(key for key in overrides if "." in key and key not in declared)
        if missing and self._run.world.is_main:
            logger.warning("set in an earlier part of this run, but no callback declares it now: %s", missing)

    def _fire_commands(self) -> None:
        """Let callbacks carry out the commands that ranks have agreed on, and record each with its result."""
        commands, self._commands = self._commands, []
        for request in commands:
            try:
                with self._run.features.pause("generate"):
                    self.host.notify.on_command(request=request)
            except Exception as error:
                refuse(self._run, request, named_text(error))
                raise
            write_decision(self._run, request)

    def _refuse_undone(self) -> None:
        """Refuse the agreed rollback that the end of the training has prevented, so that no later start repeats it."""
        control = self._run.control
        request, control.rollback_request = control.rollback_request, None
        if request is not None and request.is_steered:
            refuse(self._run, request, "training ended before this was done; send it again")

    def _blame(self, error: BaseException | None) -> None:
        """Name the command that may be the cause of the run's failure, and the way to continue without it.

        A loss that is NaN or spikes can follow a command many steps later; of another error, only the next step tells.

        Args:
            error: what the run fails with, which receives a note; None if it was stopped because of an anomaly.
        """
        run, last = self._run, self._last
        if last is None or isinstance(error, SystemExit | KeyboardInterrupt):
            return
        step, request = last
        if not (error is None or isinstance(error, ArithmeticError) or run.train_state.step <= step):
            return
        text = f"the last command that changes what is learned was applied after step {step}: {request}."
        if run.run_dir is not None:
            remedy = run.entry_point.without_commands(run.run_dir.path, step)
            text += f" If it is the cause, continue without it and what was sent later: {remedy}."
        if error is not None:
            error.add_note(text)
        elif run.world.is_main:
            logger.warning("%s", text)
        if run.world.is_main and run.run_dir is not None:
            details = {"command_step": step, "command_id": request.details.get("command_id")}
            append_decision(run, Request(FAILED_AFTER, "the loop", "", text, 0, details))
