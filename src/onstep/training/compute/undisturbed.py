"""Runs a model in the middle of training without any effect on the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.checkpoint import RngState
from onstep.models.generation.generate import preserve_modes


@contextmanager
def preserve_state(model: Any) -> Iterator[None]:
    """Switch to evaluation mode without compiled forwards, and restore these and the random generators on exit."""
    modules = list(model.modules()) if hasattr(model, "modules") else []
    # `module.compile()` stores its compiled call here; every new text length would recompile
    compiled = [(one, one._compiled_call_impl) for one in modules if getattr(one, "_compiled_call_impl", None)]
    parameter = next(model.parameters(), None) if modules else None
    generators = RngState("cpu" if parameter is None else parameter.device)
    try:
        with generators.kept(), preserve_modes([model] if modules else []):
            for module in modules:  # not `eval()`, which a module may override to change more than its mode
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
