"""`onstep fork`: a new run that begins at the end of a step of another run, with something changed."""

from __future__ import annotations

import re
import shutil
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.analysis.plots.terminal_curve import terminal_curve
from onstep.analysis.text_tables import table
from onstep.cli.application import Imports
from onstep.cli.completed_words import complete_forks
from onstep.cli.config import import_file, load_callback
from onstep.cli.first_checks import check_start, is_main
from onstep.cli.train import Quiet, Verbose, run_to_its_end, with_level
from onstep.cli.train_ending import suggest
from onstep.cli.why import find_run
from onstep.config.keys import typed_copy
from onstep.config.suggestions import shown
from onstep.console.style import in_words
from onstep.errors import CheckpointError, ConfigError, DataError, RunExistsError
from onstep.stores.urls import is_url

if TYPE_CHECKING:
    from onstep.config import ConfigContainer
    from onstep.past.forks import Fork
    from onstep.training import GlobalState

_POLL_SECONDS = 0.1
_DRY_STEPS = 50
_MOST_ROWS = 20
"""Steps that the table of a dry fork shows."""
_HEIGHT = 8
"""Lines of a curve."""
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
        typer.Argument(
            metavar="RUN@STEP [KEY=VALUE ...]",
            autocompletion=complete_forks,
            help="The end of a step of a run, and what differs.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new run; default: RUN-at-STEP.")] = None,
    without_samples: Without = None,
    lr_factor: Annotated[float | None, typer.Option(help="Factor on the learning rate.")] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Only show the losses of its first steps beside those of the parent.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="With --dry: how many steps; default: 50.")] = None,
    imports: Imports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a new run that begins at the end of a step of another one, with something changed.

    Its state is that of the parent at that step: from its checkpoint, or repeated from the newest one before. The
    parent's files are not touched. With nothing changed, the fork does what the parent did. The same command continues
    a fork that was interrupted. The parent's callbacks are attached again.
    """
    source, *rest = words
    run, step = run_and_step(source)
    if is_url(run) and not dry:
        raise ConfigError(
            f"{source}: a fork is a run beside its parent, which is in an object store; start one from its checkpoint: "
            f"onstep train {run} run.name=NAME checkpoint.load={source} KEY=VALUE, or add --dry."
        )
    pairs = with_level([one for one in rest if not one.startswith("callbacks=")], quiet=quiet, verbose=verbose)
    ids = sample_ids(without_samples)
    from onstep.past.forks import plan_fork

    plan = plan_fork(find_run(run), step, name, overrides=pairs, without_samples=ids, lr_factor=lr_factor)
    names = callback_names(rest)
    if dry or steps is not None:
        if not dry:
            raise ConfigError("--steps requires --dry; a fork that is kept ends at train.train_iters.")
        show_dry(plan, steps or _DRY_STEPS, names, imports or [])
        return
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

    def train(config: ConfigContainer) -> GlobalState:
        start, own = _as_parent(plan, names)
        return run_to_its_end(partial(pretrain, **start), config, names, imports, own)

    is_new = False
    if is_main():
        is_new = prepare(plan)
        print(in_words(plan.describe(), sys.stdout) if is_new else f"continuing {plan.directory.path}", flush=True)
    while not is_prepared(plan):  # by rank 0
        time.sleep(_POLL_SECONDS)
    try:
        if not has_reached_step(plan):
            state = train(plan.up_to_step())
            if state.exits.decided != "interval":
                return state
            imports.clear()
        if is_main():
            begin_own_part(plan)
        return train(typed_copy(plan.config))
    except (CheckpointError, ConfigError, DataError, RunExistsError):
        if is_new and plan.directory.read().get("step", 0) <= plan.origin.step:
            discard(plan)
        raise


def _as_parent(plan: Fork, names: list[str]) -> tuple[dict[str, Any], list[object]]:
    """Arguments of `pretrain` that the parent had by its run.json, and its callbacks but for those that are named."""
    from onstep.past.code import own_callbacks

    content = plan.parent.read()
    code = dict(content.get("user_code") or {})
    given = {one.rpartition(":")[2] for one in names}
    code["callbacks"] = [one for one in code.get("callbacks", []) if one["name"].rpartition(":")[2] not in given]
    content = {**content, "user_code": code}
    try:
        return _functions_of(content), own_callbacks(content, ())
    except ConfigError as error:
        found = str(error).partition("; rewind it")[0]
        remedy = "name callbacks that are in a module of their own: --import FILE.py callbacks='[FILE:Class]'"
        raise ConfigError(f"{found}; {remedy}.") from None


def _functions_of(content: dict[str, Any]) -> dict[str, Any]:
    from onstep.past.code import own_functions

    start: dict[str, Any] = {"pre_wrap_hooks": own_functions(content, "pre_wrap_hooks", "pre_wrap_hooks")}
    if found := own_functions(content, "forward_step", "forward_step_func"):
        start["forward_step_func"] = found[0]
    return start


def show_dry(plan: Fork, num_steps: int, names: list[str], imports: list[str]) -> None:
    """Print the losses of a fork's first steps beside those of its parent, as a table and as curves."""
    for path in imports:
        import_file(path)
    if is_main():
        print(f"{plan.describe()}\nloading PyTorch ...", file=sys.stderr, flush=True)
    from onstep.past.dry_fork import dry_fork

    found = dry_fork(plan, num_steps, [load_callback(one) for one in names])
    if not is_main():
        return
    parent = dict(found.parent)
    pairs = [(step, parent[step], loss) for step, loss in found.fork if step in parent]
    every = -(-len(pairs) // _MOST_ROWS)
    chosen = [pair for at, pair in enumerate(pairs) if at % every == 0 or at == len(pairs) - 1]
    rows = [[str(step), f"{was:.6g}", f"{loss:.6g}", f"{loss - was:+.3g}"] for step, was, loss in chosen]
    origin = "its record" if found.is_recorded else "repeated too"
    print("\n".join(table([["step", "parent", "fork", "difference"], *rows], ">>>>")))
    width = min(shutil.get_terminal_size().columns, 100)
    for name, curve in ((f"loss of the parent ({origin})", found.parent), ("loss of the fork", found.fork)):
        if lines := terminal_curve(curve, width=width, height=_HEIGHT):
            print("\n".join(["", name, *lines]))
    if pairs:
        mean = sum(loss - was for _, was, loss in pairs) / len(pairs)
        print(f"\nmean difference of {len(pairs)} steps: {mean:+.4g}")
