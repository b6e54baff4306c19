"""Looks for weights that are not trained: parameters that the optimizer does not have, and what is not registered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from onstep.distributed.pipeline.seats import is_staged, seat_of
from onstep.distributed.shards import model_parameter
from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.metrics.norms.named_parameters import reshard
from onstep.optim.param_groups import parameters_left_out, trainable_parameters

logger = logging.getLogger(__name__)

_REMEDY = "add them to it, or set requires_grad=False"
_REMEDY_LATER = (
    "have a parameter that is to be trained later in the model, and trainable, when the training starts, and freeze it "
    "in on_train_begin (on several ranks with find_unused_parameters=True), or set requires_grad=False"
)
_MOST_ENTRIES = 10_000
"""Entries of a list, tuple or dict that are searched for weights."""


class LeftOut:
    """The trainable parameters that are in none of the optimizer's groups; `warn()` names them when they change."""

    def __init__(self, model: list[nn.Module]) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._seen: list[int] | None = None
        self._names: list[str] = []
        self._has_copies = False
        """Whether the optimizer had no parameter of the model at the start: it updates copies."""

    def warn(self, groups: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Warn, on rank 0, of parameters that are new among them: they keep their values. Every rank calls it.

        Looks for them only if modules, parameters, `requires_grad` or groups have changed since the last call.
        """
        if self._has_copies or self._state(groups) == self._seen:
            return
        reshard(self._model)
        names, before, is_start = parameters_left_out(self._model, groups), self._names, self._seen is None
        self._has_copies = is_start and len(names) == len(trainable_parameters(self._model))
        self._modules = [module for chunk in self._model for module in chunk.modules()]
        self._seen, self._names = self._state(groups), names
        if is_main and not self._has_copies and not set(names) <= set(before):
            logger.warning(
                "%d trainable parameters are not in the optimizer and are not trained: %s; %s",
                len(names),
                first_of(names),
                _REMEDY if is_start else _REMEDY_LATER,
            )

    def _state(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Changes with the set of trainable parameters, without a walk through the tree of modules."""
        state = []
        for group in groups:
            state.append(len(group["params"]))
        for module in self._modules:
            state.extend(map(id, module._modules.values()))
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    state.append(id(parameter))
        return state


def warn_of_hidden_weights(model: list[nn.Module], *, is_main: bool) -> None:
    """Warn, on rank 0, of trainable weights that are attributes of a module, which does not know them."""
    names = _hidden_weights(model) if is_main else []
    if names:
        logger.warning(
            "%s: these attributes hold weights that are not registered, since they are plain lists, tuples or dicts, "
            "or tensors that are not parameters: they are neither trained, saved nor moved to the device; use "
            "nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter, or set requires_grad=False if that is "
            "meant",
            first_of(names),
        )


def _hidden_weights(model: list[nn.Module]) -> list[str]:
    known = {id(parameter) for chunk in model for parameter in chunk.parameters()}

    def is_hidden(value: object, levels: int = 3) -> bool:
        if isinstance(value, Tensor):
            return value.requires_grad and value.is_leaf and id(value) not in known
        if isinstance(value, nn.Module):
            return any(map(is_hidden, value.parameters()))
        entries: Iterable[object] = value.values() if isinstance(value, dict) else ()
        if isinstance(value, (list, tuple)):
            entries = value
        return levels > 0 and any(is_hidden(entry, levels - 1) for entry in islice(entries, _MOST_ENTRIES))

    return [
        f"{path}.{name}".lstrip(".")
        for chunk in model
        for path, module in chunk.named_modules()
        for name, value in vars(module).items()
        if not isinstance(value, nn.Module) and is_hidden(value)
    ]


def check_stages(model: Sequence[nn.Module]) -> None:
    """Refuse (ConfigError) the stages of a pipeline that are frozen on this rank: each has an optimizer.

    Args:
        model: the chunks of this rank.
    """
    if is_staged(model) and not any(one.requires_grad for chunk in model for one in chunk.parameters()):
        layers = [str(index) for chunk in model for index in getattr(seat_of(chunk), "layers", ())]
        raise ConfigError(
            f"all parameters of this rank of a pipeline, those of layers {', '.join(layers)}, are frozen, but each "
            f"rank must train some; unfreeze one, or move trained layers here by "
            f"parallel.pipeline_model_parallel_layout."
        )


def check_trains(groups: Sequence[Mapping[str, Any]], model: list[nn.Module]) -> None:
    """Check that an optimizer with these groups has a parameter of the model.

    Raises:
        ConfigError: if it has none.
    """
    reshard(model)
    own = {id(parameter) for chunk in model for parameter in chunk.parameters()}
    if own.isdisjoint(id(model_parameter(one)) for group in groups for one in group["params"]):
        name = type(unwrap(model[0])).__name__
        raise ConfigError(
            f"the optimizer has no parameter of {name}, so it would train nothing; build it from the parameters of the "
            f"model that is trained; a Trainer accepts a factory: optimizers=(lambda parameters: ..., None)"
        )


def first_of(names: list[str]) -> str:
    """The first three names, as a list in a sentence."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
