"""Lets the copies of an asynchronous save run beside the next step's forward and backward pass on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from onstep.checkpoint import SaveRequest
from onstep.events import Request
from onstep.optim import TrainingOptimizer
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.stages.job import Job

_MEANWHILE = (
    "on_checkpoint_save",
    "on_epoch_end",
    "on_epoch_start",
    "on_step_begin",
    "on_train_step_start",
    "on_forward_backward_start",
    "on_forward_backward_end",
    "on_substep_end",
)
"""Events between a save and the next update."""

_OWN = "onstep.", "transformers."
"""Packages whose callbacks change no weights in these events, unless they say so."""


class SaveCopies(Feature[Job]):
    """Marks weights and optimizer state as steady until the next update, which waits on the device for the copies.

    Whatever else may change them waits too: evaluations, replays, rollbacks and the end. If a user's callback listens
    to an event before the update, nothing is steady, unless its `changes_weights` is False. A forward pass that changes
    a weight in place fails the save, since its copy may be torn.
    """

    name = "save_copies"
    when = "checkpoint.async_save with checkpoint.copy_beside_step, on a GPU"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether it is configured; whether the device has such copies is known when the run saves."""
        options = host.run.cfg.checkpoint
        return bool(options.async_save and options.copy_beside_step)

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._versions: list[tuple[str, Tensor, int]] = []
        self._has_next_update = False

    def begin(self) -> None:
        """From now on, an update follows a save."""
        self._has_next_update = True

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._leave()

    def add_to_checkpoint(self, request: SaveRequest) -> None:
        """Say what is steady."""
        job, checkpoints = self.host, self.host.run.checkpoints
        is_possible = checkpoints is not None and checkpoints.manager.copies_beside(job.run.world.device)
        if not self._has_next_update or not is_possible or not isinstance(job.optimizer, TrainingOptimizer):
            return
        if any(_may_change_weights(one.owner) for event in _MEANWHILE for one in getattr(job.notify.on, event)):
            return
        named = [one for chunk in job.model for one in chunk.named_parameters()]
        states = [value for state in job.optimizer.state.values() for value in state.values()]
        request.steady = [*(one for _, one in named), *(one for one in states if isinstance(one, Tensor))]
        self._versions = [(name, one, one._version) for name, one in named]

    def before_update(self, step: Step) -> None:
        """The update waits for the copies; a weight that was changed before it has failed the save."""
        versions, checkpoints = self._versions, self.host.run.checkpoints
        self._hold_back()
        changed = next((name for name, one, version in versions if one._version != version), None)
        if changed is not None and checkpoints is not None:
            self._has_next_update = False
            checkpoints.manager.spoil(
                f"{changed} was changed before the update while it was copied, so the copy may be of no single step: "
                f"the forward pass changes weights in place; set checkpoint.copy_beside_step=false"
            )

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """What is done outside of a step may change weights, except a save; to finalize one, the host itself waits."""
        if work not in ("save", "write"):
            self._hold_back(is_checked=work == "finalize")
        return nullcontext()

    def before_rollback(self, bad_step: int, request: Request) -> None:
        self._hold_back()

    def concluding(self) -> None:
        """Later saves are followed by callbacks that may change weights."""
        self._leave()

    def failing(self, error: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        self._has_next_update = False
        self._hold_back()

    def _hold_back(self, is_checked: bool = False) -> None:
        """Wait for the copies on the device; `is_checked` if weights stay as they are until the next update."""
        if self.host.run.checkpoints is not None:
            self.host.run.checkpoints.manager.hold_back()
        if not is_checked:
            self._versions = []


def _may_change_weights(owner: object) -> bool:
    stated = getattr(owner, "changes_weights", None)
    module = getattr(owner, "__module__", "") if callable(owner) else type(owner).__module__
    return bool(stated) if stated is not None else not f"{module}".startswith(_OWN)
