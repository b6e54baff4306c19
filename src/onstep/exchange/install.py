"""Makes the exchange of names in this process, and in the processes that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onstep.errors import ConfigError
from onstep.exchange.exchanging import ExchangingFinder, exchange_loaded, refuse_if_in_use, restore
from onstep.exchange.names import number_of_names

VARIABLE = "ONSTEP_EXCHANGES_NAMES"
"""Set in the environment of processes that are to make the exchange when they start."""
_STARTUP = Path(__file__).parent / "child_processes"


def install(*, says_so: bool = True) -> None:
    """Let the names of the table be Onstep's in this process from now on; a second call has no effect.

    Args:
        says_so: print one line about it to standard error, on the main rank.

    Raises:
        ConfigError: if a module holds one of the names already.
    """
    if is_installed():
        return
    refuse_if_in_use()
    sys.meta_path.insert(0, ExchangingFinder())
    exchange_loaded()
    if says_so and os.environ.get("RANK", "0") == "0" and not _is_child():
        more = number_of_names() - 3
        sys.stderr.write(
            f"onstep: Trainer, TrainingArguments, TrainerCallback and {more} more names of transformers are Onstep's.\n"
        )


def is_installed() -> bool:
    """Whether the exchange was made in this process."""
    return any(isinstance(finder, ExchangingFinder) for finder in sys.meta_path)


def install_in_children() -> None:
    """Let each Python process that this one starts make the exchange first, with the same installation of Onstep."""
    if os.environ.get(VARIABLE) != "1":
        os.environ[VARIABLE] = "1"
        paths = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@contextmanager
def exchanged() -> Iterator[None]:
    """Make the exchange for the block, unless it was made or the names are in use already."""
    is_outer = is_installed()
    try:
        install(says_so=False)
    except ConfigError:
        is_outer = True
    try:
        yield
    finally:
        if not is_outer:
            sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, ExchangingFinder)]
            restore()


def _is_child() -> bool:
    """Whether `multiprocessing` has started this process, which runs its parent's script again."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
