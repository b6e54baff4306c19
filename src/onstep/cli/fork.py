"""`onstep fork`: a new run that begins at the end of a step of another run, with something changed."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from onstep.cli.application import Imports
from onstep.cli.first_checks import check_start, is_main
from onstep.cli.train import Quiet, Verbose, run_to_its_end, with_level
from onstep.cli.train_ending import suggest
from onstep.cli.why import find_run
from onstep.config.keys import typed_copy
from onstep.config.suggestions import shown
from onstep.console.style import in_words
from onstep.errors import CheckpointError, ConfigError, DataError, RunExistsError

if TYPE_CHECKING:
    from onstep.past.forks import Fork
    from onstep.training import GlobalState

_POLL_SECONDS = 0.1
_IDS = re.compile(r"\d+(\s*,\s*\d+)*")

Without = Annotated[
    str | None,
    typer.Option(
        "--without-samples", metavar="IDS", help="Leave these samples out, such as 3,7, as `onstep rewind` shows them."
    ),
]


def fork(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RUN@STEP [KEY=VALUE ...]", help="The end of a step of a run, and what differs."),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new run; default: RUN-at-STEP.")] = None,
    without_samples: Without = None,
    lr_factor: Annotated[float | None, typer.Option(help="Factor on the learning rate.")] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a new run that begins at the end of a step of another one, with something changed.

    Its state is that of the parent at that step: from its checkpoint, or repeated from the newest one before. The
    parent's files are not touched. With nothing changed, the fork does what the parent did. The same command continues
    a fork that was interrupted; pass the --import and callbacks= of the parent again.
    """
    source, *rest = words
    run, step = run_and_step(source)
    pairs = with_level([one for one in rest if not one.startswith("callbacks=")], quiet=quiet, verbose=verbose)
    ids = sample_ids(without_samples)
    from onstep.past.forks import plan_fork

    plan = plan_fork(find_run(run), step, name, overrides=pairs, without_samples=ids, lr_factor=lr_factor)
    names = callback_names(rest)
    check_start(typed_copy(plan.config), names, imports or [])
    suggest(run_fork(plan, names, imports or []))


def run_and_step(source: str) -> tuple[str, int]:
    """The run and the step that `RUN@STEP` names.

    Raises:
        ConfigError: for anything else.
    """
    run, _, step = source.rpartition("@")
    if not run or not step.isascii() or not step.isdigit():
        raise ConfigError(
            f"{shown(source)} must have the form RUN@STEP, such as runs/a@340: a run, and one of its steps."
        )
    return run, int(step)


def sample_ids(text: str | None) -> list[int]:
    """The ids in `3,7`.

    Raises:
        ConfigError: for anything else.
    """
    if text is None:
        return []
    if not _IDS.fullmatch(text.strip()):
        raise ConfigError(f"--without-samples must be ids of samples, such as 3,7, got {shown(text)}.")
    return [int(one) for one in text.split(",")]


def callback_names(words: list[str]) -> list[str]:
    """The callbacks that `callbacks=` names."""
    from onstep.cli.config import configuration

    return configuration([one for one in words if one.startswith("callbacks=")], None)[1]


def run_fork(plan: Fork, names: list[str], imports: list[str]) -> GlobalState:
    """Make the fork's directory or find it, and train: first what the parent did up to the step, then its own part."""
    from onstep.past.fork_directory import begin_own_part, discard, has_reached_step, is_prepared, prepare
    from onstep.training import pretrain

    is_new = False
    if is_main():
        is_new = prepare(plan)
        print(in_words(plan.describe(), sys.stdout) if is_new else f"continuing {plan.directory.path}", flush=True)
    while not is_prepared(plan):  # by rank 0
        time.sleep(_POLL_SECONDS)
    try:
        if not has_reached_step(plan):
            state = run_to_its_end(pretrain, plan.up_to_step(), names, imports)
            if state.exits.decided != "interval":
                return state
            imports = []
        if is_main():
            begin_own_part(plan)
        return run_to_its_end(pretrain, typed_copy(plan.config), names, imports)
    except (CheckpointError, ConfigError, DataError, RunExistsError):
        if is_new and plan.directory.read().get("step", 0) <= plan.origin.step:
            discard(plan)
        raise
