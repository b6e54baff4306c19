"""Runs a user's script up to the place where its Trainer would train, for `onstep rewind --script`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from onstep.cli.program import Program, run_as_main
from onstep.errors import ConfigError

OPTION, MODULE_OPTION = "--script", "-m"
WORDS = "onstep.words_of_script"
"""Entry of a context: the arguments of the script."""


class ScriptCommand(TyperCommand):
    """A command whose option `--script FILE` or `-m MODULE` comes last: everything after it is for the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the context's class has no public name
        """Keep the arguments of the script aside."""
        options = (OPTION, MODULE_OPTION)
        at = next((at for at, word in enumerate(args) if word in options or word.startswith(f"{OPTION}=")), len(args))
        end = at + (2 if args[at : at + 1] in ([option] for option in options) else 1)
        ctx.meta[WORDS] = args[end:]
        return super().parse_args(ctx, args[:end])


def run_to_training(program: Program, look: Callable[[Any], None]) -> None:
    """Run a program until it would train, and call `look` there, in place of the training.

    `look` receives what rewinds a run with the script's Trainer, as `onstep.rewind`. What the script prints goes to
    standard error, and its Trainer writes to a temporary directory.

    Raises:
        ConfigError: if there is no such script or module, or it never trains.
    """
    if not program.is_module and not Path(program.name).is_file():
        raise ConfigError(f"{OPTION} {program.name}: the file does not exist; give the script that trained the run.")
    from onstep.past.leftovers import temporary_directory
    from onstep.trainer.rewinding import rewound
    from onstep.trainer.takeover import TakenOver, TakeOver, taking_over

    output = sys.stdout
    failures: list[BaseException] = []

    def at_training(trainer: Any) -> None:
        try:
            with redirect_stdout(output):
                look(partial(rewound, trainer))
        except BaseException as error:  # noqa: BLE001 - the script does not handle it
            failures.append(error)

    with temporary_directory("onstep-script-") as directory:
        takeover = TakeOver(at_training, directory)
        with taking_over(takeover), _main_restored(), redirect_stdout(sys.stderr):
            try:
                run_as_main(program)
            except TakenOver:
                pass
            except SystemExit as end:
                if not takeover.is_done and end.code not in (None, 0):
                    raise
    if failures:
        raise failures[0]
    if not takeover.is_done:
        raise ConfigError(f"{program.name} ended without Trainer.train(); give the script that trained the run.")


@contextmanager
def _main_restored() -> Iterator[None]:
    """Restore what a program that runs as `__main__` sets."""
    arguments, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = arguments, path, main
