"""Python's garbage collection in step on all ranks."""

from __future__ import annotations

import gc

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


def collect_garbage(state: GlobalState) -> None:
    """Collect at the configured interval, where garbage collection is manual."""
    config = state.cfg.train
    if config.manual_gc and config.manual_gc_interval and state.train_state.step % config.manual_gc_interval == 0:
        gc.collect()
