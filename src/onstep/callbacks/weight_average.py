"""Averages the weights over the steps: `EMA` exponentially, `WeightAverage` with equal weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from onstep.checkpoint import SharingPattern, StateComponent
from onstep.config import TrainingArguments
from onstep.config.field_types import is_integer_from, is_number
from onstep.distributed.pipeline.elsewhere import destinations_here, of_all_stages
from onstep.distributed.pipeline.whole import pipeline_of
from onstep.distributed.shards import held_part, is_in_shards
from onstep.errors import require, warn_once
from onstep.events import Control, RunState, TrainerCallback
from onstep.events.context import plain_name
from onstep.metrics.norms.named_parameters import Model, chunks_of, named_parameters, reshard
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)

_EVALUATED: WeakKeyDictionary[nn.Module, _Averages] = WeakKeyDictionary()
"""The models whose weights are averages now, and whose."""

Update = Callable[[list[Tensor], list[Tensor], int], None]
"""torch's update of averages: (averages, weights, number of weights averaged so far)."""


class _Averaging(TrainerCallback):
    """What both callbacks share: the averages, and when they replace the weights."""

    def __init__(self, start_step: int, every: int, evaluate: bool, apply_at_end: bool) -> None:
        is_step = is_integer_from(start_step, 0)
        require(is_step, "start_step", "an integer >= 0", start_step, "; 0 averages from the first step on.")
        require(is_integer_from(every, 1), "every", "an integer >= 1", every, "; 1 averages every step.")
        self.start_step, self.every = start_step, every
        self.evaluate, self.apply_at_end = evaluate, apply_at_end
        self._averages = _Averages()

    def _update(self) -> Update:
        """The way in which weights enter the averages."""
        raise NotImplementedError

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averaged weights by name; empty until the first step that counts."""
        return self._averages.by_name

    @property
    def num_averaged(self) -> int:
        """Number of steps whose weights are averaged."""
        return self._averages.count

    @property
    def needs_onstep(self) -> str | None:  # type: ignore[override]
        """Elsewhere, no event precedes an evaluation."""
        why = "it calls no callback before an evaluation, which would use the weights; with evaluate=False it works"
        return why if self.evaluate else None

    def state_components(self, model: nn.Module) -> list[StateComponent]:
        """The averages, which every checkpoint holds once for all ranks; those of a model in shards are in shards."""
        key = f"average_{type(self).__name__.lower()}"
        is_sharded = pipeline_of(model) is not None or is_in_shards(model)
        pattern = SharingPattern.SHARDED if is_sharded else SharingPattern.REPLICATED
        return [StateComponent(key, _AveragesOf(model, self._averages), pattern, required=False)]

    def on_train_begin(
        self, args: TrainingArguments, state: RunState, control: Control, model: object = None, **kwargs: object
    ) -> None:
        """Begin with new averages, unless the run is resumed."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[misc]
        if state.global_step == 0 and not self._averages.is_loaded:
            self._averages.clear()
        self._averages.is_loaded, self._averages.is_training = False, True

    def on_step_end(self, args: object, state: RunState, control: object, model: Model, **kwargs: object) -> None:
        """Add the weights to the averages."""
        self._averages.put_back(model)
        if state.global_step > self.start_step and (state.global_step - self.start_step) % self.every == 0:
            self._averages.add(model, self._update())

    def on_eval_start(self, args: object, state: object, control: object, model: Model, **kwargs: object) -> None:
        """Put the averages in place of the weights."""
        if self.evaluate:
            self._averages.put_in(model)

    def on_evaluate(self, args: object, state: object, control: object, model: Model, **kwargs: object) -> None:
        """Put the weights back."""
        self._averages.put_back(model)

    def on_save_begin(self, args: object, state: object, control: object, model: Model, **kwargs: object) -> None:
        """Put the weights back after an evaluation that was interrupted: a checkpoint holds both."""
        self._averages.put_back(model)

    def on_exception(self, args: object, state: object, control: object, model: Model, **kwargs: object) -> None:
        """Likewise after an evaluation that failed."""
        self._averages.put_back(model)

    def on_train_end(self, args: object, state: object, control: object, model: Model, **kwargs: object) -> None:
        """Give the model the averages, once the last checkpoint is saved."""
        is_training, self._averages.is_training = self._averages.is_training, False
        if is_training:
            self._averages.put_back(model)
        if is_training and self.apply_at_end:
            self._averages.give_to(model)


class EMA(_Averaging):
    """Keeps an exponential moving average of the weights: after each step, ``decay * average + (1 - decay) * weight``.

    The average begins with the weights of the first step that counts. Evaluations during training use it, and the model
    has it when training ends, so that the exported weights are averaged ones. Checkpoints hold the weights and the
    average, so a resumed run continues both exactly. Buffers, such as the statistics of batch norms, are not averaged.

    Args:
        decay: Weight of the past, in [0, 1); the average spans about ``1 / (1 - decay)`` steps.
        start_step: The first steps that are not averaged.
        every: Average the weights of each n-th step only.
        evaluate: Whether evaluations use the average.
        apply_at_end: Whether the model gets the average when training ends.

    Raises:
        ConfigError: for an invalid value.

    Source: Tarvainen and Valpola 2017, "Mean teachers are better role models", section 2.
    """

    def __init__(
        self,
        decay: float = 0.999,
        start_step: int = 0,
        every: int = 1,
        *,
        evaluate: bool = True,
        apply_at_end: bool = True,
    ) -> None:
        super().__init__(start_step, every, evaluate, apply_at_end)
        is_share = is_number(decay) and 0 <= decay < 1
        require(is_share, "decay", "in [0, 1)", decay, "; 0.999 averages about 1,000 steps.")
        self.decay = decay

    def _update(self) -> Update:
        update: Update = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return update


