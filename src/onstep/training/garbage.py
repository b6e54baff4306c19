"""Python's garbage collection in step on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from onstep.training.state import GlobalState


class manual_gc:  # noqa: N801 - reads as a statement in `with`
    """Switch automatic garbage collection off for the run, where `train.manual_gc` says so, and on again after it."""

    def __init__(self, state: GlobalState) -> None:
        self._manual = state.cfg.train.manual_gc
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> None:
        if self._manual:
            gc.disable()
            gc.collect()

    def __exit__(self, *exception: object) -> None:
        if self._manual and self._was_enabled:
            gc.enable()


@contextmanager
def garbage_collected(state: GlobalState) -> Iterator[None]:
    """Collect before an evaluation, and its youngest objects after it, with `train.manual_gc` and `manual_gc_eval`."""
    collects = state.cfg.train.manual_gc and state.cfg.train.manual_gc_eval
    if collects:
        gc.collect()
    yield
    if collects:
        gc.collect(generation=0)
