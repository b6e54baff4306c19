"""`onstep logs replay`: fill a tracker from the journal of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from onstep.cli.log_paths import find_log
from onstep.errors import OnstepError
from onstep.journal import Record
from onstep.sinks import make_sink
from onstep.sinks import replay as send

BAR_DELAY_SECONDS = 0.5


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below runs/, or a journal.")],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="csv, tensorboard, wandb, mlflow, comet or trackio.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where local files go; without it, the run's folder.")
    ] = None,
) -> None:
    """Fill a tracker from the journal of a run, completely, as a run of its own.

    For a tracker that was not there, was unreachable or dropped points while the run trained. Waits until everything is
    handed over.
    """
    journal = find_log(run)
    sink = make_sink(to)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("onstep.sinks").setLevel(logging.INFO)  # trackers say there where they record
    target = journal.parent if output is None else output
    try:
        num_sent = send(journal, sink, output=target, progress=_with_bar)
    except OnstepError:
        raise
    except Exception as error:  # any tracker's own
        raise OnstepError(f"The tracker {to!r} could not be filled: {type(error).__name__}: {error}") from error
    where = getattr(sink, "location", None) or f"{to} (its local files, if any, are below {target})"
    print(f"{num_sent} records of {journal} sent to {where}")


def _with_bar(records: list[Record]) -> Iterator[Record]:
    """The records, under a progress bar where there is a terminal and it takes a while."""
    yield from tqdm(records, unit="record", leave=False, disable=None, delay=BAR_DELAY_SECONDS)
