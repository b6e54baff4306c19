"""What a callback is handed: a fresh context for each firing of an event, with everything that has a meaning there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onstep.events.callback_timer import CallbackClock
from onstep.events.control import Control
from onstep.events.events import BY_NAME
from onstep.events.trainer_state import TrainerState
from onstep.events.views import OptimizerView, RunView, SchedulerView

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "OptimizedModule"})


def unwrap(model: Any) -> Any:
    """The user's module inside data-parallel and compile wrappers."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, "_orig_mod", None) or model.module
    return model


@dataclass(eq=False)
class CallbackContext:
    """State of the run at one event; a field without meaning there is None.

    Losses and norms are 0-d tensors on the device: who wants a float pays for the read. Changing the objects that the
    context refers to changes the run, at your own risk; changing the context itself changes nothing.
    """

    state: RunView
    """`GlobalState`: `cfg`, `train_state`, `trainer_state`, `world`."""
    model: list[nn.Module]
    """List of model chunks."""
    user_state: dict[str, Any] = field(default_factory=dict)
    """Shared by all callbacks of one manager, for the life of the manager."""
    optimizer: OptimizerView | None = None
    scheduler: SchedulerView | None = None
    loss_dict: dict[str, Tensor] | None = None
    """Reduced losses of the step."""
    grad_norm: Tensor | float | None = None
    """Global L2 norm before clipping."""
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Tensor] | None = None
    """Averages of an evaluation or test."""
    event: str = ""
    """Name of the event, context convention."""
    control: Control = field(default_factory=Control)
    """Where to ask for a stop, save, evaluation or log."""
    rank: int = 0
    logs: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    loss: Tensor | None = None
    """This rank's mean loss of the step, or of the micro-batch; not reduced."""
    tokens: Tensor | float | None = None
    """This rank's number of labels trained on in the step."""
    micro_batch: Any = None
    micro_batches: Sequence[Any] | None = None
    sample_ids: list[list[int]] | None = None
    """Dataset indices of this rank's samples, a list for each micro-batch."""
    train_dataloader: Any = None
    eval_dataloader: Any = None
    processing_class: Any = None
    trainer: Any = None
    exception: BaseException | None = None
    reason: str | None = None
    checkpoint_step: int | None = None
    checkpoint_path: str | None = None
    callback_clock: CallbackClock | None = None
    """Measures how long callbacks take, once it is started."""
    hf_objects: dict[str, Any] = field(default_factory=dict, repr=False)
    """Optimizer, scheduler and loaders for Hugging Face-style handlers at events where the context has none."""
    keywords: dict[str, Any] | None = field(default=None, init=False, repr=False)
    """`event_keywords()` once the first Hugging Face-style handler was called; all of one firing share it."""

    @property
    def step(self) -> int:
        """Optimizer steps completed: `state.train_state.step`."""
        return self.state.train_state.step

    @property
    def epoch(self) -> float:
        """Passes over the training data, with the fraction of the current one: `state.trainer_state.epoch`."""
        return self.state.trainer_state.epoch

    @property
    def args(self) -> Any:
        """Hugging Face's `TrainingArguments` view of the configuration."""
        return getattr(self.state, "args", None)

    @property
    def trainer_state(self) -> TrainerState:
        """Hugging Face's `TrainerState` view of the progress."""
        view: TrainerState = getattr(self.state, "trainer_state", None)  # type: ignore[assignment]
        return view

    @property
    def unwrapped_model(self) -> Any:
        """The user's module; the list of chunks where there are several."""
        chunks = self.model if isinstance(self.model, list) else [self.model]
        return unwrap(chunks[0]) if len(chunks) == 1 else [unwrap(chunk) for chunk in chunks]

    def hf_keywords(self) -> dict[str, Any]:
        """What every Hugging Face-style handler is called with; event-specific keywords come on top."""
        return {
            "args": getattr(self.state, "args", None),
            "state": getattr(self.state, "trainer_state", None),
            "control": self.control,
            "model": self.unwrapped_model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self.trainer,
            **self.hf_objects,
        }

    def event_keywords(self) -> dict[str, Any]:
        """`hf_keywords()` and those of this event."""
        keywords = self.hf_keywords()
        for name in BY_NAME[self.event].own_fields:
            keywords[name] = getattr(self, name)
        self.keywords = keywords
        return keywords
