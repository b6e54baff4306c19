"""Hugging Face's attributes and methods of a Trainer for callbacks, and the state and control that they get."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.events import Control, RunState, TrainerState
from onstep.events.exportable_state import exported_states
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.callback_handler import CallbackHandler, TrainerCallbackHandler
from onstep.trainer.uploads import writing_output
from onstep.training.run import Run


class CallbackMethods(BaseTrainer):
    """Hugging Face's attributes and methods for callbacks, and the state and control that they get."""

    given_state: TrainerState | None = None
    """What `state` is, in place of the most recent run's."""
    _first_control: Control | None = None
    _handler: TrainerCallbackHandler | None = None
    _given_handler: CallbackHandler | None = None

    @property
    def state(self) -> TrainerState:
        """The progress of the current or most recent run; before the first, a state without progress.

        One that is assigned outside of a run is what is read here until the next run.
        """
        if self.given_state is None and self.global_state is not None:
            return self.global_state.trainer_state
        if self.given_state is None:
            self.given_state = TrainerState(
                is_local_process_zero=self.args.local_process_index == 0,
                is_world_process_zero=self.args.process_index == 0,
                stateful_callbacks={
                    **exported_states(self.callback_manager.callbacks),
                    "TrainerControl": self.control.state(),
                },
            )
        return self.given_state

    @state.setter
    def state(self, state: TrainerState) -> None:
        if self.session is not None and state is not self.state:
            raise ConfigError(
                "Trainer.state cannot be replaced during a run, whose progress it shows; set its attributes instead."
            )
        self.given_state = state

    def save_state(self) -> None:
        """Write the progress to `trainer_state.json` in `args.output_dir`, on rank 0."""
        if self.is_world_process_zero():
            with writing_output(self) as place:
                directory = Path(place)
                directory.mkdir(parents=True, exist_ok=True)
                self.state.save_to_json(os.fspath(directory / "trainer_state.json"))

    @property
    def control(self) -> Control:
        """Accepts requests to the running loop, as a callback's `control`; outside of a run they have no effect."""
        if self.global_state is not None:
            return self.global_state.control
        if self._first_control is None:
            self._first_control = Control()
        return self._first_control

    @control.setter
    def control(self, control: object) -> None:
        self.control.merge(control)

    @property
    def callback_handler(self) -> CallbackHandler:
        """Fires events by hand: `trainer.callback_handler.call_event(name, args, state, control)`; lists callbacks.

        One that is assigned has its callbacks and its `call_event` called by runs.
        """
        if self._given_handler is None:
            return self._own_handler
        self._own_handler.lend_to(self._given_handler)
        return self._given_handler

    @callback_handler.setter
    def callback_handler(self, handler: CallbackHandler) -> None:
        if handler is self._own_handler:
            self._given_handler = None
            return
        if not isinstance(handler, CallbackHandler):
            raise ConfigError(
                f"callback_handler must be a CallbackHandler, got a {type(handler).__name__}; derive it from "
                f"onstep.CallbackHandler, or assign a function to trainer.callback_handler.call_event."
            )
        self._own_handler.adopt(handler)
        self._given_handler = handler

    @property
    def _own_handler(self) -> TrainerCallbackHandler:
        if self._handler is None:
            self._handler = TrainerCallbackHandler(self)
        return self._handler

    def add_callback(self, callback: object) -> None:
        """Register a callback, or a callback class.

        Args:
            callback: a callback, or its class.
        """
        self.callback_manager.add(callback)

    def pop_callback(self, callback: object) -> object:
        """Remove the first callback that equals this one, or is an instance of this class; returns it, or None.

        Hugging Face's `ProgressCallback`, or with `disable_tqdm` its `PrinterCallback`, stands for the one that prints
        progress here.

        Args:
            callback: a callback, or its class.

        Raises:
            ConfigError: for `DefaultFlowCallback`, since the loop itself decides what is due.
        """
        if not isinstance(callback, str):
            return self._own_handler.pop_callback(callback)
        with suppress(ValueError):  # no callback of this name
            return self.callback_manager.remove(callback)
        return None

    def remove_callback(self, callback: object) -> None:
        """Remove the same callback as `pop_callback`; a class without a match changes nothing.

        Args:
            callback: a callback, or its class.

        Raises:
            ValueError: if this instance is not a callback of the Trainer.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, (type, str)):
            known = ", ".join(self._own_handler.callback_list.split())
            raise ValueError(f"{callback!r} is not among the callbacks: {known}.")


def adopt_state(given: TrainerState | None, run: Run) -> None:
    """Continue from a state that was made by hand or read from a file, for an evaluation outside of a training.

    Its progress, its best metric, its records and the attributes that the user has added become those of `run`.
    """
    if given is None or isinstance(given, RunState):
        return
    progress, info = run.train_state, run.info
    progress.step, progress.epoch = given.global_step, int(given.epoch or 0)
    if given.max_steps > 0 and given.num_train_epochs > 0:
        info.max_steps, info.num_train_epochs = given.max_steps, given.num_train_epochs
        info.steps_per_epoch = max(1, round(given.max_steps / given.num_train_epochs))
        progress.steps_in_epoch = round(((given.epoch or 0) - progress.epoch) * info.steps_per_epoch)
    progress.best_metric, progress.best_step = given.best_metric, given.best_global_step
    progress.best_model_checkpoint = given.best_model_checkpoint
    progress.floating_point_operations_so_far = given.total_flos
    info.log_history = list(given.log_history)
    fields = {one.name for one in dataclasses.fields(given)}
    progress.user_attributes.update({name: value for name, value in vars(given).items() if name not in fields})


def shown_steps(args: TrainingArguments, max_steps: int) -> dict[str, int]:
    """The intervals that Hugging Face's state has, also where the strategy is not 'steps' and they have no effect."""
    state = TrainerState()
    state.compute_steps(args, max_steps)
    return {name: getattr(state, name) for name in ("logging_steps", "eval_steps", "save_steps")}
