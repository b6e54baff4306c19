"""Saves an optimizer's state by the names of the parameters, which neither their order nor a layout changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from onstep.checkpoint import ModelState
from onstep.checkpoint.states import NAMES_SHOWN
from onstep.config.suggestions import listed
from onstep.distributed.shards import is_sharded, model_parameter
from onstep.errors import CheckpointError
from onstep.train_state import StateDict
from onstep.training.protocols import UserOptimizer

logger = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The names that wrappers of torch have for the module inside them."""
_OUTER = ("module.", "base_model.model.")
"""What the names of a model that is wrapped for data parallelism or by `peft` begin with."""

_NOT_OF_THE_MODEL = "other_weights"


class OptimizerState:
    """The state of an optimizer with names in place of torch's numbers, in `state` and in the groups' `params`.

    A parameter has the name that the component `model` has for it, without wrappers; one that is not of the model has
    its number among such: `other_weights.0`. The optimizer itself gives and is given numbers. A state of another form
    than torch's, such as that of an optimizer with Megatron-Core's interface, is saved as it is.

    Args:
        optimizer: the optimizer.
        chunks: the model that it trains.
    """

    def __init__(self, optimizer: UserOptimizer, chunks: Sequence[nn.Module]) -> None:
        self._optimizer = optimizer
        self._model = ModelState(chunks)

    def state_dict(self) -> StateDict:
        """The state by name; tensors are not copied."""
        state = self._optimizer.state_dict()
        params = _numbered(self._optimizer, state)
        if params is None:
            return state
        names = self._names(params.values())
        of = {number: names[param] for number, param in params.items()}
        return {
            **state,
            "state": {of.get(number, number): value for number, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [of[number] for number in group["params"]]} for group in state["param_groups"]
            ],
        }

    def destinations(self, outline: StateDict) -> StateDict:
        """The tensors into which a state in shards is read (see `Stateful`), laid out as those of the parameters.

        Raises:
            CheckpointError: if it is of other parameters or groups than the optimizer's, or has a tensor for a sharded
                parameter whose layout does not follow from it.
        """
        own = self._optimizer.state_dict()
        params = _numbered(self._optimizer, own)
        if params is None or not isinstance(outline.get("state"), Mapping):
            return outline
        if is_by_name(outline):
            order = [*outline["state"]]
            numbers = [*self._by_number(outline, params)["state"]]
        else:
            order = numbers = [*outline["state"]]
        found = dict(outline["state"])
        for key, number in zip(order, numbers, strict=True):
            if number in params and isinstance(found[key], Mapping):
                known = own["state"].get(number, {})
                found[key] = {
                    name: _destination(f"{key}.{name}", value, params[number], known.get(name))
                    for name, value in found[key].items()
                }
        return {**outline, "state": found}

    def parameters(self) -> dict[str, Tensor]:
        """The parameters of the optimizer by the names that they have in its state."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        return {name: param for param, name in self._names(params).items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state by name, or an older one by number.

        Raises:
            CheckpointError: if it is of other parameters or groups than the optimizer's.
        """
        params = _numbered(self._optimizer, self._optimizer.state_dict()) if is_by_name(state_dict) else None
        if params is not None:
            state_dict = self._by_number(state_dict, params)
        self._optimizer.load_state_dict(state_dict)

    def _names(self, params: Iterable[Tensor]) -> dict[Tensor, str]:
        """A name for each parameter."""
        of_model: dict[Tensor, str] = {}
        taken: set[str] = set()
        for name, param in self._model.named_parameters():
            if param not in of_model:
                short = without_wrappers(name)
                of_model[param] = name if short in taken else short
                taken.add(of_model[param])
        others = (name for number in count() if (name := f"{_NOT_OF_THE_MODEL}.{number}") not in taken)
        return {param: of_model.get(model_parameter(param)) or next(others) for param in dict.fromkeys(params)}

    def _by_number(self, state_dict: StateDict, params: Mapping[int, Tensor]) -> StateDict:
        """A state by name in the order of the optimizer's groups."""
        numbers = {param: number for number, param in params.items()}
        own = [[numbers[param] for param in group["params"]] for group in self._optimizer.param_groups]
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        number_of = self._numbers_of(saved, own, params)
        there = [[number_of.get(name) for name in group] for group in saved]
        names = self._names(params.values())
        filled = {*number_of.values()}
        lacking = [names[param] for number, param in params.items() if number not in filled]
        saved_names = dict.fromkeys(name for group in saved for name in group)
        unknown = [name for name in saved_names if name not in number_of]
        unknown += [name for name in state_dict["state"] if isinstance(name, str) and name not in saved_names]
        if lacking or unknown or len(number_of) > len(params):
            raise CheckpointError(_of_others(lacking, unknown))
        order = _in_own_order(own, there)
        if order is None:
            sizes, saved_sizes = [len(group) for group in own], [len(group) for group in saved]
            raise CheckpointError(
                f"the optimizer has groups of {sizes} parameters, but its saved state those of {saved_sizes}; resume "
                f"with the saved optimizer.param_groups, with optimizer.decoupled_lr set only if it was, or load "
                f"without the optimizer (checkpoint.load_optim=false)"
            )
        return {
            **state_dict,
            "state": {number_of.get(name, name): value for name, value in state_dict["state"].items()},
            "param_groups": [
                {**state_dict["param_groups"][place], "params": members}
                for place, members in zip(order, own, strict=True)
            ],
        }

    def _numbers_of(self, saved: list[list[str]], own: list[list[int]], params: Mapping[int, Tensor]) -> dict[str, int]:
        """The number of each saved name that is known."""
        numbers = {one: number for number, param in params.items() for one in (param, model_parameter(param))}
        everywhere: dict[str, Tensor] = {name: param for param, name in self._names(params.values()).items()}
        for name, param in self._model.named_parameters():
            for known in (name, without_wrappers(name), _inner(name)):
                everywhere.setdefault(known, param)
        found: dict[str, int] = {}
        for name in (name for group in saved for name in group):
            param_of_name = everywhere.get(name, everywhere.get(_inner(name)))
            if param_of_name is not None and param_of_name in numbers:
                found[name] = numbers[param_of_name]
        if [len(group) for group in saved] == [len(group) for group in own]:
            filled = set(found.values())
            pairs = [pair for names, group in zip(saved, own, strict=True) for pair in zip(names, group, strict=True)]
            renamed = {
                name: number for name, number in pairs if number not in filled and _inner(name) not in everywhere
            }
            if renamed and len(found) + len(renamed) == len(pairs):
                names = listed([*renamed], NAMES_SHOWN)
                logger.warning("the model has renamed %s, whose optimizer state is used by their places", names)
                found |= renamed
        return found


