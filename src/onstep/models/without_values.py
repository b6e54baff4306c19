"""Builds modules whose parameters have no values, and draws these values later, one tensor at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from onstep.errors import OnstepError

T = TypeVar("T")

_OVERWRITING = frozenset(("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"))
"""Operations in place whose result does not depend on the tensor's values before."""
_OF_SHAPES = frozenset(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")) | frozenset(
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")
)
"""Operations whose result does not depend on the values of the tensor that they are given."""


class CannotRedrawError(OnstepError):
    """The values of a model's parameters depend on each other, so they cannot be drawn one tensor at a time."""


@contextmanager
def without_values(seen: Callable[[nn.Parameter, Tensor], None] | None = None) -> Iterator[None]:
    """Context in which each parameter that a module gets is on the device `meta`; buffers have values.

    Constructors run as always, and a parameter that they share stays shared.

    Args:
        seen: called with each parameter and with the tensor that it would have been.
    """
    thread, known = threading.get_ident(), WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or _is_meta(parameter) or is_lazy(parameter) or threading.get_ident() != thread:
            return None
        if parameter not in known:
            moved = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            known[parameter] = moved
            if seen is not None:
                seen(moved, parameter.detach())
        found: nn.Parameter = known[parameter]
        return found

    hook: Any = move  # torch says that it returns nothing, and uses what it returns
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def redraw(build: Callable[[], T], give: Callable[[int, Tensor], None]) -> T:
    """Draw the values that the parameters of a model have after `build`, holding one of them at a time.

    The model is built `without_values`. What is written to a parameter on `meta` is written to a tensor on the CPU
    instead, with the same numbers from the same generators, until another parameter is written to.

    Args:
        build: builds the model.
        give: called with the number of a parameter, in the order in which `without_values` sees them, and with its
            values; several times for one that is written to again later.

    Returns:
        What `build` returns: its parameters have no values, its buffers have those of the model.

    Raises:
        CannotRedrawError: if a value depends on one that is no longer held.
    """
    drawing = _Drawing(give)
    with without_values(drawing.begin), _Disguise(), drawing:
        built = build()
        drawing.end()
    return built


class _Disguise(TorchFunctionMode):
    """Says of tensors on `meta` that they are on the CPU, since functions of `nn.init` draw nothing for `meta`."""

    _ANSWERS: ClassVar[dict[Any, Any]] = {
        torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]  # a descriptor, whatever the stubs say
        torch.Tensor.device.__get__: torch.device("cpu"),
    }

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._ANSWERS and _is_meta(args[0]):
            return self._ANSWERS[func]
        return func(*args, **(kwargs or {}))


class _Drawing(TorchDispatchMode):
    """Writes to one tensor on the CPU what is written to a parameter on `meta`."""

    def __init__(self, give: Callable[[int, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give = give
        self._numbers: dict[int, int] = {}
        self._parameters: list[nn.Parameter] = []  # kept, so that no other storage gets the address of theirs
        self._held: tuple[int, Tensor] | None = None

    def begin(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Hold a new parameter's values."""
        self.end()
        self._numbers[_storage(parameter)] = number = len(self._parameters)
        self._parameters.append(parameter)
        self._held = number, values

    def end(self) -> None:
        """Give the values that are held."""
        if self._held is not None:
            self._give(*self._held)
        self._held = None

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        given = [one for one in leaves if isinstance(one, Tensor) and _is_meta(one)]
        if not given or any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            return func(*args, **kwargs)  # no parameter, or a view of one
        writes = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
        if any(writes[1:]):
            raise CannotRedrawError(f"{func} writes to more than one tensor, and parameters have no values yet.")
        written = [one for one in args[:1] if writes[0] and _is_meta(one)]
        name = func._schema.name.rpartition("::")[2]
        read = [one for one in given if not written or one is not written[0]]
        if name in _OF_SHAPES:
            real = {id(one): torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) for one in read}
        else:
            real = {id(one): self._real(one, func) for one in read}
        if written:
            overwrites = name in _OVERWRITING and written[0].numel() == self._whole(written[0], func).numel()
            real[id(written[0])] = self._real(written[0], func, overwrites=overwrites)
        result = func(*tree_map(lambda one: real.get(id(one), one), args), **kwargs)
        return written[0] if written else result

    def _whole(self, tensor: Tensor, func: object) -> nn.Parameter:
        number = self._numbers.get(_storage(tensor))
        if number is None:
            raise CannotRedrawError(f"{func} is called with a tensor on the device meta that is not a parameter.")
        return self._parameters[number]

    def _real(self, tensor: Tensor, func: object, *, overwrites: bool = False) -> Tensor:
        """The tensor on the CPU that stands for a parameter, or for a view of one."""
        whole = self._whole(tensor, func)
        number = self._numbers[_storage(tensor)]
        if self._held is None or self._held[0] != number:
            if not overwrites:
                raise CannotRedrawError(f"{func} needs the values that a parameter of {tuple(whole.shape)} had.")
            self.end()
            self._held = number, torch.empty_like(whole, device="cpu")
        held = self._held[1]
        if held.stride() != whole.stride() or tensor.dtype != held.dtype:
            raise CannotRedrawError(f"{func} needs another layout of a parameter of {tuple(whole.shape)}.")
        offset = held.storage_offset() + tensor.storage_offset()
        return held.as_strided(tensor.size(), tensor.stride(), offset)


def _is_meta(tensor: Tensor) -> bool:
    """Whatever a `_Disguise` says."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
