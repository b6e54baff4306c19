"""The components of a run's checkpoints: which states there are, and on which ranks each of them differs."""

from __future__ import annotations

from torch import nn

from onstep.checkpoint import ModelState, RngState, SharingPattern, StateComponent, check_encodable
from onstep.training.callback_states import CallbackStates
from onstep.training.run import Run
from onstep.training.saved_parts import (
    DataPosition,
    LoopParts,
    RunProgress,
    SchedulerPosition,
    check_has_state,
    is_stateful,
)
from onstep.training.seams import UserOptimizer, UserScheduler
from onstep.training.telling import Teller

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""

_OF_TRAINER = ("loop", "rank")
"""What belongs to `trainer`: what the loop remembers between steps, alike on all ranks and on each."""


class RunComponents:
    """Makes the components of a run, for saving and for loading."""

    def __init__(self, state: Run, tell: Teller) -> None:
        self.state = state
        self.tell = tell
        self.callbacks = CallbackStates(tell.manager)
        self.rng = RngState(state.world.device)
        self.is_chosen_start = False
        """The start was asked for, so `load_optim` and `load_rng` say how much of it is taken."""

    def progress(
        self,
        model: list[nn.Module],
        optimizer: UserOptimizer | None,
        scheduler: UserScheduler | None,
        loads: bool = False,
    ) -> list[StateComponent]:
        """What is loaded before data is opened."""
        config, replicated = self.state.cfg.checkpoint, SharingPattern.REPLICATED
        compared, selected = config.validate_replication, config.components is None
        parts = [
            StateComponent("model", ModelState(model), replicated, required=selected, validate_replication=compared)
        ]
        if optimizer is not None and ((config.load_optim or not self.is_chosen_start) if loads else config.save_optim):
            parts.append(
                StateComponent("optimizer", optimizer, replicated, required=selected, validate_replication=compared)
            )
            if scheduler is not None:
                parts.append(self.scheduler(scheduler))
        parts.append(StateComponent("trainer", RunProgress(self.state), replicated, required=selected))
        parts.append(StateComponent("callbacks", self.callbacks, SharingPattern.PER_RANK, required=False))
        return [*parts, *self._of_the_user()]

    def position(self, data: DataPosition | None, loads: bool = False) -> list[StateComponent]:
        """What is loaded right before the first step; `data` is None where the data stays where it is."""
        state, config, per_rank = self.state, self.state.cfg.checkpoint, SharingPattern.PER_RANK
        parts = [
            StateComponent(
                "loop", LoopParts(state.features.states(per_rank=False)), SharingPattern.REPLICATED, required=False
            )
        ]
        if data is not None:
            parts.append(StateComponent("dataset", data, per_rank, required=False))
        own = state.features.states(per_rank=True)
        if own:
            parts.append(StateComponent("rank", LoopParts(own), per_rank, required=False))
        if (config.load_rng or not self.is_chosen_start) if loads else config.save_rng:
            parts.append(StateComponent("rng", self.rng, per_rank, required=False))
        return parts

    def selected(self, components: list[StateComponent]) -> list[StateComponent]:
        """Those that `checkpoint.components` asks for; what the user brings is always among them."""
        wanted = self.state.cfg.checkpoint.components
        if wanted is None:
            return components
        keep = {*wanted, *(_OF_TRAINER if "trainer" in wanted else ())}
        return [one for one in components if one.key in keep or one.key not in (*COMPONENTS, *_OF_TRAINER)]

    def scheduler(self, scheduler: UserScheduler) -> StateComponent:
        """Where the schedule stands."""
        return StateComponent("scheduler", SchedulerPosition(scheduler), SharingPattern.REPLICATED, required=False)

    def check_states(self, optimizer: UserOptimizer | None, scheduler: UserScheduler) -> None:
        """Refuse states that no checkpoint can hold, before anything is trained.

        Raises:
            CheckpointError: naming the optimizer, callback or value, and the way out.
        """
        config = self.state.cfg.checkpoint
        if config.save_optim and optimizer is not None:
            check_has_state("optimizer", optimizer, "give it both, or set checkpoint.save_optim=false")
        if config.components is None or "callbacks" in config.components:
            check_encodable(self.callbacks.state_dict(), "callbacks")
        if scheduler is not None and config.save_optim:
            check_encodable(SchedulerPosition(scheduler).state_dict(), "scheduler")

    def _of_the_user(self) -> list[StateComponent]:
        """What the user's objects bring: a forward step with a state, and the `state_components()` of callbacks."""
        forward_step = self.state.door.forward_step_func
        parts = []
        if is_stateful(forward_step):
            parts.append(StateComponent("forward_step", forward_step, SharingPattern.PER_RANK, required=False))
        for callback in self.tell.manager.callbacks if self.tell.manager is not None else []:
            of_callback = getattr(callback, "state_components", None)
            parts += of_callback() if callable(of_callback) else []
        return parts