class WeightAverage(_Averaging):
    """Keeps the mean of the weights of all steps from `start_step` on: stochastic weight averaging.

    Everything else is as with `EMA`. Usually the mean begins in the last quarter of a run, with a learning rate that
    stays high; steps in a row are much alike, so that `every` saves time.

    Args:
        start_step: The first steps that are not averaged.
        every: Average the weights of each n-th step only.
        evaluate: Whether evaluations use the average.
        apply_at_end: Whether the model gets the average when training ends.

    Raises:
        ConfigError: for an invalid value.

    Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization".
    """

    def __init__(
        self, start_step: int = 0, every: int = 1, *, evaluate: bool = True, apply_at_end: bool = True
    ) -> None:
        super().__init__(start_step, every, evaluate, apply_at_end)

    def _update(self) -> Update:
        update: Update = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        return update


class _Averages:
    """The averages of a model's trainable weights, and the weights that they replace during an evaluation."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.count = 0
        self.is_loaded = False
        """Whether a checkpoint has set them since the last start of a training."""
        self.is_training = False
        self._weights: list[Tensor] = []
        """Copies of the weights while the averages are in their place."""

    def clear(self) -> None:
        """Forget everything."""
        self.by_name, self.count, self._weights = {}, 0, []

    @torch.no_grad()
    def add(self, model: Model, update: Update) -> None:
        """Average the current weights in."""
        weights = _trainable(model)
        if not self.by_name:
            self.by_name = {name: weight.detach().clone() for name, weight in weights.items()}
        else:
            averages = self._of(weights)
            for dtype in {weight.dtype for weight in weights.values()}:
                pairs = [(a, w) for a, w in zip(averages, _held(weights), strict=True) if w.dtype == dtype]
                update([a for a, _ in pairs], [w for _, w in pairs], self.count)
        self.count += 1

    @torch.no_grad()
    def put_in(self, model: Model) -> None:
        """Put the averages in place of the weights, which are kept; not those of two callbacks at once."""
        if not self.by_name or self._weights:
            return
        if _EVALUATED.setdefault(chunks_of(model)[0], self) is not self:
            warn_once(
                logger, "two callbacks average the weights: evaluations use the first; pass evaluate=False to the other"
            )
            return
        weights = _trainable(model)
        self._weights = [weight.clone() for weight in _held(weights)]
        torch._foreach_copy_(_held(weights), self._of(weights))

    @torch.no_grad()
    def put_back(self, model: Model) -> None:
        """Put the kept weights back, if any."""
        if self._weights:
            torch._foreach_copy_(_held(_trainable(model)), self._weights)
            self._weights = []
            _EVALUATED.pop(chunks_of(model)[0], None)

    @torch.no_grad()
    def give_to(self, model: Model) -> None:
        """Copy the averages into the weights."""
        if self.by_name:
            weights = _trainable(model)
            torch._foreach_copy_(_held(weights), self._of(weights))

    def set_to(self, by_name: Mapping[str, Tensor], count: int) -> None:
        """Continue with these, which a checkpoint has."""
        self.by_name, self.count = dict(by_name), count
        self._weights, self.is_loaded = [], True

    def _of(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """What this rank holds of the averages, in the order of the weights, and on their devices."""
        for name, weight in weights.items():
            if self.by_name[name].device != weight.device:
                self.by_name[name] = self.by_name[name].to(weight.device)
        return [held_part(self.by_name[name]) for name in weights]


class _AveragesOf:
    """The state of a model's averages in a checkpoint: by the names of its weights, without those of wrappers.

    Args:
        model: the model, whose layout the averages have.
        averages: what is saved and loaded.
    """

    def __init__(self, model: nn.Module, averages: _Averages) -> None:
        self._pipeline = pipeline_of(model)
        self._weights = named_parameters(model if self._pipeline is None else self._pipeline.chunks)
        self._averages = averages

    def state_dict(self) -> StateDict:
        """The averages by name, and their count. Collective in a pipeline."""
        averages = dict(self._averages.by_name)
        if self._pipeline is not None:
            averages = of_all_stages(averages, self._pipeline.world)
        return {"averages": averages, "count": self._averages.count}

    def destinations(self, outline: StateDict) -> StateDict:
        """New tensors for the averages, laid out as the weights: a rank reads the part that it holds."""
        stored = {plain_name(name): average for name, average in outline["averages"].items()}
        found = {
            name: torch.empty_like(weight.detach(), dtype=stored[name].dtype)
            for name, weight in self._weights.items()
            if name in stored
        }
        if self._pipeline is None:
            return {**outline, "averages": stored | found}
        return {**outline, "averages": destinations_here(found, stored, self._pipeline.world)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with these."""
        found = {plain_name(name): average for name, average in state_dict["averages"].items()}
        if self._pipeline is not None:
            found = {name: average for name, average in found.items() if name in self._weights}
        self._averages.set_to(found, int(state_dict["count"]))


def _held(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """What this rank holds of the weights."""
    return [held_part(weight) for weight in weights.values()]


def _trainable(model: Model) -> dict[str, Tensor]:
    reshard(model)  # an evaluation leaves what it has gathered
    return {name: weight for name, weight in named_parameters(model).items() if weight.requires_grad}
