"""`onstep demo`: trains a small GPT in a minute or two, and shows what it has learned."""

from __future__ import annotations

from typing import Annotated

import typer

from onstep.cli.completed_words import complete_pairs
from onstep.cli.config import configuration
from onstep.cli.runs import near
from onstep.cli.train import Quiet, Verbose, announce, run_to_its_end, with_level

SAMPLES = "onstep.cli.demo.samples:DemoSamples"


def demo(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE ...]", autocompletion=complete_pairs, help="Overrides of the recipe."),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a small GPT on the source code of Python's standard library: a minute or two on two CPU cores.

    It shows what the model writes before, during and after training, and the loss. The run is stored in runs/demo; the
    same command continues an interrupted run, and shows the end of a finished one again.
    """
    config, names = configuration(with_level(words or [], quiet=quiet, verbose=verbose), "demo")
    config.run.name = config.run.name or "demo"
    announce(config, names)
    from onstep.training import pretrain  # after the first line: this imports torch

    state = run_to_its_end(pretrain, config, [SAMPLES, *names], [])
    if state.run_dir is not None and state.world.is_main:
        from onstep.cli.demo.ending import show_end

        show_end(near(state.run_dir.path))
