"""Finds parameters that a forward pass uses before the module that waits for their gathers is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onstep.distributed.gathers import outer_modules, waiting_modules

_METADATA = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "data_ptr",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_shared",
        "is_inference",
        "get_device",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "type",
        "__get__",
        "__set__",
        "__hash__",
        "__len__",
        "__repr__",
    ]
)
"""Functions that read no element of a tensor."""
_VALUES = (Tensor.data.__get__, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
"""Attributes that do."""


@contextmanager
def watched(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Add to `names`, in this context, the parameters that are used too early.

    A module waits for its own parameters, and for those of modules inside it that are never called. So a parameter must
    not be used before its module is called, or the next module around it that is called at all.

    Args:
        model: the model.
        names: in which the names of the parameters are put at the end.
    """
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module), prepend=True)
        for module in model.modules()
    ]
    watch = _Watch({id(one): name for name, one in model.named_parameters()}, called)
    try:
        with watch:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    outer = outer_modules(model)
    for name, before in watch.used.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if waiting_modules(owner, outer, called)[-1] not in before:
            names.append(name)


class _Watch(TorchFunctionMode):
    """Notes the first use of each parameter, and what had been called by then."""

    def __init__(self, names: Mapping[int, str], called: set[nn.Module]) -> None:
        super().__init__()
        self._names, self._called = names, called
        self.used: dict[str, set[nn.Module]] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _METADATA or func in _VALUES:
            for one in _tensors((args, kwargs or {})):
                known = self._names.get(id(one))
                if known is not None and known not in self.used:
                    self.used[known] = set(self._called)
        return func(*args, **(kwargs or {}))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
