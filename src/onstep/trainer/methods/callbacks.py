"""Hugging Face's attributes and methods of a Trainer for callbacks, and the state and control that they get."""

from __future__ import annotations

from typing import Any

from onstep.errors import ConfigError
from onstep.events import Control, TrainerState
from onstep.events.exportable_state import exported_states
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.callback_handler import TrainerCallbackHandler, pop_default


class CallbackMethods(BaseTrainer):
    """Hugging Face's attributes and methods for callbacks, and the state and control that they get."""

    given_state: TrainerState | None = None
    """What `state` is, in place of the most recent run's."""
    _first_control: Control | None = None
    _handler: TrainerCallbackHandler | None = None

    @property
    def state(self) -> Any:
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
    def state(self, state: Any) -> None:
        if self.session is not None and state is not self.state:
            raise ConfigError(
                "Trainer.state cannot be replaced during a run, whose progress it shows; set its attributes instead."
            )
        self.given_state = state

    @property
    def control(self) -> Any:
        """Accepts requests to the running loop, as a callback's `control`; outside of a run they have no effect."""
        if self.global_state is not None:
            return self.global_state.control
        if self._first_control is None:
            self._first_control = Control()
        return self._first_control

    @control.setter
    def control(self, control: Any) -> None:
        self.control.merge(control)

    @property
    def callback_handler(self) -> TrainerCallbackHandler:
        """Fires events by hand: `trainer.callback_handler.call_event(name, args, state, control)`; lists callbacks."""
        if self._handler is None:
            self._handler = TrainerCallbackHandler(self)
        return self._handler

    def add_callback(self, callback: Any) -> None:
        """Register a callback, or a callback class."""
        self.callback_manager.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback that is this instance, or exactly of this class; returns it, or None.

        Hugging Face's `ProgressCallback`, or with `disable_tqdm` its `PrinterCallback`, stands for the one that prints
        progress here.

        Raises:
            ConfigError: for `DefaultFlowCallback`, since the loop itself decides what is due.
        """
        try:
            return self.callback_manager.remove(callback)
        except ValueError:
            return pop_default(self, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback that is this instance, or exactly of this class; does nothing without a match."""
        self.pop_callback(callback)


def shown_steps(args: Any, max_steps: int) -> dict[str, int]:
    """The intervals that Hugging Face's state has, also where the strategy is not 'steps' and they have no effect."""
    state = TrainerState()
    state.compute_steps(args, max_steps)
    return {name: getattr(state, name) for name in ("logging_steps", "eval_steps", "save_steps")}
