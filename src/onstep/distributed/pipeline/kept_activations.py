"""Finds forward hooks that keep activations of a stage of a pipeline for a loss, which is computed on another stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onstep.distributed.pipeline.seats import Seat

_KNOWN = ("onstep", "torch", "transformers", "accelerate", "peft")
"""Packages whose hooks keep nothing for a loss."""


@contextmanager
def refusing_kept_activations(chunk: nn.Module, seat: Seat) -> Iterator[None]:
    """Context of a forward pass in which a user's hook that keeps an activation with its graph raises OtherStageError.

    A hook that returns something is a part of the model, and may.

    Args:
        chunk: a stage.
        seat: which one it is.
    """
    changed: list[tuple[dict[int, Any], int, Any]] = []
    for name, module in chunk.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if getattr(hook, "__module__", type(hook).__module__).partition(".")[0] not in _KNOWN:
                    changed.append((hooks, key, hook))
                    hooks[key] = partial(_call, hook, partial(seat.keeps, name))
    try:
        yield
    finally:
        for hooks, key, hook in changed:
            if key in hooks:  # it may have removed itself
                hooks[key] = hook


class _Mark:
    """Lives as long as the node of a graph does."""


def _call(hook: Callable[..., Any], error: Callable[[], Exception], module: nn.Module, *given: Any) -> Any:
    marks: list[ref[_Mark]] = []
    versions: list[tuple[Tensor, int]] = []

    def marked(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        view, mark = value.view_as(value), _Mark()
        node: Any = view.grad_fn
        node.metadata["onstep"] = mark
        marks.append(ref(mark))
        versions.append((value, value._version))
        return view

    result = hook(module, *tree_map(marked, given))
    takes_part = result is not None or any(value._version != version for value, version in versions)
    if not takes_part and any(mark() is not None for mark in marks):
        raise error()
    return result
