"""Opens the checkpoints of a run, with the configured rules for what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onstep.events import Dispatcher
from onstep.training.checkpointing.writing import RunCheckpoints
from onstep.training.protocols import Trained
from onstep.training.run import Run
from onstep.training.runs.claims import Claim


def open_checkpoints(state: Run, notify: Dispatcher, claim: Claim | None) -> RunCheckpoints | None:
    """The checkpoints of a run, in `checkpoint.save` or the run's directory; None for a run with neither."""
    if state.cfg.checkpoint.save is not None:
        return RunCheckpoints(state, notify, Path(state.cfg.checkpoint.save), claim)
    return None if state.run_dir is None else RunCheckpoints(state, notify, state.run_dir.checkpoints, claim)


@contextmanager
def own_checkpoints(state: Run, notify: Dispatcher, trained: Trained) -> Iterator[None]:
    """The checkpoints of a standalone `train()` call, if `checkpoint.save` names a directory. Collective."""
    if state.checkpoints is not None or state.cfg.checkpoint.save is None:
        yield
        return
    state.checkpoints = checkpoints = RunCheckpoints(state, notify, Path(state.cfg.checkpoint.save))
    try:
        checkpoints.find()
        checkpoints.load_progress(trained)
        yield
        checkpoints.end()
    finally:
        checkpoints.close()
        state.checkpoints = None
