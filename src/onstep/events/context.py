"""Defines `CallbackContext`, the argument of context-style callbacks; a new one is made each time an event fires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onstep.events.callback_timer import CallbackTimer
from onstep.events.control import Control, Request
from onstep.events.events import BY_NAME
from onstep.events.readable import ReadableField
from onstep.events.run_state import RunState
from onstep.events.views import OptimizerView, RunView, SchedulerView, WorldView
from onstep.record.kinds import Metrics

if TYPE_CHECKING:
    from torch import Tensor, nn

UserState = dict[str, Any]
"""What callbacks share, by names of their own."""

Keywords = dict[str, object]
"""Keyword arguments of Hugging Face-style handlers."""

_WRAPPERS = frozenset({"DistributedDataParallel", "BufferedDataParallel", "DataParallel", "OptimizedModule"})
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrap(model: Any) -> Any:
    """Return the user's module inside data-parallel and compile wrappers."""
    while any(each.__name__ in _WRAPPERS for each in type(model).__mro__):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that compiling or recomputing single layers adds."""
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


@dataclass(eq=False)
class CallbackContext:
    """State of the run at one event; fields that do not apply to the event are None.

    Losses and norms are 0-d tensors on the device; converting one to a float synchronizes. At `on_train_step_end`,
    `grad_norm` is read when it is accessed, so that it is a number too (`onstep.events.readable.Reading`). Modifying
    objects that the context refers to modifies the run, at your own risk; assigning to the context itself has no
    effect.
    """

    state: RunView
    """`GlobalState`: `cfg`, `train_state`, `trainer_state`, `world`."""
    model: list[nn.Module]
    """The model chunks; one unless the model is split into several."""
    user_state: UserState = field(default_factory=dict)
    """Shared by all callbacks of a manager, for the manager's lifetime."""
    optimizer: OptimizerView | None = None
    """The optimizer of the run."""
    scheduler: SchedulerView | None = None
    """The scheduler of the run."""
    loss_dict: dict[str, Tensor] | None = None
    """Losses of the step, reduced over ranks."""
    grad_norm: Tensor | float | None = None
    """Global L2 norm before clipping."""
    skipped_iter: bool | None = None
    """Whether the update of the step was skipped."""
    total_loss_dict: dict[str, Tensor] | None = None
    """Averages of an evaluation or test."""
    event: str = ""
    """Name of the event, in the context convention."""
    control: Control = field(default_factory=Control)
    """Requests a stop, save, evaluation or log."""
    rank: int = 0
    """This rank, from 0."""
    logs: Metrics | None = None
    """The logged values by name, at `on_log`; a callback may add some."""
    metrics: Metrics | None = None
    """The metrics of an evaluation by name, as floats."""
    loss: Tensor | None = None
    """This rank's mean loss of the step, or of the micro-batch; not reduced."""
    tokens: Tensor | float | None = None
    """This rank's number of labels trained on in the step."""
    micro_batch: Any = None
    """The number of the micro-batch in its step, from 0."""
    micro_batches: Sequence[Any] | None = None
    """Micro-batches of the step on this rank."""
    sample_ids: list[list[int]] | None = None
    """Dataset indices of this rank's samples, one list per micro-batch."""
    train_dataloader: Any = None
    """The loader of the training data."""
    eval_dataloader: Any = None
    """The loader of the evaluation data."""
    processing_class: Any = None
    """The tokenizer or processor of a Trainer."""
    trainer: Any = None
    """The Trainer, if one runs the loop."""
    exception: BaseException | None = None
    """The error that ends the run, at `on_exception`."""
    reason: str | None = None
    """Why the run ends, pauses or was saved, in words."""
    checkpoint_step: int | None = None
    """The step of the checkpoint that is saved or loaded."""
    checkpoint_path: str | None = None
    """The directory of the checkpoint that is saved or loaded."""
    request: Request | None = None
    """The decision that was recorded, or the command to carry out."""
    guard: WorldView | None = field(default=None, init=False, repr=False)
    """The world of a run of several ranks, for what rank 0 does alone; None if there is nobody to wait for."""
    callback_timer: CallbackTimer | None = None
    """Measures how long callbacks take, once started."""
    hf_objects: Keywords = field(default_factory=dict, repr=False)
    """Optimizer, scheduler and loaders for Hugging Face-style handlers of events whose context has none."""
    keywords: Keywords | None = field(default=None, init=False, repr=False)
    """`event_keywords()`, cached by the first Hugging Face-style handler for all handlers of the same firing."""

    @property
    def step(self) -> int:
        """Optimizer steps completed: `state.train_state.step`."""
        return self.state.train_state.step

    @property
    def epoch(self) -> float:
        """Epochs completed, including the fraction of the current one: `state.trainer_state.epoch`."""
        return self.state.trainer_state.epoch

    @property
    def args(self) -> Any:
        """The configuration as Hugging Face's `TrainingArguments`."""
        return getattr(self.state, "args", None)

    @property
    def trainer_state(self) -> RunState:
        """The progress as Hugging Face's `TrainerState`."""
        view: RunState = getattr(self.state, "trainer_state", None)  # type: ignore[assignment]
        return view

    @property
    def unwrapped_model(self) -> Any:
        """The user's module; a list if there are several model chunks."""
        chunks = self.model if isinstance(self.model, list) else [self.model]
        return unwrap(chunks[0]) if len(chunks) == 1 else [unwrap(chunk) for chunk in chunks]

    def hf_keywords(self) -> Keywords:
        """Keyword arguments of every Hugging Face-style handler, without those specific to an event."""
        return {
            "args": getattr(self.state, "args", None),
            "state": getattr(self.state, "trainer_state", None),
            "control": self.control,
            "model": self.unwrapped_model,
            "processing_class": self.processing_class,
            "tokenizer": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self.trainer,
            **self.hf_objects,
        }

    def event_keywords(self) -> Keywords:
        """`hf_keywords()` plus the keywords of this event."""
        keywords, given = self.hf_keywords(), self.__dict__
        for name in BY_NAME[self.event].own_fields:
            keywords[name] = given[name] if name in given else getattr(self, name)
        self.keywords = keywords
        return keywords


CallbackContext.grad_norm = ReadableField("grad_norm")  # type: ignore[assignment]