def _destination(where: str, value: Any, param: Tensor, known: Any) -> Any:
    """Where a value of the state of `param` goes: to the optimizer's own tensor, or one laid out as the parameter."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if isinstance(known, Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype):
        return known
    if value.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=value.dtype)
    if is_sharded([param]):
        raise CheckpointError(
            f"{where} in the saved state of the optimizer has the shape {tuple(value.shape)}, but its parameter, which "
            f"is in shards, {tuple(param.shape)}: how it is divided is unknown; load without the optimizer "
            f"(checkpoint.load_optim=false), or use one whose state has the shape of the parameters, such as adamw"
        )
    return value


def is_by_name(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state has the form of `OptimizerState`: groups that list names."""
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state_dict.get("state"), Mapping):
        return False
    members = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    if not all(isinstance(group, list) for group in members):
        return False
    names = [name for group in members for name in group or ()]
    return bool(names) and all(isinstance(name, str) for name in names)


def without_wrappers(name: str) -> str:
    """A parameter's name without the parts that wrappers of modules inside the model add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _inner(name: str) -> str:
    """A parameter's name inside all wrappers."""
    name = without_wrappers(name)
    while outer := next((one for one in _OUTER if name.startswith(one)), ""):
        name = name.removeprefix(outer)
    return name


def _numbered(optimizer: UserOptimizer, state: Mapping[str, Any]) -> dict[int, Tensor] | None:
    """The parameters by their numbers in the optimizer's state; None for a state of another form than torch's."""
    groups, of_state = optimizer.param_groups, state.get("param_groups")
    if not isinstance(of_state, list) or not isinstance(state.get("state"), Mapping) or len(groups) != len(of_state):
        return None
    params: dict[int, Tensor] = {}
    for group, saved in zip(groups, of_state, strict=True):
        numbers = saved.get("params") if isinstance(saved, Mapping) else None
        if not isinstance(numbers, list) or len(numbers) != len(group["params"]):
            return None
        params |= dict(zip(numbers, group["params"], strict=True))
    is_torch = all(type(number) is int and isinstance(param, Tensor) for number, param in params.items())
    return params if is_torch else None


def _in_own_order(own: Sequence[Sequence[int]], there: Sequence[Sequence[int | None]]) -> list[int] | None:
    """For each group the place of the saved one with the same members.

    If there is none for some, but all have the same sizes, groups correspond by place. None if they cannot.
    """
    order: list[int] = []
    for place, members in enumerate(own):
        alike = [one for one, saved in enumerate(there) if one not in order and set(saved) == set(members)]
        if alike:
            order.append(place if place in alike else alike[0])
    if len(order) == len(own) == len(there):
        return order
    has_same_sizes = [len(group) for group in own] == [len(group) for group in there]
    return [*range(len(own))] if has_same_sizes else None


def _of_others(lacking: Sequence[str], unknown: Sequence[str]) -> str:
    """The text of an error for a state that is not of the optimizer's parameters."""
    parts = [f"it has none of {listed(lacking, NAMES_SHOWN)}"] if lacking else []
    parts += [f"it has that of {listed(unknown, NAMES_SHOWN)}, which are not trained now"] if unknown else []
    return (
        f"the saved state of the optimizer is of other parameters: {', and '.join(parts) or 'some are tied now'}; "
        f"resume with the same parameters frozen, or load without the optimizer (checkpoint.load_optim=false)"
    )
