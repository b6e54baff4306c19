"""Divides the parameters of a model into the groups of `optimizer_groups`, and calls factories of optimizers."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from onstep.errors import ConfigError, text_of

logger = logging.getLogger(__name__)

Group = dict[str, Any]
OptimizerGroups = Callable[..., Iterable[Mapping[str, Any]]] | Mapping[str, Any] | Sequence[Any]
"""A function of (name, parameter) pairs that returns parameter groups; patterns of names with their options; or
parameter groups."""

RULE = (
    "optimizer_groups must be {pattern: options}, pairs (pattern, options), parameter groups with 'params', or a "
    "function of (name, parameter) pairs that returns parameter groups"
)


def call_factory(factory: Callable[..., Any], module: nn.Module, groups: list[Group] | None) -> Any:
    """The optimizer of a factory: it is called with the groups, or the trainable parameters.

    A factory whose first argument is called `named_parameters` receives (name, parameter) pairs instead.
    """
    if groups is not None:
        return factory(groups)
    return factory(_named(module) if _wants_names(factory) else [parameter for _, parameter in _named(module)])


def with_factories(
    optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: object, optimizer_factory: Any, lr_scheduler_factory: Any
) -> tuple[Any, Any]:
    """The argument `optimizers` with Forgather's factories in it.

    Raises:
        ConfigError: if an optimizer or a scheduler is given twice; for a factory that is not one.
    """
    made = list(optimizers) if isinstance(optimizers, (tuple, list)) else [None, None]
    for at, (name, factory) in enumerate(
        (("optimizer_factory", optimizer_factory), ("lr_scheduler_factory", lr_scheduler_factory))
    ):
        if factory is None:
            continue
        if not callable(factory):
            raise ConfigError(
                f"{name} must be a function that makes one, got {type(factory).__name__}; pass an object in optimizers"
            )
        other = f"optimizers[{at}]" if at < len(made) and made[at] is not None else None
        if at == 0 and optimizer_cls_and_kwargs is not None:
            other = "optimizer_cls_and_kwargs"
        if other is not None:
            raise ConfigError(f"{name} and {other} both make the same object; pass one of them")
        made[at] = factory
    return optimizers if optimizer_factory is None and lr_scheduler_factory is None else (made[0], made[1])


def groups_of(given: OptimizerGroups, module: nn.Module, weight_decay: float) -> list[Group]:
    """The parameter groups of a model; parameters that no pattern matches are the last group.

    The first pattern that `re.search` finds in a parameter's name decides. A group without a weight decay of its own
    gets `weight_decay`.

    Raises:
        ConfigError: for anything that is not described by `RULE`; for a pattern that is not a regular expression.
    """
    if callable(given):
        try:
            groups = [dict(group) for group in given(_named(module))]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{RULE}; it raised {type(error).__name__}: {text_of(error)}") from error
    elif isinstance(given, Mapping):
        groups = _by_pattern(list(given.items()), module)
    elif all(isinstance(one, Mapping) and "params" in one for one in given):
        groups = [dict(group) for group in given]
    else:
        groups = _by_pattern([_pair(one) for one in given], module)
    if not groups or not all("params" in group for group in groups):
        raise ConfigError(f"{RULE}; got {len(groups)} groups, {sum('params' not in one for one in groups)} without it")
    for group in groups:
        group.setdefault("weight_decay", weight_decay)
    return groups


def check_options(given: OptimizerGroups | None, optimizer: Any) -> None:
    """Refuse (ConfigError) options of patterns that the optimizer does not have, which it would ignore."""
    if given is None or callable(given):
        return
    pairs = list(given.items()) if isinstance(given, Mapping) else [one for one in given if not isinstance(one, dict)]
    known = set(getattr(optimizer, "defaults", {})) | {"name", "lr", "weight_decay"}
    for pattern, options in pairs:
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"optimizer_groups sets {', '.join(unknown)} for {pattern!r}, which {type(optimizer).__name__} does "
                f"not have; it has {', '.join(sorted(known))}"
            )


def _by_pattern(pairs: Sequence[tuple[str, Mapping[str, Any]]], module: nn.Module) -> list[Group]:
    groups: list[Group] = [{"params": [], **options} for _, options in pairs]
    rest: Group = {"params": []}
    try:
        patterns = [re.compile(pattern) for pattern, _ in pairs]
    except re.error as error:
        raise ConfigError(f"optimizer_groups: {error.pattern!r} is not a regular expression: {error}.") from None
    for name, parameter in _named(module):
        found = next((at for at, pattern in enumerate(patterns) if pattern.search(name)), None)
        (rest if found is None else groups[found])["params"].append(parameter)
    unused = [pattern for (pattern, _), group in zip(pairs, groups, strict=True) if not group["params"]]
    if unused:
        logger.warning("optimizer_groups: no trainable parameter is left for %s", ", ".join(map(repr, unused)))
    return [group for group in (*groups, rest) if group["params"]]


def _pair(one: Any) -> tuple[str, Mapping[str, Any]]:
    match one:
        case (str(pattern), options) if isinstance(options, Mapping):
            return pattern, options
    raise ConfigError(f"{RULE}; got {str(one)[:80]!r}")


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _wants_names(factory: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # of some builtins
        return False
    return parameters[:1] == ["named_parameters"]
