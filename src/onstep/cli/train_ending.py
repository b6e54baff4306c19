"""The end of `onstep train` and `onstep finetune`: the loss plot, the files of the run, and what to try next."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from onstep.cli.first_checks import is_main
from onstep.cli.runs import near
from onstep.errors import DataError

if TYPE_CHECKING:
    from onstep.training import GlobalState
    from onstep.training.runs.run_dir import RunDir

logger = logging.getLogger(__name__)


def say_where(state: GlobalState) -> None:
    """Plot the loss and list the files of the run; a quiet run's end is one line, which it has printed."""
    directory = state.run_dir
    assert directory is not None
    is_drawn = _is_drawn(directory)
    if state.cfg.logger.console == "quiet":
        return
    files = {
        "run": directory.run_json,
        "metrics log": directory.metrics_log,
        "weights": directory.model,
        "adapter": directory.adapter,
    }
    if is_drawn:
        files["loss plot"] = directory.plot
    print(f"\nFinished at step {state.train_state.step}. Files in {near(directory.path)}:")
    for what, path in files.items():
        if path.exists():
            print(f"  {what:<11} {near(path)}")


def suggest(state: GlobalState) -> None:
    """Name what to do with the weights of a run."""
    directory = state.run_dir
    if directory is None or state.train_state.step == 0 or state.cfg.logger.console == "quiet":
        return
    if directory.model.exists() and is_main():
        print(f"Try it: {try_it(near(directory.path), state.cfg.dataset.kind)}")


def try_it(path: Path, kind: str) -> str:
    """The command, as a shell reads it, that uses a model trained on data of that kind (`dataset.kind`)."""
    run = shlex.quote(str(path))
    return f"onstep chat {run}" if kind == "chat" else f'onstep generate {run} "def "'


def _is_drawn(directory: RunDir) -> bool:
    """Plot the loss; False if the run logged none or plotting failed."""
    from onstep.analysis.logs.files import log_in
    from onstep.analysis.plots.plots import plot_loss

    log = log_in(directory.path)
    if not log.exists():
        return False
    try:
        plot_loss(log, directory.plot)
    except DataError:
        return False
    except Exception as error:  # noqa: BLE001 - the run is done; a failed plot must not change the exit code
        logger.warning("cannot plot the loss: %s: %s", type(error).__name__, error)
        return False
    return True
