"""The chunks of a model: one for each pipeline stage that a rank holds, one alone without pipelines."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

ModelList = list[nn.Module]
"""The chunks of a model that a rank holds."""

ModelHook = Callable[[ModelList], ModelList | None]
"""Changes the chunks of a model before they are wrapped for data parallelism; None means that it worked in place."""


def ensure_model_list(model: nn.Module | ModelList) -> ModelList:
    """The chunks as a list: a list stays the same object, anything else becomes its only element.

    Args:
        model: one chunk, or a list of chunks.
    """
    return model if isinstance(model, list) else [model]


_ensure_model_list = ensure_model_list
